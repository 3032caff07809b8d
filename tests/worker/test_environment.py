"""Packages that a job brings: requirements for pip on top of our Python, environments of conda beside it. No network needed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from outlast.base import file_locks
from outlast.base.errors import OutlastError, Stopped
from outlast.job import spec
from outlast.worker.prepare import image_python, installers, python_env, requirements
from packages import a_micromamba, a_wheel
from waits import until


class Maker:
    """Makes environments with a cache of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.cache = directory, directory / "cache"
        self.said: list[str] = []
        self.stop = threading.Event()
        self.environ = {**os.environ, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_NO_INDEX": ""}

    def make(self, *lines: str, conda: str = "") -> python_env.Made:
        """An environment of these requirements, or of this file for conda."""
        if conda:
            path = self.directory / "environment.yml"
            path.write_text(conda)
            asked = spec.Environment(conda=str(path))
        else:
            path = self.directory / "requirements.txt"
            path.write_text("\n".join(lines))
            asked = spec.Environment(requirements=str(path))
        return python_env.make(asked, self.cache, self.directory, self.environ, say=self.said.append, stop=self.stop)

    def python(self, made: python_env.Made, code: str) -> str:
        """What a program prints that runs in an environment."""
        argv = [made.python, "-c", code]
        return subprocess.check_output(argv, env={**self.environ, **made.variables}, text=True).strip()


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tmp_path)


# Requirements files


def test_a_requirements_file_becomes_lines_that_mean_the_same_anywhere(tmp_path: Path):
    for directory in ("wheels", "sub", "lib"):
        (tmp_path / directory).mkdir()
    (tmp_path / "wheels" / "a.whl").touch()
    (tmp_path / "sub" / "more.txt").write_text("numpy>=1 # why\n-c limits.txt\n")
    (tmp_path / "sub" / "limits.txt").write_text("six<2\n")
    (tmp_path / "requirements.txt").write_text(
        "# comment \\\n--no-index\n-f wheels\n-r sub/more.txt\neinops==0.8 \\\n  --hash=sha256:ab\n./lib[x]\n-e ./lib\n"
        'wheels/a.whl\ngit+https://host/x#egg=z\nb @ file:///b.whl\ntorch>=2 ; python_version > "3"\n'
        "--index-url=https://host/simple\n-r https://h/r\nlib"
    )
    found = requirements.read(tmp_path / "requirements.txt", "environment.requirements")
    assert found == requirements.Requirements(
        lines=(
            "--no-index",
            f"-f {tmp_path}/wheels",
            "numpy>=1",
            "einops==0.8   --hash=sha256:ab",
            f"{tmp_path}/lib[x]",
            f"-e {tmp_path}/lib",
            f"{tmp_path}/wheels/a.whl",
            "git+https://host/x#egg=z",
            "b @ file:///b.whl",
            'torch>=2 ; python_version > "3"',
            "--index-url=https://host/simple",
            "-r https://h/r",
            "lib",
        ),
        constraints=("six<2",),
    )
    assert (found.names("torch"), found.names("six"), found.names("inops"), found.hashed()) == (True, True, False, True)
    (tmp_path / "elsewhere").mkdir()
    assert requirements.read(found.write(tmp_path / "elsewhere" / "frozen.txt"), "x") == found
    (tmp_path / "elsewhere").rename(tmp_path / "a place")
    assert requirements.read(tmp_path / "a place" / "frozen.txt", "x") == found


