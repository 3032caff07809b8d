"""Code on its way to pods: what of a directory is code, that the archive depends on nothing else, and where it goes."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_validate import utils as schemas

from outlast.base.errors import OutlastError
from outlast.job import contract, spec
from outlast.job.shipping import archives, code_files
from outlast.kubernetes import manifests
from outlast.kubernetes.jobs.parcel import CLIENT_APPLY_BYTES, CONFIG_MAP_BYTES, pack
from outlast.kubernetes.manifests import volumes
from outlast.storage import store
from outlast.worker.prepare import phases
from servers import Place

NEWEST = sorted(set(schemas.all_versions()), key=lambda version: [int(part) for part in version.split(".")])[-1]


def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """A directory with these files; its path."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def names(root: Path) -> list[str]:
    return [entry.name for entry in code_files.listed(root).entries]


def packed(root: Path, into: Path) -> bytes:
    code_files.pack(root, into)
    return into.read_bytes()


def a_job(root: Path, name: str = "train", **fields: Any) -> spec.Job:
    """A job whose code is in `root`."""
    usual = {"image": "example.com/image:1", "script": "train.py", "code": str(root)}
    head = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": name}}
    return spec.anchor(spec.parse(yaml.safe_dump({**head, "spec": {**usual, **fields}})), root)


def noise(size: int) -> bytes:
    """Bytes that no compression makes fewer."""
    return random.Random(0).randbytes(size)


# What is code

parts = st.sampled_from(["a", "b", "ab", "a.py", "b.log", "x", ".h", "[a]", "a b", "!a", "#a"])
WORDS = re.findall(r"\S+", r"* ** / ! a b ab x *.py *.log ? [ab] [!a] []a] \!a **/ /** /**/ \#a #a [a-b] . .h a* [b-a] [^/]")
patterns = st.lists(st.sampled_from([*WORDS, " ", "\\ "]), min_size=1, max_size=5).map("".join)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    files=st.lists(st.lists(parts, min_size=1, max_size=4).map("/".join), min_size=1, max_size=12),
    top=st.lists(patterns, max_size=5),
    deeper=st.lists(patterns, max_size=3),
)
def test_git_leaves_out_the_same(files: list[str], top: list[str], deeper: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        for name in files:
            path = root / name
            if not any(each.is_file() for each in path.parents) and not path.is_dir():
                write(root, {name: "x"})
        write(root, {".gitignore": "\n".join(top) + "\n"})
        if (root / "a").is_dir():
            write(root, {"a/.gitignore": "\n".join(deeper)})
        environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "HOME": directory}
        git = ["git", "-c", "core.excludesFile=", "-C", directory]
        subprocess.run([*git, "init", "-q", "--template="], check=True, env=environ)
        said = subprocess.run([*git, "ls-files", "-o", "--exclude-standard", "-z"], check=True, env=environ, capture_output=True)
        assert sorted(names(root)) == sorted(name for name in said.stdout.decode().split("\0") if name)


@pytest.mark.parametrize(
    ("files", "root", "code"),
    [
        (  # .outlastignore counts more
            {"a.log": "", "b.log": "", "notes.md": "", ".gitignore": "*.log\n", ".outlastignore": "!b.log\nnotes.md\n"},
            "",
            [".gitignore", ".outlastignore", "b.log"],
        ),
        (  # the rules of the work tree around it hold
            {".git/HEAD": "", ".gitignore": "*.log\n/part/out/\n", "part/a.py": "", "part/a.log": "", "part/out/x": ""},
            "part",
            ["a.py"],
        ),
        ({".git/HEAD": "", ".gitignore": "build/\n", "build/a.py": ""}, "build", ["a.py"]),  # ignored, and asked for
        ({".git/HEAD": "", ".outlastignore": "!*.pem\n", "code/server.pem": "", "code/id_rsa": ""}, "code", ["server.pem"]),
        ({".env": "", "a/.env": "", "b/server.pem": "", ".gitignore": "!.env\n!server.pem\n"}, "", [".gitignore"]),
        (
            {".env": "", "a/.env": "", "b/server.pem": "", ".outlastignore": "!.env\n", "b/.outlastignore": "!*.pem\n"},
            "",
            [".env", ".outlastignore", "a/.env", "b/.outlastignore", "b/server.pem"],
        ),
    ],
)
def test_what_ignore_files_leave_of_the_code(tmp_path: Path, files: dict[str, str], root: str, code: list[str]) -> None:
    assert names(write(tmp_path, files) / root) == code


