"""Images without Outlast: an agent that is copied to another place trains in the Python of an image, or says why it cannot."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from bare_pods import ARGS, Final, Pods
from outlast.base.errors import OutlastError
from outlast.job import contract, spec
from outlast.worker.launch import relocatable
from outlast.worker.prepare import image_python, python_env
from packages import a_wheel

NEEDED = "; training needs Python 3.11 with PyTorch 2.11, or newer: choose another image, or add them to this one"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent's directory, moved from where it was made."""
    place = tmp_path_factory.mktemp("agent")
    relocatable.make(place / "made")
    return (place / "made").rename(place / "moved")


@pytest.fixture
def image(tmp_path: Path) -> dict[str, str]:
    """The variables of an image that has torch, and neither Outlast nor what it requires."""
    home = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python3*/site-packages")
    wanted, seen = ["torch", "numpy"], {"outlast"}
    while wanted:
        name = wanted.pop()
        if name in seen or seen.add(name):
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        wanted += relocatable._required(distribution)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    (trap := tmp_path / "trap").mkdir()
    (trap / "pydantic.py").write_text("raise ImportError('a version of the image that does not suit the agent')")
    return {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(trap), "LD_LIBRARY_PATH": "/nonexistent"}


def in_image(pods: Pods, agent: Path, image: Mapping[str, str]) -> Pods:
    pods.command, pods.environ = [*relocatable.command(str(agent)), "-m", "outlast"], dict(image)
    return pods


@pytest.mark.slow
def test_an_image_with_torch_alone_trains_as_one_with_outlast(pods, agent: Path, image: dict[str, str], undisturbed: Final):
    two = in_image(pods(args=ARGS), agent, image)
    look = "import importlib.util as u; print([n for n in ('outlast', 'pydantic_core', 'psutil', 'yaml') if u.find_spec(n)])"
    assert subprocess.check_output(["python", "-c", look], env=image, text=True) == "[]\n"
    two.start(0, 1)
    two.wait(lambda: two.step() >= 25, "step 25")
    two.kill(1)
    two.start(1)
    assert two.codes() == {0: 0, 1: 0}
    assert two.final() == undisturbed(ARGS, 2)


def test_training_in_an_image_can_import_what_it_needs_now_and_then(agent: Path, image: dict[str, str]):
    program = "from outlast.worker.launch import relocatable as r; r.offer(); import outlast.kubernetes.board"
    program += "; import httpx2, obstore.store, botocore.session, yaml, psutil; httpx2.Client(); print(yaml.__file__)"
    environ = {**image, "PYTHONPATH": f"{agent / 'package'}:{image['PYTHONPATH']}"}
    assert str(agent) in subprocess.check_output(["python", "-c", program], env=environ, text=True)


@pytest.mark.slow
def test_requirements_come_on_top_of_the_python_of_the_image(agent: Path, image: dict[str, str], tmp_path: Path):
    a_wheel(tmp_path, "tiny")
    (tmp_path / "requirements.txt").write_text(f"--no-index\n--find-links {tmp_path}\ntiny\n")
    environ = {**image, "PYTHONPATH": f"{agent / 'package'}:{image['PYTHONPATH']}"}
    made = python_env.make(
        spec.Environment(requirements=str(tmp_path / "requirements.txt")), tmp_path / "cache", tmp_path, environ,
        say=print, stop=threading.Event(), base=image_python.find(environ),
    )  # fmt: skip
    program = "import tiny, torch, sys; print(torch.__file__)"
    torch = subprocess.check_output([made.python, "-c", program], env={**environ, **made.variables}, text=True)
    assert torch.startswith(str(tmp_path / "image"))


def test_an_image_that_cannot_train_ends_with_one_sentence(pods, agent: Path, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    one = in_image(pods(args=ARGS), agent, {"PATH": str(tmp_path / "bin")})
    one.start(0)
    assert one.codes(hurry=False) == {0: contract.Exit.MISCONFIGURED}
    assert f"outlast | worker 0: the image has no Python: there is neither python nor python3 on its PATH{NEEDED}" in one.log(0)


FOUND = {"version": [3, 12, 3], "torch": "2.11.0+cu128", "numpy": "2.1.0"}


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ({**FOUND, "version": [3, 10, 12]}, "Python 3.10.12, and Outlast needs 3.11 or newer"),
        ({**FOUND, "torch": ""}, "no PyTorch"),
        ({**FOUND, "torch": "2.5.1"}, "PyTorch 2.5.1, and Outlast needs 2.11 or newer"),
        ({**FOUND, "numpy": ""}, "no numpy, which Outlast needs beside PyTorch"),
    ],
)
def test_a_python_out_of_range_is_named_unless_there_is_another(tmp_path: Path, python: dict[str, object], reason: str):
    def put(name: str, found: dict[str, object]) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
        (tmp_path / name).chmod(0o755)

    put("python", python)
    environ = {"PATH": str(tmp_path)}
    with pytest.raises(OutlastError) as caught:
        image_python.find(environ)
    assert str(caught.value) == f"the image's {tmp_path}/python has {reason}{NEEDED}"
    put("python3", {**FOUND, "torch": "2.14.0a0+git1234"})
    assert image_python.find(environ).executable == f"{tmp_path}/python3"


def test_an_image_that_has_outlast_uses_its_own(agent: Path, tmp_path: Path):
    (tmp_path / "outlast").write_text('#!/bin/sh\necho "its own: $*"\n')
    (tmp_path / "outlast").chmod(0o755)
    command = [*relocatable.command(str(agent)), "-m", "outlast", "agent"]
    assert subprocess.check_output(command, env={"PATH": str(tmp_path)}, text=True) == "its own: agent\n"


def test_the_agent_finds_its_libraries_in_its_own_directory(agent: Path):
    """All modules that an agent imports load in an empty environment, without a shared library of the image."""
    modules = "outlast.worker.agent.agent, outlast.worker.agent.upload, outlast.cli.commands, outlast.kubernetes.board"
    libraries = "ssl, sqlite3, lzma, bz2, ctypes, zlib, hashlib, obstore, botocore.session, psutil, pydantic, yaml, httpx2"
    program = f"import {modules}, {libraries}; print(open('/proc/self/maps').read())"
    maps = subprocess.check_output([*relocatable.command(str(agent)), "-c", program], env={}, text=True)
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if ".so" in line}
    assert len(mapped) > 20
    assert {path for path in mapped if not path.startswith(str(agent))} == set()
