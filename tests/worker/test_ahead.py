"""What a script imports is imported ahead of its next start, if that does nothing but import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outlast.job import contract
from outlast.worker.launch import preloaded_imports

PACKAGES = {
    "good": "import good_too",
    "good_too": "x = 1",
    "reads_rank": "import os; rank = os.environ.get('RANK', '0')",
    "reads_path": "import os; path = os.environ.get('PATH')",
    "changed": "import os; mode = os.environ.get('MODE')",
    "raises": "raise ValueError('broken')",
    "exits": "import sys; sys.exit(1)",
    "dies": "import os; os.abort()",
    "threads": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "forks": "import os; os._exit(0) if os.fork() == 0 else os.wait()",
    "draws": "import random; random.random()",
    "opens": "import os; file = os.open('/dev/null', os.O_RDONLY)",
    "writes": "open('/dev/null', 'w').close()",
    "signals": "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
}
PROGRAM = """
import os, selectors, sys
from outlast.worker.launch import preloaded_imports as imports
places = sys.argv[1] + "/"
sys.path.insert(0, places)
imports.LEAST, imports.places = 1, lambda: [places]
selector = selectors.DefaultSelector()
ahead = imports.Preloader(selector, lambda parent: None)
environ = {**os.environ, "MODE": "a"}
pipe = ahead.pipe(environ)
names = sys.argv[2:]
modules = {n: f"{places}{n}.py" for n in [*names, "gone"]}
imported = imports.Imported(modules, {**environ, "MODE": "b", "RANK": "1", "LOCAL_RANK": "1"})
with open(pipe, "wb") as file:
    file.write(imports.json.dumps({"modules": imported.modules, "environ": imported.environ}).encode() + b"\\n")
while selector.get_map():
    for key, _ in selector.select(60):
        ahead.read(key.fd)
print(*ahead.modules)
while ahead.modules:
    ahead.import_next()
print(*(n for n in names if n in sys.modules))
"""


@pytest.mark.parametrize(
    "bad", [("reads_rank", "changed", "raises", "draws"), ("exits", "dies", "threads", "forks"), ("opens", "writes", "signals")]
)
def test_only_what_does_nothing_but_import_is_imported_ahead(tmp_path: Path, bad: tuple[str, ...]) -> None:
    for name, source in PACKAGES.items():
        (tmp_path / f"{name}.py").write_text(source)
    order = ["good_too", *bad, "reads_path", "good"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), *order], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "good_too reads_path good\n" * 2), done.stderr


@pytest.mark.parametrize("package", ["fsspec", "pyarrow"])
def test_transformers_is_not_left_out_for_what_it_imports(package: str) -> None:
    """fsspec looks for its own variables, and pyarrow's jemalloc has a thread that survives no fork and needs none."""
    program = """
import importlib.util, os, sys, numpy
from outlast.worker.launch import preloaded_imports as imports
name = sys.argv[1]
origin = importlib.util.find_spec(name).origin
print(*imports.trial([name], imports.Imported({name: origin}, {**os.environ, "RANK": "1"})))
"""
    done = subprocess.run([sys.executable, "-c", program, package], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{package}\n", done.stderr


def test_workers_of_one_machine_share_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.Env.SHARED, str(tmp_path))
    for name in ("good", "good_too"):
        (tmp_path / f"{name}.py").write_text(PACKAGES[name])
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "good_too", "good"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "good_too good\n" * 2
    results = list(tmp_path.glob("imports-*.json"))
    assert {result.read_text() for result in results} == {'["good_too", "good"]'}
    for result in results:
        result.write_text('["good_too"]')
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "good_too\n" * 2, "tried again"


def test_neither_the_scripts_own_modules_nor_what_is_there_nor_a_handful_are_worth_a_trial() -> None:
    theirs = {f"package.m{i}": f"/site/package/m{i}.py" for i in range(30)}
    others = {"helper": "/code/helper.py", "mpi4py": "/site/mpi4py.py", "torch": "/site/torch.py", "bad.m": "/site/bad/m.py"}
    imported = preloaded_imports.Imported({**others, **theirs, "built": "built-in"}, {})
    assert preloaded_imports.chosen(imported, loaded={"torch"}, tried={"bad"}, where=["/site/"]) == list(theirs)
    few = preloaded_imports.Imported(dict(list(theirs.items())[: preloaded_imports.LEAST - 1]), {})
    assert preloaded_imports.chosen(few, loaded=(), tried=(), where=["/site/"]) == []


def test_a_rank_that_ended_early_has_told_nothing() -> None:
    assert preloaded_imports.loads(b"") is None
    imported = preloaded_imports.loads(preloaded_imports.dumps(preloaded=()))
    assert imported is not None
    assert imported.modules["outlast.worker.launch.preloaded_imports"] == preloaded_imports.__file__
