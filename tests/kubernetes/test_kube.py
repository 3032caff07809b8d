"""`kube` against a small API server over real HTTP: what it says of refusals, and that watches miss nothing."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import certifi
import httpx2
import pytest

import apiserver
import ports
from outlast.base import errors
from outlast.kubernetes import api as kube
from outlast.kubernetes import board as rendezvous
from outlast.kubernetes.api import apply_documents, error_mapping, kinds, kubeconfig, requests, watch
from outlast.kubernetes.api.error_mapping import Subject
from outlast.kubernetes.api.requests import pause


@pytest.fixture
def api() -> apiserver.ApiServer:
    return apiserver.ApiServer()


@pytest.fixture
def cluster(api: apiserver.ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kube.Cluster]:
    with apiserver.connected(api, tmp_path, monkeypatch) as cluster:
        yield cluster


def a_pod(name: str, **labels: str) -> kube.Document:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": {}}


@pytest.fixture
def in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod that has an account."""
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("secret")
    (account / "namespace").write_text("team-a")
    shutil.copy(certifi.where(), account / "ca.crt")
    monkeypatch.setattr(kubeconfig, "ACCOUNT", account)
    for name, value in {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "443"}.items():
        monkeypatch.setenv(f"KUBERNETES_{name}", value)


@pytest.mark.usefixtures("in_a_pod")
def test_a_pod_reaches_its_api_server_without_the_proxy_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "files", lambda _: [])
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    cluster = kube.connect()
    assert (cluster.server, cluster.namespace) == ("https://10.0.0.1:443", "team-a")
    assert not cluster.connection.clients.for_thread().trust_env
    cluster.close()


@pytest.mark.usefixtures("in_a_pod")
def test_a_member_speaks_for_its_pod_whatever_its_training_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path / "config", "http://elsewhere")))
    with contextlib.closing(kube.connect()) as cluster:
        assert cluster.server == "http://elsewhere"
    with contextlib.closing(rendezvous._connected("n")) as cluster:
        assert cluster.server == "https://10.0.0.1:443"


def test_threads_do_not_share_a_client_until_there_are_many(
    api: apiserver.ApiServer, cluster: kube.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_MAX_CLIENTS", 3)
    mine, others = cluster.connection.clients.for_thread(), []

    def look() -> None:
        cluster.list_(kinds.POD)
        others.append(cluster.connection.clients.for_thread())

    for _ in range(4):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert cluster.connection.clients.for_thread() is mine
    assert [others.index(each) for each in others] == [0, 1, 2, 0]
    assert others[2] is mine
    cluster.close()
    assert all(each.is_closed for each in (mine, *others))


FORBIDDEN = 'pods is forbidden: User "eve" cannot list resource "pods" in API group "" in the namespace "team-a"'
ASKED = Subject("apply", kinds.JOB, "train", "team-a", "https://c")


QUOTA = 'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'
WEBHOOK = 'admission webhook "policy.acme.io" denied the request: no pods\non Fridays'
PATCH = "failed to create typed patch object (a/b; batch/v1, Kind=Job): .spec.x: field not declared in schema"
UNKNOWN = "the server could not find the requested resource"
SPEC, JSON = "core.Spec{" + "X:0, " * 40 + "}", json.dumps({"x": "}: y" * 40})
LONG_RULE = f"metadata.name is longer than 51 characters; {'shorten it, ' * 10}since: workers are called so"


def invalid(field: str, message: str) -> tuple[int, object]:
    causes = [{"field": field, "message": f"Invalid value: {message}"}]
    return apiserver.status(422, "Invalid", "Job.batch is invalid", causes=causes)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (apiserver.status(403, "Forbidden", FORBIDDEN), errors.Forbidden, f"{FORBIDDEN}; ask the cluster's "),
        (apiserver.status(403, "Forbidden", QUOTA), errors.Refused, f"team-a cannot be applied: {QUOTA[:42]}"),
        (apiserver.status(401, "Unauthorized", "Unauthorized"), errors.Unauthorized, "https://c does not accept the login"),
        (apiserver.status(400, "BadRequest", WEBHOOK), errors.Refused, WEBHOOK.replace("\n", " ")),
        (
            apiserver.status(500, "InternalError", 'failed calling webhook "w": x'),
            errors.Refused,
            'cannot be applied: failed calling webhook "w": x',
        ),
        (invalid("spec.template", f"{SPEC}: field is immutable"), errors.Refused, "applied: spec.template: field is immutable"),
        (invalid("spec.a", f"{JSON}: is: immutable"), errors.Refused, "cannot be applied: spec.a: is: immutable"),
        (invalid("metadata.name", LONG_RULE), errors.Refused, f"cannot be applied: metadata.name: {LONG_RULE}"),
        (invalid("metadata.name", "too long"), errors.Refused, "cannot be applied: metadata.name: Invalid value: too long"),
        (apiserver.status(500, "", PATCH), errors.Refused, ".spec.x: field not declared in schema"),
        (apiserver.status(409, "AlreadyExists", "exists"), errors.Taken, "Job train in namespace team-a exists already"),
        (apiserver.status(409, "Conflict", "it was modified"), errors.Conflict, "it has been changed since it was read"),
        (apiserver.status(404, "NotFound", "", name="team-a", kind="namespaces"), errors.Absent, "there is no namespace team-a"),
        (
            apiserver.status(404, "NotFound", "", name="train", kind="jobs"),
            errors.Absent,
            "Job train in namespace team-a does not",
        ),
        (apiserver.status(404, "NotFound", UNKNOWN), errors.NotServed, "Job (batch/v1) is not known to this"),
        ((503, "<html>down</html>"), errors.Unanswered, "is not well (HTTP 503: "),
        (apiserver.status(429, "TooManyRequests", "slow down"), errors.Unanswered, "is not well (HTTP 429: slow down)"),
    ],
)
def test_a_refusal_is_one_sentence(answer: tuple[int, object], error: type[Exception], said: str) -> None:
    body = answer[1].encode() if isinstance(answer[1], str) else json.dumps(answer[1]).encode()
    found = error_mapping.error_for(answer[0], body, ASKED)
    assert type(found) is error
    assert said in str(found)
    assert "\n" not in str(found)
    assert len(str(found)) < 750


