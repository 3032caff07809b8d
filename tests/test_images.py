"""Images: what docker, podman and buildah are asked to do, and Amazon's registry. Engines are recorders, the registry is moto."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outlast import __version__, cli
from outlast.cloud import ecr, images
from outlast.cloud.images import Build, Repository
from outlast.errors import OutlastError
from servers import KEY, REGION, SECRET, Place

ROOT = Path(__file__).parents[1]
ECR = "123456789012.dkr.ecr.us-east-1.amazonaws.com"


def a_build(**fields: Any) -> Build:
    return Build(**{"context": Path("src"), "file": Path("src/Dockerfile"), "tag": "ghcr.io/me/train:1", **fields})


# What is asked of each


@pytest.mark.parametrize("engine", images.ENGINES)
def test_an_image_of_this_machine_is_built_and_pushed_by_its_name(engine: str) -> None:
    cached = " --layers" if engine == "buildah" else ""
    one, two = images.build(engine, a_build(target="cuda", args={"B": "2", "A": "1 0"}, push=True))
    assert " ".join(one) == (
        f"{engine} build{cached} --file src/Dockerfile --target cuda --build-arg A=1 0 --build-arg B=2 "
        "--tag ghcr.io/me/train:1 src"
    )
    assert two == [engine, "push", "ghcr.io/me/train:1"]
    assert images.build(engine, a_build(target="cuda", args={"B": "2", "A": "1 0"})) == [one]


@pytest.mark.parametrize("engine", ["podman", "buildah"])
def test_an_image_of_several_platforms_is_a_list_that_is_pushed_as_a_whole(engine: str) -> None:
    one, two = images.build(engine, a_build(platforms=("linux/amd64", "linux/arm64"), push=True))
    assert one[-3:] == ["--manifest", "ghcr.io/me/train:1", "src"]
    assert one[one.index("--platform") + 1] == "linux/amd64,linux/arm64"
    assert two == [engine, "manifest", "push", "--all", "ghcr.io/me/train:1", "docker://ghcr.io/me/train:1"]


def test_docker_pushes_several_platforms_as_it_builds_them() -> None:
    wanted = a_build(platforms=("linux/amd64", "linux/arm64"), push=True)
    (command,) = images.build("docker", wanted)
    assert command[:3] == ["docker", "buildx", "build"]
    assert command[-4:] == ["--tag", "ghcr.io/me/train:1", "--push", "src"]
    with pytest.raises(OutlastError) as caught:
        images.build("docker", a_build(platforms=wanted.platforms))
    assert str(caught.value) == (
        "--platform linux/amd64,linux/arm64: docker keeps no image of several platforms; add --push, give one platform, "
        "or use --with podman"
    )


@pytest.mark.parametrize("engine", images.ENGINES)
def test_a_password_is_never_in_a_command(engine: str) -> None:
    assert images.login(engine, ECR, "AWS") == [engine, "login", "--username", "AWS", "--password-stdin", ECR]


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        (f"{ECR}/team/train:1.0", "team/train"),
        (f"{ECR}/train", "train"),
        ("ghcr.io/me/train:1", None),
        (f"{ECR}.evil.com/a", None),
    ],
)
def test_a_repository_of_amazon_is_known_by_its_name(tag: str, name: str | None) -> None:
    assert images.repository(tag) == (Repository(ECR, "123456789012", "us-east-1", name) if name else None)


@pytest.mark.parametrize(
    ("wanted", "broken", "taken"),
    [
        (None, {"docker": "", "podman": ""}, "docker"),
        (None, {"docker": "no daemon", "buildah": ""}, "buildah"),
        ("podman", {"podman": ""}, "podman"),
    ],
)
def test_the_first_engine_that_works_is_taken(wanted: str | None, broken: dict[str, str], taken: str) -> None:
    assert images.choose(wanted, broken) == taken


@pytest.mark.parametrize(
    ("wanted", "broken", "said"),
    [
        (None, {}, "there is no docker, podman or buildah on PATH; install one of them"),
        ("podman", {}, "there is no podman on PATH; install one of them"),
        (None, {"docker": "no daemon"}, "docker cannot be used: no daemon; start it, or install podman or buildah"),
        ("kaniko", {}, "--with kaniko: must be one of docker, podman, buildah"),
    ],
)
def test_without_an_engine_that_works_it_is_said_why(wanted: str | None, broken: dict[str, str], said: str) -> None:
    with pytest.raises(OutlastError) as caught:
        images.choose(wanted, broken)
    assert str(caught.value) == said


@pytest.mark.parametrize("tag", ["Train:1", "a b", "a//b", "train:", "-a", "ghcr.io/me/train:1:2"])
def test_what_cannot_name_an_image_is_refused(tag: str) -> None:
    with pytest.raises(OutlastError, match="cannot name an image; write registry/name:tag"):
        images.checked(tag, push=False)


def test_platforms_may_be_written_short() -> None:
    assert images.platforms("amd64, linux/arm64/v8") == ("linux/amd64", "linux/arm64/v8")
    with pytest.raises(OutlastError, match="--platform linux/AMD: expected amd64, arm64 or"):
        images.platforms("AMD")


# The Dockerfile


def stages() -> dict[str, list[str]]:
    """The instructions of images/Dockerfile by its stages, continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "images" / "Dockerfile").read_text(), flags=re.M))
    found: dict[str, list[str]] = {"": []}
    for line in filter(None, map(str.strip, text.split("\n"))):
        if named := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            found[named[2]] = [*found.get(named[1], []), line]
        else:
            found[list(found)[-1]].append(line)
    return found