def test_what_is_never_code_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, {f"{name}/x": "" for name in (".git", ".venv", "__pycache__", ".outlast", "lib/__pycache__")})
    write(tmp_path, {"mine/pyvenv.cfg": "", "mine/lib/site.py": "", "lib/a.py": ""})
    (tmp_path / "pipe").parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "pipe")
    assert names(tmp_path) == ["lib/a.py"]


SECRETS = [".env", ".env.local", "a/.env", ".aws/credentials", "id_rsa", "a/id_ed25519", "server.pem", "a/credentials.json"]


def test_what_usually_holds_credentials_is_left_out_and_told(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(SECRETS, "secret"))
    write(tmp_path, {"a.py": "", ".env.example": "", "env.py": "", "keys.py": ""})
    assert names(tmp_path) == [".env.example", "a.py", "env.py", "keys.py"]
    assert sorted(code_files.listed(tmp_path).withheld) == sorted(
        [".aws", *(name for name in SECRETS if not name.startswith(".aws"))]
    )


def test_credentials_that_git_ignores_need_no_word(tmp_path: Path) -> None:
    write(tmp_path, {".env": "", "a.py": "", ".gitignore": ".env\n"})
    listing = code_files.listed(tmp_path)
    assert ([entry.name for entry in listing.entries], listing.withheld, listing.ignored) == (
        [".gitignore", "a.py"],
        [],
        [".env"],
    )


def test_more_than_code_can_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_ENTRIES", 2)
    write(tmp_path, {"a": "x" * 9, "b": "x", "c": "x"})
    with pytest.raises(
        OutlastError, match=r"holds more than 2 files, .* which is too much for code \(the biggest: .*a 9 B.*\); name"
    ):
        code_files.listed(tmp_path)


# The archive


def test_the_same_tree_is_the_same_bytes(tmp_path: Path) -> None:
    files = {"b.py": "b", "a/c.py": "c", "a.py": "a", "é": "", "long/" * 30 + "x": "x"}
    one = write(tmp_path / "one", files)
    other = write(tmp_path / "other", dict(reversed(files.items())))
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o777 if path.is_dir() else 0o600)
    assert packed(one, tmp_path / "1") == packed(other, tmp_path / "2")
    (other / "a.py").chmod(0o700)
    assert packed(one, tmp_path / "3") != packed(other, tmp_path / "4")


file_names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..", *code_files.FILES, ".outlast-code") and len(name.encode()) < 200
)