def test_a_document_is_applied_to_the_object_that_was_read_and_to_no_later_one(cluster: kube.Cluster) -> None:
    wanted, theirs = a_pod("one", app="x"), a_pod("one", app="theirs")
    read = cluster.apply(wanted)
    cluster.patch(kinds.POD, "one", {"metadata": {"annotations": {"seen": "1"}}})
    done = apply_documents.apply(cluster, wanted, old=read)
    assert (done.what, done.new["metadata"]["annotations"]) == ("unchanged", {"seen": "1"})
    cluster.delete(kinds.POD, "one")
    assert apply_documents.apply(cluster, wanted, old=done.new).what == "created"
    for change in ("another", "labels"):
        read = cluster.get(kinds.POD, "one")
        if change == "another":
            cluster.delete(kinds.POD, "one")
        cluster.apply(theirs)
        with pytest.raises(
            errors.Conflict, match="Pod one in namespace default cannot be applied: it has been changed since it was read"
        ):
            apply_documents.apply(cluster, wanted, old=read)
        assert cluster.get(kinds.POD, "one")["metadata"]["labels"] == {"app": "theirs"}
        cluster.apply(wanted)


@pytest.mark.parametrize(("said", "low", "high"), [("7", 7.0, 7.0), ("", 0.25, 0.5), ("3600", 30.0, 30.0)])
def test_who_is_told_to_slow_down_waits_as_long_as_it_is_told(said: str, low: float, high: float) -> None:
    assert low <= pause(1, httpx2.Response(429, headers={"Retry-After": said})) <= high


