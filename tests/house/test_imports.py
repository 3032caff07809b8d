"""What each kind of process loads, seen in a fresh interpreter: a light process that imports torch is a slow and a big one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outlast.job.contract import Env

TORCH = {"torch", "numpy", "outlast.training"}
PEOPLE = {"typer", "rich", "outlast.cli"}
STORES = {"obstore", "botocore"}
JOB = {"pydantic", "yaml", "outlast.job.spec", "outlast.storage.store", "outlast.kubernetes.api"}


def loaded(*programs: str) -> list[set[str]]:
    """The names of all modules that are loaded after each of these programs, which one process runs one after the other."""
    code = "import sys\n" + "".join(f"{program}\nprint(*sys.modules, '|', file=sys.stderr)\n" for program in programs)
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr
    return [set(names.split()) for names in said.split("|")[:-1]]


def test_help_loads_next_to_nothing_and_completion_no_torch(tmp_path: Path) -> None:
    run = "try:\n    cli.main({})\nexcept SystemExit:\n    pass"
    words = {"_OUTLAST_COMPLETE": "complete_bash", "COMP_WORDS": "outlast status ", "COMP_CWORD": "2", "HOME": str(tmp_path)}
    complete = f"import os\nos.chdir({str(tmp_path)!r})\nos.environ |= {words}\n{run.format('')}"
    helped, completed = loaded(f"from outlast import cli\n{run.format(['--help'])}", complete)
    heavy = {"pydantic", "yaml", "rich", "psutil", "asyncio", "outlast.job.spec", "outlast.job.status", "outlast.local.backend"}
    assert not helped & (TORCH | heavy)
    assert "outlast.local.backend" in completed
    assert not completed & {"torch", "kubernetes", "lightkube"}


def test_the_table_of_roles_and_the_package_load_nothing_else() -> None:
    before, after = loaded("import importlib", "import outlast.__main__; outlast.__version__")
    assert after - before == {"outlast", "outlast.__main__"}


def test_who_needs_no_cluster_loads_no_client_of_one() -> None:
    before, after = loaded("import outlast.rendezvous.transport as transport", "transport.of('kubernetes://x')")
    assert not before & {"outlast.kubernetes.api", "httpx2", "lightkube"}
    assert "outlast.kubernetes.api" in after


@pytest.mark.parametrize("preloads", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_worker_imports_comes_in_its_order_and_nothing_of_it_is_compiled_for_one_python(preloads: bool) -> None:
    """Training must run in the Python of an image to which Outlast is brought, see `worker.launch.relocatable`, and knows nothing
    of who runs it."""
    blocked = ("pydantic", "pydantic_core", "msgspec", "lightkube", "isal", "setproctitle", "_yaml")
    stages = (
        "from outlast.training import progress",
        "from outlast.training import *",
        f"if {preloads}:\n    import outlast.hf; from outlast.worker.launch import warm_process; warm_process.preload()\n"
        "import outlast.kubernetes.board, outlast.storage.store.client, outlast.recipes.smoke",
    )
    reporting, training, all_of_it = loaded(f"sys.modules.update(dict.fromkeys({blocked}))\n{stages[0]}", *stages[1:])
    assert not reporting & (TORCH - {"outlast.training"})
    assert "torch" in training
    assert not training & (PEOPLE | {"psutil", "outlast.job.backend", "outlast.job.spec", "outlast.worker.agent.agent"})
    assert "outlast.training.session" in all_of_it


COMMAND = "import outlast.local.backend, pathlib; outlast.local.backend.LocalBackend(pathlib.Path('x')).list()"


@pytest.mark.parametrize(
    ("program", "later"),
    [
        ("import outlast.local.launcher", {"outlast.local.backend"}),
        ("import outlast.worker.agent.agent", {"outlast.local.backend", *JOB}),
        ("import outlast.kubernetes.operator.main", set()),
        (f"import outlast.job.spec, outlast.checkpoints; {COMMAND}", set()),
    ],
    ids=["launcher", "agent, which reads its job later", "operator", "command"],
)
def test_what_runs_beside_the_training_is_light(program: str, later: set[str]) -> None:
    [found] = loaded(program)
    assert not found & (TORCH | PEOPLE | STORES | later)


def test_a_worker_starts_its_warm_process_before_it_imports_what_else_it_needs(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    variables = {Env.WORKER: "0", Env.STATE: str(tmp_path), Env.JOB_FILE: str(tmp_path / "job.yaml")}
    program = f"""
import os, subprocess
from outlast.job.workerfiles import log_pipe
log_pipe.Output = object  # leaves the streams alone
os.environ |= {variables}
def started(command, **_):
    assert command[1:4] == ["-m", "outlast", "warm"]
    raise SystemExit
subprocess.Popen = started
from outlast import cli
try:
    cli.main(["agent"])
except SystemExit:
    pass"""
    [found] = loaded(program)
    assert {"outlast.worker.agent", "outlast.worker.launch.warm_request"} <= found
    later = {"outlast.worker.agent.agent", "outlast.cli.commands", "outlast.rendezvous", "outlast.job.spec"}
    assert not found & (later | {"typer", "asyncio", "http.server"})


def test_an_operator_without_its_packages_says_what_to_install() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None\nfrom outlast import cli\ncli.main(['operator'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs the library prometheus_client; run: pip install 'outlast[kubernetes]'" in done.stderr
    assert "Traceback" not in done.stderr