@given(files=st.dictionaries(st.lists(file_names, min_size=1, max_size=3).map("/".join), st.binary(max_size=50), max_size=8))
def test_what_is_packed_is_what_a_worker_unpacks(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root, into, archive = Path(directory, "root"), Path(directory, "into"), Path(directory, "code.tar.gz")
        root.mkdir(), into.mkdir()
        for name, content in files.items():
            path = root / name
            if not any(each.is_file() for each in path.parents) and not path.is_dir():
                write(root, {name: content})
        entries = code_files.pack(root, archive).entries
        archives.extract(archive, into, name="code")
        assert {entry.name: (root / entry.name).read_bytes() for entry in entries} == {
            path.relative_to(into).as_posix(): path.read_bytes() for path in into.rglob("*") if path.is_file()
        }


def test_links_and_the_right_to_execute_are_kept(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"lib/a.py": "a", "run.sh": "#!/bin/sh\n"})
    (root / "run.sh").chmod(0o755)
    (root / "a.py").symlink_to("lib/a.py")
    (root / "also").symlink_to("lib")
    code_files.pack(root, tmp_path / "code.tar.gz")
    (tmp_path / "into").mkdir()
    archives.extract(tmp_path / "code.tar.gz", tmp_path / "into", name="code")
    assert os.readlink(tmp_path / "into" / "a.py") == "lib/a.py"
    assert (tmp_path / "into" / "also" / "a.py").read_text() == "a"
    assert os.access(tmp_path / "into" / "run.sh", os.X_OK)
    assert not os.access(tmp_path / "into" / "lib" / "a.py", os.X_OK)
    with tarfile.open(tmp_path / "code.tar.gz") as tar:
        assert {(member.uid, member.gid, member.uname, member.mtime) for member in tar} == {(0, 0, "", 0)}


def test_a_link_to_itself_is_shipped_and_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"a.py": ""})
    (root / "loop").symlink_to("loop")
    assert names(root) == ["a.py", "loop"]
    with pytest.raises(OutlastError, match=r"^code: /dev/full cannot be written: No space left on device; make room there"):
        code_files.pack(root, Path("/dev/full"))


@pytest.mark.parametrize(
    ("name", "target"), [("data", "/etc/passwd"), ("up", "../secret"), ("lib/up", "../../secret"), ("way", "door/secret")]
)
def test_a_link_that_leads_outside_is_refused(tmp_path: Path, name: str, target: str) -> None:
    root = write(tmp_path / "root", {"lib/a.py": "", ".gitignore": "door\n"})
    write(tmp_path, {"secret": "x"})
    (root / "door").symlink_to("..")
    (root / name).symlink_to(target)
    with pytest.raises(OutlastError) as caught:
        code_files.listed(root)
    remedy = "put a copy or a relative link in its place, or name it in .outlastignore"
    assert (
        str(caught.value) == f"code: {root / name} is a link to {target}, outside of the code, which pods do not have; {remedy}"
    )
    (root / ".outlastignore").write_text(f"{name}\n")
    assert name not in names(root)


def test_an_absolute_link_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": ""})
    (tmp_path / "b.py").symlink_to(tmp_path / "a.py")
    with pytest.raises(OutlastError, match="an absolute path, which pods do not have"):
        code_files.listed(tmp_path)


@pytest.mark.parametrize(
    ("size", "reason"), [(9, "it has changed meanwhile"), (11, "it has changed meanwhile"), (0, "No such file")]
)
def test_a_file_that_changes_while_it_is_packed_is_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, reason: str
) -> None:
    root = write(tmp_path / "root", {"a.log": "x" * 10, "b.py": "b"})
    addfile = tarfile.TarFile.addfile

    def changed(tar: tarfile.TarFile, *more: Any) -> None:
        write(root, {"a.log": "x" * size})
        addfile(tar, *more)

    if size:
        monkeypatch.setattr(tarfile.TarFile, "addfile", changed)
    else:
        monkeypatch.setattr(code_files, "listed", lambda *_: code_files.Listing([code_files.Entry("a.log", "file")]))
        (root / "a.log").unlink()
    with pytest.raises(
        OutlastError, match=rf"^code: .*/a.log cannot be packed: {reason}.*; try again when nothing writes there, or"
    ):
        code_files.pack(root, tmp_path / "code.tar.gz")


def test_what_may_not_be_read_is_said(tmp_path: Path) -> None:
    if not os.getuid():
        pytest.skip("root reads everything")
    write(tmp_path / "root", {"a.py": ""})
    (tmp_path / "root" / "a.py").chmod(0)
    with pytest.raises(OutlastError, match=r"a\.py cannot be packed: Permission denied"):
        code_files.pack(tmp_path / "root", tmp_path / "code.tar.gz")


