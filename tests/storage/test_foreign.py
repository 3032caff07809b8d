"""Objects in a cluster and files in a store that somebody else has made are the same after every command that writes there."""

from __future__ import annotations

import contextlib
import copy
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import apiserver
from outlast.storage import store
from web import Web

Document = dict[str, Any]
Key = tuple[str, str, str]
Outlast = Callable[..., tuple[int, str, str]]

JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: train}
spec:
  image: example.org/outlast:1
  module: outlast.recipes.smoke
  volumes: [{claim: train-output, to: /out, size: 1Gi}]
  output: /out
  workers: {replicas: 2, min: 1, max: 2}
"""
COMMANDS = {
    "data get": ("data", "get", "cifar10", "--on", "kubernetes", "--claim", "efs:/data", "-n", "team"),
    "submit": ("submit", "job.yaml", "--as", "statefulset", "-n", "team"),
    "install": ("install", "--node-watch"),
}
USED = ("namespaces", "persistentvolumeclaims", "serviceaccounts", "customresourcedefinitions.apiextensions.k8s.io", "secrets")
"""What may be somebody else's and is used as it is: the Secret is that with the key of a job, which an administrator may make."""
BY_CONTENT = ("configmaps",)
"""Named by its content, so no command meets that of somebody else."""


class Served(apiserver.ApiServer):
    """A cluster that serves what is defined, and lets in the pods of a dry run."""

    def __init__(self) -> None:
        super().__init__(unserved=("scheduling.x-k8s.io", "scheduling.volcano.sh"))
        self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        self.put({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "efs", "namespace": "team"}})
        self.prescribe("POST .*/pods.*dryRun", *((201, {"metadata": {}}) for _ in range(20)))

    def put(self, document: Document) -> Document:
        if document["kind"] == "CustomResourceDefinition":
            document = {**document, "status": {"conditions": [{"type": "Established", "status": "True"}]}}
        return super().put(document)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTLAST_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "job.yaml").write_text(JOB)

    @contextlib.contextmanager
    def serving() -> Iterator[Served]:
        api = Served()
        with apiserver.entered(api, tmp_path, monkeypatch):
            yield api

    return serving


def foreign(document: Document) -> Document:
    """Somebody else's object of the same kind and name; an owner of theirs, too."""
    meta = {key: document["metadata"][key] for key in ("name", "namespace") if key in document["metadata"]}
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": "theirs"}
    made = {key: copy.deepcopy(document[key]) for key in ("apiVersion", "kind", "spec", "roleRef") if key in document}
    return {**made, "metadata": {**meta, "labels": {"owner": "team-b"}, "ownerReferences": [owner]}}


MADE: dict[tuple[str, ...], dict[Key, Document]] = {}


def written(serving: Callable[[], Any], outlast: Outlast, words: tuple[str, ...]) -> dict[Key, Document]:
    """What a command makes in an empty cluster, which it is run in once."""
    if words not in MADE:
        with serving() as api:
            before = set(api.documents)
            code, _, err = outlast(*words)
            assert code == 0, err
            MADE[words] = {key: document for key, document in api.documents.items() if key not in before}
    return copy.deepcopy(MADE[words])


def plain(api: Served) -> str:
    return json.dumps(sorted(api.documents.items()), sort_keys=True)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_an_object_of_somebody_else_stops_a_command_before_it_changes_anything(
    served: Callable[[], Any], outlast: Outlast, words: tuple[str, ...], every: int
) -> None:
    stopped = 0
    some = {key[0]: (key, made) for key, made in written(served, outlast, words).items() if key[0] not in BY_CONTENT}
    for key, made in [*some.values()][::every]:  # one of each kind
        with served() as api:
            api.put(foreign(made))
            theirs, before = json.dumps(api.documents[key]), plain(api)
            code, _, err = outlast(*words)
            assert json.dumps(api.documents[key]) == theirs, key
            if code:
                assert (code, plain(api)) == (2, before), (key, err)
                assert f" {key[2]}" in err, err
                stopped += 1
            else:
                assert key[0] in USED, key
    assert stopped


DELETING = {
    "cancel": (COMMANDS["submit"], ("cancel", "train", "-n", "team")),
    "kill": (COMMANDS["submit"], ("kill", "train", "-n", "team")),
    "submit --fresh": (COMMANDS["submit"], (*COMMANDS["submit"], "--fresh")),
    "uninstall --crds": (COMMANDS["install"], ("uninstall", "--crds", "--yes")),
}


