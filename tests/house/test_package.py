"""The package as it is published: what its distributions hold, its programs, its types; and the workflows that publish it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from outlast import __version__
from outlast.kubernetes.manifests.installed import operator_deployment

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())


def run(*words: object, cwd: Path | None = None) -> str:
    done = subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source distribution, and the wheel that is made from it."""
    directory = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT)
    return directory


@pytest.fixture(scope="module")
def programs(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, and with the libraries that are installed here."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    (wheel,) = distributions.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    Path(packages, "libraries.pth").write_text("\n".join(libraries))
    return environment / "bin"


@pytest.mark.slow
def test_the_distributions_are_whole_and_no_larger_than_they_need(distributions: Path) -> None:
    source, wheel = distributions / f"outlast-{__version__}.tar.gz", distributions / f"outlast-{__version__}-py3-none-any.whl"
    assert sorted(distributions.glob("outlast-*")) == sorted([source, wheel])
    run(sys.executable, "-m", "twine", "check", "--strict", source, wheel)
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    packaged = {name for name in names if not name.startswith(f"outlast-{__version__}.dist-info/")}
    tracked = {path.removeprefix("src/") for path in run("git", "ls-files", "src", cwd=ROOT).splitlines()}
    assert packaged == tracked
    with tarfile.open(source) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert top >= {"src", "tests", "pyproject.toml", "LICENSE", "README.md"}


@pytest.mark.slow
def test_the_programs_of_the_wheel_run_where_nothing_else_of_outlast_is(programs: Path, tmp_path: Path) -> None:
    assert "\nTrain:\n" in run(programs / "outlast", "--help", cwd=tmp_path)
    assert run(programs / "kubectl-outlast", "list", "--help", cwd=tmp_path).startswith("Usage: kubectl outlast list")
    assert "wait\t" in run(programs / "kubectl_complete-outlast", "wai", cwd=tmp_path)
    place = run(programs / "python", "-c", "import outlast; print(outlast.__file__)", cwd=tmp_path)
    assert place.startswith(str(programs.parent))


@pytest.mark.slow
def test_programs_with_types_pass_mypy_strict_against_the_wheel(programs: Path, tmp_path: Path) -> None:
    for name in ("from_python.py", "exact.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    (tmp_path / "wrong.py").write_text("import outlast\n\noutlast.find('a').wait(step='10')\noutlast.Run.nothing\n")
    words = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={programs}/python", f"--cache-dir={tmp_path}/cache"]
    words.append("--untyped-calls-exclude=torch")  # Tensor.backward has no types
    assert run(*words, "from_python.py", "exact.py", cwd=tmp_path) == "Success: no issues found in 2 source files\n"
    done = subprocess.run([*words, "wrong.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(r"^wrong\.py:(\d+): error: .* +\[([a-z-]+)\]$", done.stdout, re.M)
    assert found == [("3", "arg-type"), ("4", "attr-defined")]


@pytest.mark.slow
def test_the_workflows_are_well_formed() -> None:
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)


def test_the_workflows_publish_what_there_is() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())["jobs"]
    images = jobs["images"]["strategy"]["matrix"]["include"]
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "images" / "Dockerfile").read_text(), re.M)
    assert {each["target"] for each in images} <= set(stages)
    tag = f"/operator:{__version__.rpartition('.')[0]}"
    assert operator_deployment.OPERATOR_IMAGE.endswith(tag), "that of the minor version"
    assert jobs["wheels"]["permissions"] == {"id-token": "write"}, "PyPI trusts the workflow: there is no token"
    for path in WORKFLOWS:
        assert not re.search(r"secrets\.(?!GITHUB_TOKEN)", path.read_text()), path