# Where it goes


@pytest.mark.parametrize(
    ("output", "limit", "way"),
    [
        (None, CONFIG_MAP_BYTES, "ConfigMap train-code-"),
        ("s3://bucket/runs", CONFIG_MAP_BYTES, "ConfigMap train-code-"),
        ("s3://bucket/runs/", 1, "s3://bucket/runs/code/"),
    ],
)
def test_small_code_goes_into_a_config_map_and_the_rest_into_the_store(tmp_path: Path, output: str | None, limit: int, way: str):
    write(tmp_path, {"train.py": "print(1)"})
    with pack(a_job(tmp_path, **({"output": output} if output else {})), limit=limit) as parcel:
        assert parcel.sentence.partition(" -> ")[2].startswith(way)
        assert parcel.url.startswith("s3://") == (limit == 1)
        assert bool(parcel.code) == (limit > 1)


def test_code_travels_with_its_checksum_and_without_what_is_no_code(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "print(1)", "job.yaml": "x", "req.txt": "einops", "runs/old": "", "data/d": "", "w/x": ""})
    fields = {"output": "runs", "data": [{"from": "data"}], "models": [{"from": "w", "name": "w"}]}
    job = a_job(tmp_path, **fields, environment={"requirements": "req.txt"})
    with pack(job, excluded=[tmp_path / "job.yaml"]) as parcel:
        assert parcel.upload() is False
    checksum = hashlib.sha256(parcel.code).hexdigest()
    assert parcel.job.spec.code == f"file:///etc/outlast-code/code.tar.gz#sha256={checksum}"
    assert parcel.job.spec.environment.requirements == "req.txt"
    assert parcel.sentence == f"code: 2 files, {len(parcel.code)} B -> ConfigMap train-code-{checksum[:8]}"
    (tmp_path / "code.tgz").write_bytes(parcel.code)
    with tarfile.open(tmp_path / "code.tgz") as tar:
        assert tar.getnames() == ["req.txt", "train.py"]


@pytest.mark.parametrize(
    "fields",
    [{"code": "s3://bucket/code"}, {"code": "/workspace"}, {"code": "/x", "volumes": [{"claim": "c", "to": "/workspace"}]}],
)
def test_code_that_pods_see_is_not_shipped(fields: dict[str, Any]) -> None:
    job = a_job(Path("/code"), **fields)
    with pack(job) as parcel:
        assert (parcel.job, parcel.code, parcel.sentence, parcel.upload()) == (job, b"", "", False)


def test_large_code_goes_to_the_store_once(tmp_path: Path, moto: Place) -> None:
    root = write(tmp_path, {"train.py": "print(1)", "big.bin": noise(CONFIG_MAP_BYTES)})
    with pack(a_job(root, output=f"{moto.url}/runs")) as parcel:
        assert [entry.key for entry in store.open_(moto.url).entries()] == []
        assert (parcel.upload(), parcel.upload()) == (True, False)
    (entry,) = store.open_(f"{moto.url}/runs/code").entries()
    assert parcel.url == f"{moto.url}/runs/code/{entry.key}"
    assert parcel.job.spec.code == f"{parcel.url}#sha256={entry.key.removesuffix('.tar.gz')}"
    assert parcel.sentence == f"code: 2 files, 701 KiB -> {parcel.url}"
    into = tmp_path / "into"
    phases.place_code(parcel.job, into, tmp_path, say=lambda _: None, stop=threading.Event())
    assert (into / "train.py").read_text() == "print(1)"


def test_a_torn_object_in_the_store_is_replaced(tmp_path: Path, moto: Place) -> None:
    root = write(tmp_path, {"train.py": "print(1)", "big.bin": noise(CONFIG_MAP_BYTES)})
    with pack(a_job(root, output=moto.url)) as parcel:
        above, _, key = parcel.url.rpartition("/")
        store.open_(above).put(key, b"torn")
        assert parcel.upload() is True
        assert store.open_(above).head(key).size == parcel.archive.stat().st_size