def test_every_variant_is_a_stage_and_runs_as_nobody_with_rights() -> None:
    known = stages()
    for variant in images.VARIANTS:
        lines = known[variant]
        assert [line for line in lines if line.startswith("USER")][-1] == "USER 1000:1000"
        assert any(line.startswith("ENV PATH=/opt/outlast/bin:") for line in lines)
        installs = [word for line in lines for word in re.findall(r"apt-get install (.*?)\s+&&", line)]
        assert installs in ([], ["--yes --no-install-recommends openjdk-17-jre-headless"]), "no compiler"
    assert list(known)[-1] == "cpu", "who names no stage gets the last"


def test_nothing_is_compiled_when_a_worker_starts() -> None:
    """pip compiles what it installs; the library of Python comes without bytecode, and the root may be read-only."""
    known = stages()
    for variant in images.VARIANTS:
        compiles = [place for place, line in enumerate(known[variant]) if "compileall" in line and '"stdlib"' in line]
        users = [place for place, line in enumerate(known[variant]) if line == "USER 1000:1000"]
        assert compiles, variant
        assert compiles[0] < users[-1], "who runs the worker may not write there"
    assert not any("no-compile" in line or "DONTWRITEBYTECODE" in line for lines in known.values() for line in lines)


def test_images_for_training_have_what_the_recipes_need() -> None:
    known = stages()
    for stage in ("build-cpu", "build-cuda", "neuron"):
        extras = re.search(r'"\.\[(\S+)\]"', " ".join(known[stage]))
        assert extras, stage
        assert {"store", "kubernetes", "tracking", "data", "llm"} <= set(extras[1].split(",")), stage
    [install] = (line for line in known["neuron"] if "pip install" in line)
    assert re.search(r"torch\.__version__.* > torch\.txt .*pip install \S* ?--constraint torch\.txt", install), (
        "AWS's torch stays"
    )
    assert "train" not in re.split(r"[\[\],]", install), "which asks for a torch of its own"


def test_the_operators_image_has_no_torch() -> None:
    lines = stages()["build-operator"]
    assert not any("torch" in line or "[train" in line for line in lines)
    assert any('".[kubernetes,store]"' in line for line in lines)


def test_the_image_for_spark_has_a_java_and_answers_sparks_words() -> None:
    known = stages()
    assert any('".[data,store,kubernetes,spark]"' in line for line in known["build-spark"])
    assert not any("torch" in line or "[train" in line for line in known["build-spark"])
    assert 'ENTRYPOINT ["python", "-P", "-m", "outlast.spark_entrypoint"]' in known["spark"]
    assert all(any(" /opt/outlast/spark" in line for line in known[stage]) for stage in ("build-spark", "build-notebook"))
    assert known["spark"][-1] == "COPY --from=build-spark /opt/outlast /opt/outlast"
    assert [line for line in known["spark"] if line.startswith("CMD")][-1] == 'CMD ["outlast", "--help"]'


def test_the_image_for_notebooks_adds_to_that_for_training_and_starts_as_kubeflow_starts_it() -> None:
    known = stages()
    assert "ARG NOTEBOOK=cpu" in known[""]
    first, install = known["build-notebook"]
    assert first == "FROM build-${NOTEBOOK} AS build-notebook", "cpu, or cuda"
    assert '".[spark,notebook,plots]"' in install
    lines = known["notebook"]
    assert any("openjdk" in line for line in lines), "a Java for Spark"
    assert [line for line in lines if line.startswith("CMD")][-1] == (
        'CMD ["outlast", "notebook", "/home/jovyan", "--kubeflow", "--bind", "0.0.0.0", "--port", "8888"]'
    )
    assert "ENV HOME=/home/jovyan JUPYTER_RUNTIME_DIR=/tmp/jupyter" in lines
    assert known["notebook"][-1].startswith("CMD"), "and nothing of the training image's"