@pytest.mark.parametrize(("making", "deleting"), DELETING.values(), ids=DELETING)
def test_no_object_of_somebody_else_is_deleted(
    served: Callable[[], Any], outlast: Outlast, making: tuple[str, ...], deleting: tuple[str, ...]
) -> None:
    """Neither where all of them are theirs, nor where some are among ours."""
    made = written(served, outlast, making)
    for some in ([*made], [*made][::2], [*made][1::2]):
        with served() as api:
            if len(some) < len(made):
                assert outlast(*making)[0] == 0
            for key in some:
                api.documents.pop(key, None)
                api.put(foreign(made[key]))
            theirs = {key: json.dumps(api.documents[key]) for key in some}
            code, out, err = outlast(*deleting)
            assert {key: json.dumps(api.documents.get(key)) for key in some} == theirs, (code, out, err)


# In a store


STORING = {
    "data get": lambda url, to, source: ("data", "get", url, "--to", to),
    "data prepare": lambda url, to, source: ("data", "prepare", "text", source, "--to", to, "--tokenizer", "char"),
    "sync": lambda url, to, source: ("sync", source, to),
    "sync --delete": lambda url, to, source: ("sync", source, to, "--delete"),
}
OTHERS = {"README.md": b"SOMEBODY ELSE", "train.bin": b"tokens", "deep/er": b"x"}
BEGUN = {".outlast-get": b"another dataset", "train/old.txt": b"a part of it"}


@pytest.mark.parametrize(
    ("theirs", "words"),
    [*((OTHERS, words) for words in STORING), *((BEGUN, words) for words in ("data get", "data prepare"))],
    ids=lambda value: value if isinstance(value, str) else "begun" if value is BEGUN else "others",
)
def test_a_place_in_a_store_with_files_of_somebody_else_or_a_part_of_another_dataset_stays_as_it_is(
    outlast: Outlast, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: dict[str, bytes], words: str
) -> None:
    for name in ("XDG_CACHE_HOME", "OUTLAST_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    there = store.open_(f"memory://{uuid.uuid4().hex}/p")
    for key, content in theirs.items():
        there.put(key, content)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "README.md").write_text("ours " * 200)
    args = STORING[words](web.put("README.md", b"from the web"), there.url, tmp_path / "source")
    held = "other files (README.md); choose a new or empty place" + ", or --check, which replaces them" * words.startswith("sync")
    if theirs is BEGUN:
        held = "a part of another dataset; complete that with the same command as before, or choose a new or empty place"
    for _ in range(2):
        code, _, err = outlast(*args)
        said = err if theirs is OTHERS else err.splitlines(keepends=True)[-1]
        assert (code, said) == (2, f"Error: {there.url} holds {held}\n")
        assert {entry.key: there.get(entry.key) for entry in there.entries()} == theirs
    there.delete(theirs)
    assert outlast(*args)[0] == 0, "where nothing is"
    assert outlast(*args)[0] == 0, "and again, where it has been itself"


# Logins


@pytest.mark.parametrize(
    "held", ["://bob:s3cr3t@", "?X-Amz-Signature=s3cr3t", "?a=b&sig=s3cr3t"], ids=["login", "signature", "sas"]
)
def test_a_login_goes_into_no_job_file_and_no_pod_and_is_not_said(
    served: Callable[[], Any], outlast: Outlast, tmp_path: Path, held: str
) -> None:
    plain_url = "https://host.example/x.tar.gz"
    url = plain_url.replace("://", held) if "@" in held else plain_url + held
    what = "a login" if "@" in held else "a signature"
    (tmp_path / "job.yaml").write_text(JOB + f'  data: [{{from: "{url}#sha256={"0" * 64}"}}]\n')
    with served() as api:
        before = plain(api)
        code, out, err = outlast("submit", "job.yaml", "-n", "team")
        assert (code, "s3cr3t" in out + err) == (2, False)
        assert f"holds {what}, and job files are copied into the output; " in err, err
        code, out, err = outlast("data", "get", url, "--on", "kubernetes", "--claim", "efs:/data", "-n", "team")
        assert (code, "s3cr3t" in out + err) == (2, False)
        assert err.startswith(f"Error: {plain_url} holds {what}, and whoever may view the Job reads its command; "), err
        assert plain(api) == before


def test_a_url_that_is_signed_anew_is_the_same_dataset_and_no_signature_is_kept(
    outlast: Outlast, web: Web, tmp_path: Path
) -> None:
    url = web.put("x.txt", b"content")
    signed = [f"{url}?X-Amz-Expires=60&X-Amz-Signature=s3cr3t{n}" for n in range(2)]
    said = [outlast("data", "get", each, "--to", tmp_path / "to") for each in signed]
    assert [code for code, _, _ in said] == [0, 0]
    assert said[1][1] == f"already there: {url}: 1 file, 7 B in {tmp_path / 'to'}\n"
    kept = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert kept
    assert "s3cr3t" not in f"{said}{kept}"
    assert outlast("data", "get", f"{url}?version=2", "--to", tmp_path / "to")[0] == 2, "another query is another file"