@pytest.mark.parametrize("size", [CONFIG_MAP_BYTES, 4 * CONFIG_MAP_BYTES])
def test_large_code_without_a_store_is_refused_with_the_biggest_files(tmp_path: Path, size: int) -> None:
    root = write(tmp_path, {"train.py": "print(1)", "weights/big.bin": noise(size)})
    with pytest.raises(OutlastError) as caught, pack(a_job(root)):
        pass
    held = {CONFIG_MAP_BYTES: "700 KiB", 4 * CONFIG_MAP_BYTES: "2.7 MiB"}[size]
    assert str(caught.value) == (
        f"code ({root}) holds 2 files, {held} (the biggest: weights/big.bin {held}, train.py 8 B), which is too much for a "
        "ConfigMap (700 KiB), and output is no store that it could be put into; say output: s3://..., or put the code into the "
        "image and say code: /workspace, or name what is no code in .outlastignore"
    )


def test_an_archive_is_shipped_as_it_is(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"train.py": "print(1)"})
    content = packed(root, tmp_path / "my.tgz")
    checksum = hashlib.sha256(content).hexdigest()
    job = a_job(tmp_path, code=f"my.tgz#sha256={checksum}")
    with pack(job) as parcel:
        assert parcel.code == content
    assert parcel.job.spec.code == f"file:///etc/outlast-code/code.tgz#sha256={checksum}"
    assert parcel.sentence.startswith(f"code: my.tgz, {len(content)} B -> ConfigMap train-code-")
    with pytest.raises(OutlastError, match="has the checksum"), pack(a_job(tmp_path, code=f"my.tgz#sha256={'0' * 64}")):
        pass
    with (
        pytest.raises(OutlastError, match=r"script \(other.py\) is not in code"),
        pack(a_job(tmp_path, code="my.tgz", script="other.py")),
    ):
        pass


def test_credentials_that_do_not_travel_are_said(tmp_path: Path) -> None:
    root = write(tmp_path, {"train.py": "", ".env": "TOKEN=abc", "id_rsa": ""})
    with pack(a_job(root)) as parcel:
        assert parcel.sentence.endswith(
            "; without .env, id_rsa, which may hold credentials (!.env in .outlastignore brings it back)"
        )


def test_a_script_that_is_left_out_is_said(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "", ".gitignore": "*.py\n"})
    with pytest.raises(OutlastError) as caught, pack(a_job(tmp_path)):
        pass
    assert str(caught.value) == (
        f"script (train.py) is left out of code ({tmp_path}) by .gitignore or .outlastignore; "
        f"add !train.py to {tmp_path / '.outlastignore'}, or correct the rule"
    )


# In documents and pods