def test_versions_are_those_of_the_constraints() -> None:
    installs = [line for name, lines in stages().items() for line in lines if "pip install" in line and name.startswith("build")]
    assert installs
    assert all("--constraint constraints.txt" in line for line in installs)


def test_what_the_dockerfile_copies_is_what_it_is_given() -> None:
    given = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for lines in stages().values() for line in lines if line.startswith("COPY ") and "--from" not in line
              for word in line.split()[1:-1]}  # fmt: skip
    assert copied == given
    assert all((ROOT / name).exists() for name in given)


# The command


@dataclass
class Engines:
    """Engines on PATH that only write down what they are asked to do."""

    directory: Path

    def add(self, name: str, *, fails: str = "") -> None:
        """`fails`: the word in an invocation that makes it fail."""
        program = self.directory / name
        program.write_text(f"""#!{sys.executable}
import json, os, sys
given = sys.stdin.read() if "login" in sys.argv else ""
words = [{name!r}, *sys.argv[1:]]
if words[1] != "version":
    with open({str(self.directory / "asked")!r}, "a") as file:
        file.write(json.dumps([words, given]) + "\\n")
absent = words[1:3] == ["manifest", "exists"] and not os.path.exists({str(self.directory / "list")!r})
if absent or {fails!r} in words[1:]:
    print("cannot", file=sys.stderr)
    sys.exit(3)
print("working", *words[1:2], flush=True)
""")
        program.chmod(0o755)

    @property
    def asked(self) -> list[tuple[list[str], str]]:
        path = self.directory / "asked"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def commands(self) -> list[str]:
        return [" ".join(words) for words, _ in self.asked]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return Engines(directory)


Outlast = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outlast(capfd: pytest.CaptureFixture[str]) -> Outlast:
    """Runs the command line: words -> exit code, standard output, standard error, those of the engines included."""

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["image", *map(str, words)])
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A directory with Outlast's Dockerfile."""
    path = tmp_path / "sources"
    (path / "images").mkdir(parents=True)
    (path / "images" / "Dockerfile").write_text("FROM scratch\n")
    return path


def test_build_makes_a_variant_and_shows_what_the_engine_says(outlast: Outlast, engines: Engines, sources: Path) -> None:
    engines.add("buildah")
    code, out, err = outlast("build", sources, "--variant", "operator", "--platform", "arm64")
    assert (code, out) == (0, "working build\n")
    (command,) = engines.commands
    assert command == (
        f"buildah build --layers --file {sources}/images/Dockerfile --target operator --platform linux/arm64 "
        f"--build-arg VERSION={__version__} --tag outlast:operator {sources}"
    )
    assert err == f"outlast | {command}\n"


def test_build_takes_your_own_dockerfile(outlast: Outlast, engines: Engines, tmp_path: Path) -> None:
    engines.add("docker")
    (tmp_path / "Dockerfile").write_text("FROM outlast:cpu\n")
    code, _, err = outlast("build", tmp_path)
    assert (code, err) == (2, f"Error: {tmp_path}/Dockerfile has no name yet; add --tag registry/name:tag\n")
    assert outlast("build", tmp_path, "--tag", "me/train:1", "--push", "--build-arg", "A=1")[0] == 0
    assert engines.commands == [
        f"docker build --file {tmp_path}/Dockerfile --build-arg A=1 --tag me/train:1 {tmp_path}",
        "docker push me/train:1",
    ]


def test_a_docker_without_its_daemon_is_passed_over(outlast: Outlast, engines: Engines, sources: Path) -> None:
    engines.add("docker", fails="version")
    assert outlast("build", sources)[2] == "Error: docker cannot be used: cannot; start it, or install podman or buildah\n"
    engines.add("podman")
    assert outlast("build", sources)[0] == 0
    assert engines.commands[0].startswith("podman build ")
    assert outlast("build", sources, "--with", "docker")[0] == 2