def test_a_package_that_is_developed_beside_the_job_counts_by_its_files(tmp_path: Path):
    (tmp_path / "lib" / "build").mkdir(parents=True)
    (tmp_path / "lib" / "a.py").write_text("1")
    (tmp_path / "requirements.txt").write_text("./lib")

    def fingerprint() -> list[object]:
        return requirements.read(tmp_path / "requirements.txt", "x").fingerprint()

    before = fingerprint()
    shutil.copy2(tmp_path / "lib" / "a.py", tmp_path / "lib" / "build" / "a.py")  # as pip does
    assert fingerprint() == before
    os.utime(tmp_path / "lib" / "a.py", (4e9, 4e9))
    assert fingerprint() != before
    (tmp_path / "lib" / "pyproject.toml").write_text("")
    described = fingerprint()
    os.utime(tmp_path / "lib" / "pyproject.toml", (1, 1))
    assert fingerprint() != described, "older than a.py, but another file"


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            {"requirements.txt": "-r base.txt"},
            "environment.requirements: {0}/base.txt, included by {0}/requirements.txt, cannot be read: "
            "No such file or directory; correct the path or the file",
        ),
        (
            {"requirements.txt": "-r b.txt", "b.txt": "-r requirements.txt"},
            "environment.requirements: {0}/requirements.txt includes itself; remove one of the includes",
        ),
        (
            {"requirements.txt": b"\xff\xfe"},
            "environment.requirements: {0}/requirements.txt cannot be read: it is not text in UTF-8; "
            "correct the path or the file",
        ),
    ],
)
def test_a_requirements_file_that_cannot_be_read_is_said(tmp_path: Path, files: dict[str, str | bytes], sentence: str):
    for name, text in files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OutlastError) as caught:
        python_env.check(spec.Environment(requirements=str(tmp_path / "requirements.txt")))
    assert str(caught.value) == sentence.format(tmp_path)


def test_editing_the_requirements_does_not_change_a_run_on_its_way(tmp_path: Path):
    (tmp_path / "requirements.txt").write_text("-r base.txt\n-c limits.txt")
    (tmp_path / "base.txt").write_text("einops")
    (tmp_path / "limits.txt").write_text("einops<1")
    (tmp_path / "run").mkdir()
    frozen = python_env.frozen(spec.Environment(requirements=str(tmp_path / "requirements.txt")), tmp_path / "run")
    (tmp_path / "base.txt").write_text("other")
    (tmp_path / "limits.txt").unlink()
    found = requirements.read(Path(str(frozen.requirements)), "x")
    assert (found.lines, found.constraints) == (("einops",), ("einops<1",))


# Virtual environments


@pytest.mark.slow
def test_requirements_come_on_top_of_our_python(maker: Maker):
    """Torch stays the one below, other versions of small packages come before those below, and our entry points stay visible."""
    a_wheel(maker.directory, "tinydep")
    a_wheel(maker.directory, "tiny", "2.0", requires=("tinydep>=1", "torch>=2", "numpy"))
    a_wheel(maker.directory, "shellingham", "9.9")  # below there is another version
    (maker.directory / "more.txt").write_text("tiny\nshellingham==9.9")
    made = maker.make("--no-index", "--find-links .", "-r more.txt")
    seen = maker.python(
        made,
        "import importlib.metadata as m, json, outlast, shellingham, tiny, tinydep, torch\n"
        "print(json.dumps([tiny.VERSION, tinydep.VERSION, shellingham.VERSION, m.version('shellingham'), torch.__file__,"
        " outlast.__file__, [e.name for e in m.entry_points(group='torchrun.handlers')]]))",
    )
    import torch

    import outlast

    assert json.loads(seen) == ["2.0", "1.0", "9.9", "9.9", torch.__file__, outlast.__file__, ["outlast"]]
    assert maker.python(made, "import shutil; print(shutil.which('python'))") == made.python
    home = Path(made.python).parents[1]
    assert sum(path.lstat().st_size for path in home.rglob("*")) < 2 << 20, "nothing of ours is copied"
    maker.said.clear()
    assert maker.make("--no-index", "--find-links .", "tiny # a comment", "shellingham==9.9") == made
    assert maker.said == []
    (home / python_env.MARKER).unlink()  # as if we had been killed before the end
    (home / "half").touch()
    assert maker.make("--no-index", "--find-links .", "tiny", "shellingham==9.9") == made
    assert not (home / "half").exists()


