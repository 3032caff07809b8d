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


def listed(program: str) -> str:
    """What `program` prints to its errors, and then the names of all modules that are loaded."""
    code = f"import sys\n{program}\nprint(*sys.modules, file=sys.stderr)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stderr


def loaded(program: str) -> set[str]:
    """The names of all modules that are loaded after `program`."""
    return set(listed(program).split())


def test_help_loads_next_to_nothing() -> None:
    program = "from outlast import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass"
    heavy = {"pydantic", "yaml", "rich", "psutil", "asyncio", "outlast.job.spec", "outlast.job.status", "outlast.local.backend"}
    assert not loaded(program) & (TORCH | heavy)


def test_the_table_of_roles_loads_nothing_else() -> None:
    added = loaded("import outlast.__main__") - loaded("import importlib")
    assert added == {"outlast", "outlast.__main__"}


def test_a_command_loads_what_it_needs_and_no_torch() -> None:
    assert not loaded(
        'from outlast.local.backend import LocalBackend\nfrom pathlib import Path\nLocalBackend(Path("x")).list()'
    ) & (TORCH | PEOPLE | STORES)


def test_the_operator_needs_no_torch_no_store_and_nobody_to_talk_to() -> None:
    assert not loaded("import outlast.kubernetes.operator.main, outlast.kubernetes.operator.reconciler_by_kind") & (
        TORCH | PEOPLE | STORES
    )


def test_who_needs_no_cluster_loads_no_client_of_one() -> None:
    assert not loaded("import outlast.rendezvous.transport") & {"outlast.kubernetes.api", "httpx2", "lightkube"}
    assert "outlast.kubernetes.api" in loaded("from outlast.rendezvous import transport\ntransport.of('kubernetes://x')")


def test_what_a_worker_imports_comes_in_its_order_and_nothing_of_it_is_compiled_for_one_python() -> None:
    """Training must run in the Python of an image to which Outlast is brought, see `worker.launch.relocatable`, and knows nothing
    of who runs it."""
    blocked = ("pydantic", "pydantic_core", "msgspec", "lightkube", "isal", "setproctitle", "_yaml")
    stages = (
        "from outlast.training import progress",
        "from outlast.training import *",
        "from outlast.worker.launch import warm_process; warm_process.preload()\n"
        "import outlast.kubernetes.board, outlast.hf, outlast.storage.store.client, outlast.recipes.smoke",
    )
    program = f"sys.modules.update(dict.fromkeys({blocked}))\n"
    program += "\nprint('|', *sys.modules, file=sys.stderr)\n".join(stages) + "\nprint('|', end=' ', file=sys.stderr)"
    reporting, training, all_of_it = (set(each.split()) for each in listed(program).split("|")[1:])
    assert not reporting & (TORCH - {"outlast.training"})
    assert "torch" in training
    assert not training & (PEOPLE | {"psutil", "outlast.job.backend", "outlast.job.spec", "outlast.worker.agent.agent"})
    assert "outlast.training.session" in all_of_it


@pytest.mark.parametrize(("process", "later"), [("local.launcher", set()), ("worker.agent.agent", JOB)])
def test_what_runs_beside_the_training_is_light_and_an_agent_reads_its_job_later(process: str, later: set[str]) -> None:
    assert not loaded(f"import outlast.{process}") & (TORCH | PEOPLE | STORES | {"outlast.local.backend"} | later)


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
    later = {
        "typer",
        "asyncio",
        "http.server",
        "outlast.worker.agent.agent",
        "outlast.cli.commands",
        "outlast.rendezvous",
        "outlast.job.spec",
    }
    assert {"outlast.worker.agent", "outlast.worker.launch.warm_request"} <= (found := loaded(program))
    assert not found & later


def test_an_operator_without_its_packages_says_what_to_install() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None\nfrom outlast import cli\ncli.main(['operator'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "prometheus_client is not installed; for clusters: pip install 'outlast[kubernetes]'"
    )
    assert "Traceback" not in done.stderr