def test_apply_is_strict_forced_and_ours(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    cluster.apply(a_pod("one"), dry_run=True)
    assert "fieldManager=outlast&force=true&fieldValidation=Strict&dryRun=All" in api.asked[-1]
    with pytest.raises(errors.Absent):
        cluster.get(kinds.POD, "one")


def test_long_lists_come_in_pages(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    api.page = 3
    for number in range(8):
        api.put(a_pod(f"p{number}"))
    assert [pod["metadata"]["name"] for pod in cluster.list_(kinds.POD)] == [f"p{number}" for number in range(8)]
    assert cluster.list_(kinds.POD)[0]["kind"] == "Pod"
    assert len([path for path in api.asked if "/pods" in path]) == 6


def test_a_list_that_grows_too_old_between_pages_is_begun_anew(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    api.page = 3
    for number in range(5):
        api.put(a_pod(f"p{number}"))
    api.prescribe("continue=3", apiserver.status(410, "Expired", "the continue token has expired"))
    assert len(cluster.list_(kinds.POD)) == 5


def test_what_may_be_repeated_is_repeated(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    api.put(a_pod("one"))
    api.prescribe("GET .*/pods/one", (503, "down"), (429, "later"))
    assert cluster.get(kinds.POD, "one")["metadata"]["name"] == "one"
    api.prescribe("POST", (503, "down"))
    with pytest.raises(errors.Unanswered, match="HTTP 503"):
        cluster.create(a_pod("two"))
    assert len([path for path in api.asked if path.startswith("POST")]) == 1


def test_an_api_server_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free()
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path / "config", f"http://127.0.0.1:{port}")))
    with pytest.raises(errors.Unanswered, match=f"127.0.0.1:{port} cannot be reached: the connection was refused"):
        kube.connect().get(kinds.POD, "one")


def test_without_a_kubeconfig_there_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(errors.NoCluster, match="there is no kubeconfig"):
        kube.connect()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(errors.NoCluster, match=r"KUBECONFIG names .*none, which does not exist"):
        kube.connect()


def test_several_kubeconfigs_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text(json.dumps({"contexts": [{"name": "far", "context": {"cluster": "c", "user": "u", "namespace": "n"}}]}))
    apiserver.kubeconfig(second, "http://c:1")
    monkeypatch.setenv("KUBECONFIG", f"{first}:{tmp_path / 'none'}:{second}")
    found = kube.connect("far")
    assert (found.context, found.namespace, found.server) == ("far", "n", "http://c:1")


@pytest.mark.parametrize("kind", ["cluster", "user"])
def test_a_context_that_names_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = apiserver.kubeconfig(tmp_path / "config", "http://c:1")
    path.write_text(json.dumps({**json.loads(path.read_text()), f"{kind}s": []}))
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(
        errors.NoCluster, match=f"context here names the {kind} {kind[0]}, which the kubeconfig lacks; correct it"
    ):
        kube.connect()


def test_login_programs_are_run_and_their_failures_told(
    api: apiserver.ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "login"
    program.write_text('#!/bin/sh\necho "{\\"status\\": {\\"token\\": \\"t\\"}}"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    api.put(a_pod("one"))
    with apiserver.serving(api) as url:

        def read(command: str) -> kube.Document:
            user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": command}}
            monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path / "config", url, **user)))
            with contextlib.closing(kube.connect()) as cluster:
                return cluster.get(kinds.POD, "one")

        assert read(str(program))["metadata"]["name"] == "one"
        with pytest.raises(errors.Unauthorized, match="the login program no-such-program of the kubeconfig is not installed"):
            read("no-such-program")
        with pytest.raises(errors.Unauthorized, match=r"the login to .* failed: Exec false returned 1"):
            read("false")


def test_a_user_who_acts_as_another_does_so_here(
    api: apiserver.ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = {"token": "t", "as": "eve", "as-uid": "7", "as-groups": ["a", "b"], "as-user-extra": {"acme.io/Team": ["x"]}}
    asked: list[list[tuple[str, str]]] = []

    def kept(handler: BaseHTTPRequestHandler) -> bool:
        asked.append([(name, value) for name, value in handler.headers.items() if name.startswith("Impersonate")])
        return False

    api.prescribe("pods", kept, kept)
    with apiserver.serving(api) as url:
        monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path / "config", url, **user)))
        with contextlib.closing(kube.connect()) as cluster:
            cluster.list_(kinds.POD)
            with pytest.raises(errors.Absent):
                cluster.exec_("one", ["true"])
    headers = [("User", "eve"), ("Uid", "7"), ("Group", "a"), ("Group", "b"), ("Extra-acme.io%2Fteam", "x")]
    assert asked == [[(f"Impersonate-{name}", value) for name, value in headers]] * 2


def test_rights_are_asked_for(cluster: kube.Cluster) -> None:
    assert cluster.may("list", kinds.POD)
    assert not cluster.may("delete", kinds.POD)
    assert cluster.version() == "v1.36.0"