def test_an_environment_depends_on_what_the_file_includes_and_on_the_packages_below(maker: Maker):
    def depends_on(text: str) -> list[object]:
        (maker.directory / "base.txt").write_text(text)
        (maker.directory / "requirements.txt").write_text("-r base.txt")
        base = image_python.Base("python", (3, 12), below=(below,))
        return python_env._Venv(requirements.read(maker.directory / "requirements.txt", "x"), "x", base).depends_on()

    below = maker.directory / "site-packages"
    first = depends_on("einops")
    assert depends_on("einops # newer") == first
    assert depends_on("einops<1") != first
    (below / "torch-1.0.dist-info").mkdir(parents=True)
    second = depends_on("einops")
    (below / "torch-1.0.dist-info").rename(below / "torch-2.0.dist-info")
    assert len({str(dependence) for dependence in (first, second, depends_on("einops"))}) == 3


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (("--no-index", "nosuch==1"), "pip failed: ERROR: Could not find a version that satisfies the requirement nosuch==1"),
        (
            ("--no-index", "--find-links .", "liar"),
            "training needs PyTorch, which cannot be imported (ImportError: sorry); add or correct",
        ),
    ],
)
def test_requirements_that_cannot_be_met_are_one_sentence(maker: Maker, lines: tuple[str, ...], sentence: str):
    a_wheel(maker.directory, "numpy", "99", code="raise ImportError('sorry')")
    a_wheel(maker.directory, "liar", requires=("numpy>=99",))
    with pytest.raises(OutlastError) as caught:
        maker.make(*lines)
    assert str(caught.value).startswith("environment.requirements (requirements.txt)")
    assert sentence in str(caught.value)
    assert not getattr(caught.value, "retry", False)
    (log,) = maker.cache.glob("environments/*.log")
    printed = [f"  {line}" for line in log.read_text().splitlines()]
    assert printed
    assert maker.said[0].endswith(f"; its output is in {log}")
    assert maker.said[1:] in ([], printed[-20:]), "the last lines when an installer fails, and nothing of one that succeeds"


def test_an_image_that_cannot_install_anything_is_named(maker: Maker):
    (maker.directory / "ensurepip.py").write_text("raise SystemExit('there is none')")
    maker.environ["PYTHONPATH"] = str(maker.directory)
    (maker.directory / "requirements.txt").write_text("six")
    base = dataclasses.replace(image_python.look(sys.executable, maker.environ), pip=False)
    asked = spec.Environment(requirements=str(maker.directory / "requirements.txt"))
    with pytest.raises(OutlastError, match="there is none; the image's Python has no pip; add pip to the image"):
        python_env.make(asked, maker.cache, maker.directory, maker.environ, say=maker.said.append, stop=maker.stop, base=base)


def test_a_network_that_is_away_is_tried_again(maker: Maker):
    maker.environ["PIP_RETRIES"] = "1"
    with pytest.raises(installers.Unavailable, match=r"the network or the machine is at fault, it is tried again$") as caught:
        maker.make("--index-url http://127.0.0.1:9/simple", "nosuch==1")
    assert caught.value.retry


def test_another_torch_is_not_installed_unasked(maker: Maker):
    a_wheel(maker.directory, "torch", "99.0")
    a_wheel(maker.directory, "vision", requires=("torch>=99",))
    with pytest.raises(OutlastError, match=r"vision .*depends? on torch>=99"):
        maker.make("--no-index", "--find-links .", "vision")


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of an index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/simple"


def wait_for_installer(maker: Maker) -> None:
    until(lambda: any("Looking in indexes" in log.read_text() for log in maker.cache.glob("environments/*.log")))


def test_a_worker_that_is_told_to_leave_ends_what_it_has_started(maker: Maker, silent: str):
    def leave() -> None:
        wait_for_installer(maker)
        maker.stop.set()

    threading.Thread(target=leave).start()
    with pytest.raises(Stopped):
        maker.make(f"--index-url {silent}", "nosuch==1")
    (lock,) = maker.cache.glob("environments/*.lock")
    assert file_locks.free(lock)
    assert not lock.with_suffix("").exists()