def test_without_an_engine_or_a_dockerfile_one_sentence_is_said(outlast: Outlast, engines: Engines, sources: Path) -> None:
    assert outlast("build", sources)[::2] == (2, "Error: there is no docker, podman or buildah on PATH; install one of them\n")
    code, _, err = outlast("build", sources / "images" / "none")
    assert code == 2
    assert err.endswith("give the directory of Outlast's sources or of your own image, or --file\n")
    code, _, err = outlast("build", sources, "--variant", "cudda")
    assert (code, err) == (
        2,
        "Error: no variant cudda; did you mean cuda? there are cpu, cuda, neuron, spark, notebook, operator\n",
    )
    assert outlast("build", sources, "--push")[2] == (
        "Error: outlast:cpu names no registry to push to; write registry/outlast:cpu, e.g. ghcr.io/me/outlast:cpu\n"
    )
    assert engines.asked == []


def test_an_engine_that_fails_ends_it(outlast: Outlast, engines: Engines, sources: Path) -> None:
    engines.add("podman", fails="build")
    code, _, err = outlast("build", sources, "--push", "--tag", "ghcr.io/me/a:1")
    assert code == 1
    assert err.endswith("cannot\nError: podman build failed (exit 3); it says why above\n")
    assert len(engines.asked) == 1


def test_a_dry_run_only_prints(outlast: Outlast, engines: Engines, sources: Path) -> None:
    engines.add("docker")
    code, out, _ = outlast("build", sources, "--push", "--dry-run", "--tag", f"{ECR}/app:1")
    assert (code, engines.asked) == (0, [])
    first, second, third = out.splitlines()
    assert first == f"docker login --username AWS --password-stdin {ECR}"
    assert (second.split()[:2], third) == (["docker", "build"], f"docker push {ECR}/app:1")


@pytest.mark.parametrize("is_list", [False, True])
def test_push_knows_a_list_of_images(outlast: Outlast, engines: Engines, is_list: bool) -> None:
    engines.add("podman")
    if is_list:
        (engines.directory / "list").touch()
    assert outlast("push", "ghcr.io/me/a:1")[0] == 0
    wanted = "podman manifest push --all ghcr.io/me/a:1 docker://ghcr.io/me/a:1" if is_list else "podman push ghcr.io/me/a:1"
    assert engines.commands == ["podman manifest exists ghcr.io/me/a:1", wanted]


# Amazon's registry


def registry() -> Any:
    import botocore.session

    return botocore.session.Session().create_client(
        "ecr",
        region_name=REGION,
        endpoint_url=os.environ["AWS_ENDPOINT_URL"],
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )


def test_push_to_amazon_creates_the_repository_once_and_logs_in(outlast: Outlast, engines: Engines, moto: Place) -> None:
    engines.add("docker")
    name = f"team/{moto.bucket}"
    code, _, err = outlast("push", f"{ECR}/{name}:1")
    assert code == 0
    assert f"outlast | created the repository {ECR}/{name}\n" in err
    (login, password), (push, _) = engines.asked
    assert login == ["docker", "login", "--username", "AWS", "--password-stdin", ECR]
    assert password
    assert password not in err
    assert push == ["docker", "push", f"{ECR}/{name}:1"]
    (made,) = registry().describe_repositories(repositoryNames=[name])["repositories"]
    assert made["imageScanningConfiguration"] == {"scanOnPush": True}
    assert registry().list_tags_for_resource(resourceArn=made["repositoryArn"])["tags"] == [
        {"Key": "outlast:made-by", "Value": "outlast"}
    ]
    assert "created" not in outlast("push", f"{ECR}/{name}:2")[2]


def test_without_credentials_for_amazon_one_sentence_is_said(
    outlast: Outlast, engines: Engines, moto: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.add("docker")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    code, _, err = outlast("push", f"{ECR}/app:1")
    assert (code, engines.asked) == (2, [])
    remedy = "run `aws configure` or `aws sso login`, or set AWS_PROFILE"
    assert err == f"Error: {ECR}/app: no credentials for AWS (Unable to locate credentials); {remedy}\n"


def test_a_registry_that_does_not_answer_is_said(moto: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    repository = images.repository(f"{ECR}/app:1")
    assert repository
    with pytest.raises(OutlastError, match=r"amazonaws\.com/app: AWS cannot be reached: .*; correct the region or try again"):
        ecr.enter(repository)


def test_a_name_that_amazon_does_not_take_is_said(moto: Place) -> None:
    repository = images.repository(f"{ECR}/a:1")
    assert repository
    with pytest.raises(OutlastError, match=r"amazonaws\.com/a: AWS does not take this value: .* min length: 2; correct it$"):
        ecr.enter(repository)