class Watched:
    """A watch in a thread of its own, with the changes that it reports."""

    def __init__(self, cluster: kube.Cluster) -> None:
        self.stop = kube.Stop()
        self.said: list[tuple[str, str]] = []
        self.versions: list[str | None] = []
        """The resource versions that the watch reports; None while it has lost its connection."""
        self.error: BaseException | None = None
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(cluster,), daemon=True)
        self._thread.start()

    def _run(self, cluster: kube.Cluster) -> None:
        try:
            for change in cluster.watch(kinds.POD, stop=self.stop, on_version=self.versions.append):
                with self._more:
                    self.said.append((change.type, change.document["metadata"]["name"]))
                    self._more.notify_all()
        except BaseException as error:
            self.error = error

    def wait(self, *expected: tuple[str, str]) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.said) >= len(expected), timeout=60), self.said
        assert self.said == list(expected)

    def end(self) -> None:
        self.stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_a_watch_tells_what_there_is_and_then_what_changes(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    api.put(a_pod("old"))
    watched = Watched(cluster)
    watched.wait(("added", "old"))
    api.put(a_pod("new"))
    api.put(a_pod("new", more="yes"))
    api.remove("pods", "old")
    watched.wait(("added", "old"), ("added", "new"), ("modified", "new"), ("deleted", "old"))
    watched.end()
    assert watched.error is None


def cut_within_an_event(api: apiserver.ApiServer) -> None:
    api.raw('{"type": "MODIFIED", "obj')
    api.cut()


def too_old(api: apiserver.ApiServer) -> None:
    api.raw(json.dumps({"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}) + "\n")


def not_well(api: apiserver.ApiServer) -> None:
    api.prescribe("watch=true", (503, "down"), (500, "down"))
    api.cut()


@pytest.mark.parametrize(("disturb", "lists", "lost"), [(cut_within_an_event, 1, 0), (too_old, 2, 1), (not_well, 1, 2)])
def test_a_watch_that_is_disturbed_misses_nothing_and_lists_anew_only_if_it_must(
    api: apiserver.ApiServer, cluster: kube.Cluster, disturb: Callable[[apiserver.ApiServer], None], lists: int, lost: int
) -> None:
    watched = Watched(cluster)
    api.put(a_pod("one"))
    watched.wait(("added", "one"))
    api.until(lambda: api.watchers)
    disturb(api)
    api.until(lambda: len([path for path in api.asked if "/pods?limit" in path]) == lists)
    api.put(a_pod("two"))
    watched.wait(("added", "one"), ("added", "two"))
    watched.end()
    assert watched.versions.count(None) == lost
    assert len([path for path in api.asked if "/pods?limit" in path]) == lists


def test_a_watch_that_is_too_old_lists_anew_and_tells_what_vanished(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    names = ("same", "changed", "gone", "successor")
    for name in names:
        api.put(a_pod(name))
    watched = Watched(cluster)
    known = tuple(("added", name) for name in names)
    watched.wait(*known)
    api.until(lambda: api.watchers)
    with api.lock:
        api.cut(forget=True)
        watchers, api.watchers = api.watchers, []
        api.remove("pods", "gone")
        api.put(a_pod("changed", now="yes"))
        api.put(a_pod("fresh"))
        api.remove("pods", "successor")
        api.put(a_pod("successor"))  # of the same name, and told after that the one before it has vanished
        api.oldest = api.version
        api.watchers = watchers
    anew = (("modified", "changed"), ("added", "fresh"), ("deleted", "successor"), ("added", "successor"), ("deleted", "gone"))
    watched.wait(*known, *anew)
    watched.end()
    assert watched.error is None


def test_bookmarks_move_a_watch_on_without_being_told(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    watched = Watched(cluster)
    api.put(a_pod("one"))
    watched.wait(("added", "one"))
    api.until(lambda: api.watchers)
    api.raw(json.dumps({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "777"}}}) + "\n")
    api.cut()
    api.until(lambda: any("resourceVersion=777" in path for path in api.asked))
    watched.end()
    assert watched.said == [("added", "one")]
    assert watched.versions[1] == "777"


def test_a_watch_of_what_never_changes_is_neither_lost_nor_begun_late(
    api: apiserver.ApiServer, cluster: kube.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[int] = []
    monkeypatch.setattr(requests, "pause", lambda failures: paused.append(failures) or 0.0)
    monkeypatch.setattr(watch, "_STABLE_S", 0.0)
    watched = Watched(cluster)
    for times in (1, 2, 3):
        api.until(lambda: sum("watch=true" in path for path in api.asked) == times and len(api.watchers) == 1)  # noqa: B023
        api.cut()  # the server ends it, and has sent no bookmark
    api.until(lambda: sum("watch=true" in path for path in api.asked) == 4)
    watched.end()
    assert paused == []
    assert None not in watched.versions
    asked = [float(found[1]) for path in api.asked if (found := re.search(r"timeoutSeconds=(\d+)", path))]
    assert len(asked) == 4
    assert max(asked) < watch._SILENCE_S


def test_a_watch_that_is_forbidden_says_so(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    api.prescribe("watch=true", apiserver.status(403, "Forbidden", FORBIDDEN.replace("list", "watch")))
    with pytest.raises(errors.Forbidden, match='"eve" cannot watch resource "pods"'):
        list(cluster.watch(kinds.POD, stop=kube.Stop()))


def test_warnings_of_the_server_are_kept_once(api: apiserver.ApiServer, cluster: kube.Cluster) -> None:
    def warn(handler: object) -> bool:
        apiserver.send(handler, 200, {"metadata": {}}, Warning='299 - "would violate PodSecurity: \\"x\\""')  # type: ignore[arg-type]
        return True

    api.prescribe("GET .*/pods/one", warn, warn)
    cluster.get(kinds.POD, "one")
    cluster.get(kinds.POD, "one")
    assert cluster.warnings == ['would violate PodSecurity: "x"']