def test_what_installs_packages_holds_the_lock_when_its_worker_is_killed(maker: Maker, silent: str):
    """Else a worker that is started again would remove the environment under its hands."""
    asked = maker.directory / "requirements.txt"
    asked.write_text(f"--index-url {silent}\nnosuch==1")
    program = f"""
import os, sys, threading
from pathlib import Path
from outlast.job import spec
from outlast.worker.prepare import python_env as environment
asked, here = spec.Environment(requirements={str(asked)!r}), Path({str(maker.directory)!r})
environment.make(asked, here / "cache", here, os.environ, say=lambda text: print(text, flush=True), stop=threading.Event())
"""
    with subprocess.Popen([sys.executable, "-c", program], env=maker.environ, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout
        wait_for_installer(maker)
        (installer,) = psutil.Process(worker.pid).children()
        worker.kill()
    (lock,) = maker.cache.glob("environments/*.lock")
    assert not file_locks.free(lock)
    for process in (*installer.children(), installer):
        process.kill()
    psutil.wait_procs([installer], timeout=60)
    until(lambda: file_locks.free(lock))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["Looking", "ERROR: Cannot", "", "  caused by:", "    a needs b>9"], "ERROR: Cannot caused by: a needs b>9"),
        (["nothing of the kind", ""], "nothing of the kind"),
        ([], ""),
        (
            [
                "error: exited",
                "× egg_info failed",
                "│ code: 1",
                "╰─> output",
                "Traceback",
                "  File x",
                "KeyError: no",
                "OSError: b",
                "y",
            ],
            "error: exited × egg_info failed │ code: 1 ╰─> output Traceback OSError: b",
        ),
    ],
)
def test_the_last_words_of_a_program_are_what_it_died_of(lines: list[str], words: str):
    assert installers.error_message(lines) == words


# Conda


@pytest.fixture
def mamba(maker: Maker) -> Callable[..., python_env.Made]:
    maker.environ["PATH"] = f"{a_micromamba(maker.directory / 'bin')}{os.pathsep}{os.environ['PATH']}"
    return lambda text: maker.make(conda=text)


@pytest.mark.slow
def test_an_environment_of_conda_stands_alone_and_sees_outlast(maker: Maker, mamba: Callable[..., python_env.Made]):
    made = mamba("name: x\ndependencies: [python=3.11, pytorch]")
    assert maker.said[-1].startswith("made environment.conda (environment.yml): Python 3.11")
    seen = maker.python(made, "import outlast.training, torch, sys; print(outlast.__file__, 'pydantic' in sys.modules)")
    assert seen.endswith("/outlast/__init__.py False")
    assert str(maker.cache) in seen, "by a directory that holds nothing else"
    with pytest.raises(subprocess.CalledProcessError):
        maker.python(made, "import pydantic")
    maker.said.clear()
    assert mamba("name: another\ndependencies: [python=3.11, pytorch]") == made
    assert maker.said == []


@pytest.mark.parametrize(
    ("dependencies", "sentence"),
    [
        (
            "[impossible]",
            "environment.conda (environment.yml): micromamba failed: error    libmamba Could not solve for environment specs ",
        ),
        ("[old]", "environment.conda (environment.yml) has Python 3.9.1; Outlast needs 3.11 or newer: add python>=3.11"),
        (
            "[python]",
            "environment.conda (environment.yml): training needs PyTorch, which cannot be imported "
            "(ModuleNotFoundError: No module named 'torch'); add or correct it",
        ),
    ],
)
def test_an_environment_of_conda_that_cannot_train_is_one_sentence(mamba, dependencies: str, sentence: str):
    with pytest.raises(OutlastError) as caught:
        mamba(f"dependencies: {dependencies}")
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dependencies: python", "has no list `dependencies`; it must be an environment file of conda"),
        ("a: [", "is not YAML"),
        ("dependencies: [{pip: [-c limits.txt]}]", "has constraints (-c) for pip; write the versions into the list instead"),
    ],
)
def test_a_file_for_conda_that_is_none_is_said(maker: Maker, mamba, text: str, sentence: str):
    (maker.directory / "limits.txt").write_text("a<1")
    with pytest.raises(OutlastError) as caught:
        mamba(text)
    assert sentence in str(caught.value)


def test_without_conda_that_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "environment.yml").write_text("dependencies: [python]")
    with pytest.raises(OutlastError) as caught:
        python_env.check(spec.Environment(conda=str(tmp_path / "environment.yml")))
    assert str(caught.value) == (
        "environment.conda: this machine has neither micromamba, mamba nor conda; install one of them, "
        "or list the packages in a file for environment.requirements"
    )