@pytest.mark.parametrize("topology", manifests.TOPOLOGIES)
def test_every_topology_mounts_the_code_and_a_place_to_unpack_it(tmp_path: Path, topology: str) -> None:
    write(tmp_path, {"train.py": "print(1)"})
    with pack(a_job(tmp_path)) as parcel:
        documents = manifests.render(parcel.job, topology, code=parcel.code)
    code = documents[0]
    schemas.validate(code, NEWEST, strict=True)
    assert base64.b64decode(code["binaryData"]["code.tar.gz"]) == parcel.code
    assert code["immutable"] is True
    checksum = volumes.checksum(parcel.job.spec.code)
    assert code["metadata"]["name"] == f"train-code-{checksum[:8]}"
    if topology == "elasticjob":
        assert documents[-1]["spec"]["code"] == parcel.job.spec.code
        return
    fields = documents[-1]["spec"]
    pod = fields.get("template", fields.get("tasks", [fields])[0].get("template"))["spec"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "archive"]
    assert volume["configMap"] == {"name": code["metadata"]["name"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert (mounts["/etc/outlast-code"], mounts["/workspace"]) == ("archive", "code")
    config = next(each for each in documents if "job.yaml" in each.get("data", {}))
    assert spec.parse(config["data"]["job.yaml"]).spec.code == parcel.job.spec.code


def test_a_changed_tree_is_another_run_and_the_same_tree_is_the_same(tmp_path: Path) -> None:
    def made() -> list[str]:
        with pack(a_job(tmp_path)) as parcel:
            return [each["metadata"]["name"] for each in manifests.render(parcel.job, "job", code=parcel.code)]

    write(tmp_path, {"train.py": "print(1)"})
    before = made()
    assert made() == before
    write(tmp_path, {"train.py": "print(2)"})
    assert not set(made()) & set(before)


# The command

Outlast = Callable[..., tuple[int, str, str]]


JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: train}
spec: {script: train.py, image: example.com/image:1, output: "%s", env: {AWS_PROFILE: team}}
"""


def test_render_ships_the_directory_of_the_job_file(outlast: Outlast, tmp_path: Path) -> None:
    job_file = write(tmp_path, {"train.py": "", "job.yaml": JOB % "s3://bucket/runs"}) / "job.yaml"
    code, out, err = outlast("render", job_file, "--as", "job")
    first, *rest = yaml.safe_load_all(out)
    assert (code, [first["kind"], *(each["kind"] for each in rest)]) == (0, ["ConfigMap", "ConfigMap", "Job"])
    size = len(base64.b64decode(first["binaryData"]["code.tar.gz"]))
    assert err == f"outlast | train: code: 1 file, {size} B -> ConfigMap {first['metadata']['name']}\n"
    job_file.write_text(job_file.read_text() + "# a remark\n")
    assert outlast("render", job_file, "--as", "job")[1] == out


@pytest.mark.parametrize("output", ["s3://bucket/runs", "/out"])
def test_render_makes_no_config_map_that_kubectl_could_not_apply(outlast: Outlast, tmp_path: Path, output: str) -> None:
    job_file = write(tmp_path, {"train.py": "", "x": noise(200 << 10), "job.yaml": JOB % output}) / "job.yaml"
    code, out, err = outlast("render", job_file, "--as", "job")
    assert (code, out, err.count("\n")) == (2, "", 1)
    if output == "/out":
        assert "too much for a ConfigMap that kubectl apply takes (190 KiB), and output is no store" in err
    else:
        assert err.startswith("Error: code: 2 files, 200 KiB -> s3://bucket/runs/code/")
    assert all(way in err for way in ("`outlast submit`", "--server-side", "output: s3://" if output == "/out" else "--upload"))
    code, out, err = outlast("render", job_file, "--as", "job", "--server-side")
    first = next(yaml.safe_load_all(out))
    assert (code, first["kind"], len(base64.b64decode(first["binaryData"]["code.tar.gz"])) > CLIENT_APPLY_BYTES) == (
        0,
        "ConfigMap",
        True,
    )


def test_render_writes_to_the_store_only_when_it_is_told_to(outlast: Outlast, tmp_path: Path, moto: Place) -> None:
    job_file = write(tmp_path, {"train.py": "", "x": noise(CONFIG_MAP_BYTES), "job.yaml": JOB % f"{moto.url}/runs"}) / "job.yaml"
    code, out, err = outlast("render", job_file, "--as", "job")
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: code: 2 files, 700 KiB -> {moto.url}/runs/code/")
    assert err.endswith("which render does not upload to by default; add --upload, or use `outlast submit`\n")
    assert list(store.open_(moto.url).entries()) == []
    code, out, err = outlast("render", job_file, "--as", "job", "--upload")
    (entry,) = store.open_(moto.url).entries()
    assert (code, f"{moto.url}/{entry.key}#sha256=" in out) == (0, True)
