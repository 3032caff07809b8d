"""Waiting for the end of a job: `outlast submit --wait`, and the outputs that it leaves."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import apiserver
from fake_cluster import FakeCluster
from outlast.base.errors import Forbidden, NotServed, Unanswered
from outlast.cli.train import submit_wait as step
from outlast.job import contract, spec
from outlast.job.status import CheckpointStatus, JobStatus, State, StoreStatus
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import kinds, kubeconfig
from outlast.kubernetes.jobs import outcome, waiting
from outlast.kubernetes.jobs.job_documents import Workloads
from outlast.kubernetes.jobs.waiting import Code, Waiter
from outlast.storage import runs, store

Document = dict[str, Any]
Outlast = Callable[..., tuple[int, str, str]]
WORKER = {"app.kubernetes.io/component": "worker", "outlast.dev/job": "digits"}
CRD = kinds.CRD.document({"name": "elasticjobs.outlast.dev"})


class Cluster(FakeCluster):
    """A cluster that can be away, and forget its kinds."""

    away = unserved = forbidden_now = False

    def _may(self, kind: kinds.Kind) -> None:
        if self.away:
            raise Unanswered("https://fake does not answer")
        if self.forbidden_now:
            raise Forbidden("you may not get elasticjobs")
        if self.unserved and kind is kinds.ELASTIC_JOB:
            raise NotServed("elasticjobs are not known here")
        super()._may(kind)

    def proxy(self, pod: str, *_: object, **__: object) -> str:
        raise Unanswered(f"{pod} does not answer")


class Scene:
    """A job, and what happens while somebody waits for it: each sleep is one step of the script."""

    def __init__(self, *script: Callable[[Scene], object]) -> None:
        self.cluster = Cluster(CRD, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        self.script, self.said, self.clock = list(script), [], 0.0
        self.waiter = Waiter(Workloads(self.cluster), "digits", self.said.append, lambda: self.clock, self.sleep)  # type: ignore[arg-type]

    said: list[str]

    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        assert self.script, f"it waits for ever: {self.said}"
        self.script.pop(0)(self)

    def job(self, state: str = "", reason: str = "", **fields: Any) -> Document:
        written = {"state": state, "reason": reason, "run": "digits-1", "submitted": 10.0, **fields} if state else {}
        meta = {"name": "digits", "namespace": "team", "uid": "uid-digits"}
        spec = {"image": "i", "module": "m", "workers": {"replicas": 2}, **self.spec}
        return kinds.ELASTIC_JOB.document(meta, spec=spec, status=written)

    spec: Document = {}  # noqa: RUF012

    def submit(self) -> Iterator[str]:
        kind, meta = kinds.ELASTIC_JOB, self.job()["metadata"]
        if self.cluster.find(kind, meta["name"]) is None:
            self.cluster.put(self.job())
            yield "ElasticJob digits created"
        else:
            yield "ElasticJob digits unchanged"

    def wait(self) -> waiting.WaitResult:
        self.waiter.submit(self.submit)
        return self.waiter.wait()


def to(state: str, reason: str = "", **fields: Any) -> Callable[[Scene], object]:
    """The operator writes this."""
    return lambda scene: scene.cluster.put(scene.job(state, reason, **fields))


def nothing(scene: Scene) -> None:
    """Nothing happens."""


def away(scene: Scene) -> None:
    scene.cluster.away = True


def back(scene: Scene) -> None:
    scene.cluster.away = False


def gone(scene: Scene) -> None:
    scene.cluster.delete(kinds.ELASTIC_JOB, "digits")


def pod(state: str) -> Callable[[Scene], object]:
    meta = {"name": "digits-worker-0", "namespace": "team", "labels": WORKER}
    statuses = [{"name": "trainer", "state": {state: {}}}]
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": {"containerStatuses": statuses}}
    return lambda scene: scene.cluster.put(copy.deepcopy(document))


def test_a_wait_ends_when_the_results_are_uploaded() -> None:
    scene = Scene(pod("running"), to("Succeeded", "all workers are done", step=400), nothing, pod("terminated"))
    assert (scene.wait().code, scene.script) == (Code.SUCCEEDED, [])
    scene = Scene(pod("running"), to("Succeeded", "all workers are done", step=400), *[nothing] * 400)
    assert (scene.wait().code, scene.clock) == (Code.SUCCEEDED, pytest.approx(1810, abs=5))
    scene = Scene(pod("running"), to("Succeeded", "all workers are done", step=400), gone)
    assert scene.wait().code is Code.SUCCEEDED, "nothing was to be uploaded"


def test_a_wait_ends_with_the_job_and_tells_how_far_it_is_at_a_calm_pace() -> None:
    training = [to("Running", "all 2 workers train", step=step, steps=400) for step in range(10, 310, 10)]
    scene = Scene(*training, to("Succeeded", "all workers are done", step=400))
    ended = scene.wait()
    assert (ended.code, ended.sentence, ended.status.step) == (Code.SUCCEEDED, "digits has succeeded", 400)
    assert scene.said == [
        "ElasticJob digits created",
        "digits: Pending: no operator has taken it up yet; is one installed? (outlast install)",
        "digits: Running: all 2 workers train; step 10 of 400",
        "digits: Running: all 2 workers train; step 130 of 400",
        "digits: Running: all 2 workers train; step 250 of 400",
    ]


def replaced(scene: Scene) -> None:
    gone(scene)
    new = scene.job("Running")
    new["metadata"]["uid"] = "another"
    scene.cluster.put(new)


def refuses(**what: bool) -> Callable[[Scene], object]:
    """The cluster is away, does not know the kind, or forbids it, from now on or no more."""
    return lambda scene: vars(scene.cluster).update(what)


CANCELLED = "digits was cancelled or deleted by somebody else; submitted again, it goes on"
REPLACED = "digits was submitted again by somebody else, and this run of it is over"
GOES_ON = ("Queued", "Running", "Suspended", "Interrupted", "Resizing", "Restarting")
KINDLESS, KNOWN = refuses(unserved=True), refuses(unserved=False)


@pytest.mark.parametrize(
    ("script", "code", "sentence"),
    [
        ([to("Running"), to("Failed", "restarts are used up", end="BackoffLimitExceeded")], Code.FAILED, "has failed: "),
        ([*map(to, GOES_ON), to("Succeeded")], Code.SUCCEEDED, "digits has succeeded"),
        ([to("Running", step=5), gone], Code.GONE, CANCELLED),
        ([to("Cancelled")], Code.GONE, ""),
        ([to("Running"), replaced], Code.GONE, REPLACED),
        ([KINDLESS, *[nothing] * 20, KNOWN, to("Succeeded")], Code.SUCCEEDED, ""),
    ],
)
def test_a_wait_ends_with_the_job_and_with_nothing_else(
    script: list[Callable[[Scene], object]], code: Code, sentence: str
) -> None:
    ended = Scene(*script).wait()
    assert (ended.code, sentence in ended.sentence) == (code, True)
    assert ended.status.step == (5 if sentence == CANCELLED else 0)


@pytest.mark.parametrize(
    ("before", "script", "error", "after_s"),
    [
        (refuses(away=True), [nothing] * 1000, Unanswered, 600),
        (nothing, [KINDLESS, *[nothing] * 1000], NotServed, 300),
        (KINDLESS, [nothing], NotServed, 0),  # where it was never known there is nothing to wait for
        (nothing, [to("Running"), refuses(forbidden_now=True)], Forbidden, 0),
    ],
)
def test_what_is_refused_is_raised_at_once_and_what_may_pass_after_a_while(
    before: Callable[[Scene], object], script: list[Callable[[Scene], object]], error: type[Exception], after_s: int
) -> None:
    scene = Scene(*script)
    before(scene)
    with pytest.raises(error):
        scene.wait()
    assert after_s <= scene.clock < after_s + 20


def test_an_api_server_that_is_away_does_not_end_the_wait() -> None:
    scene = Scene(to("Running"), away, *[nothing] * 1000, back, nothing, to("Succeeded"))
    assert scene.wait().code is Code.SUCCEEDED
    assert [each for each in scene.said if "fake" in each or "again" in each] == [
        "https://fake does not answer; trying again",
        "the cluster answers again",
    ]


def test_of_a_job_that_was_removed_while_the_api_server_was_away_the_store_knows_how_it_ended() -> None:
    url = f"memory://{uuid.uuid4().hex}/digits"
    place = store.open_(url)
    runs.claim(place, runs.Run("digits-1", "digits", 10.0))

    class WithStore(Scene):
        spec = {"output": url.rpartition("/")[0]}  # noqa: RUF012

    def ends(scene: Scene) -> None:
        runs.end(place, "digits-1", "Succeeded", "all workers are done", 0)
        gone(scene)
        back(scene)

    running = to("Running", store={"url": url, "step": 3})
    assert WithStore(running, away, ends).wait().code is Code.SUCCEEDED
    runs.update(place, "digits-1", state="Running")
    assert WithStore(running, gone).wait().code is Code.GONE
    uploads = to("Succeeded", store={"url": url, "step": 3})
    assert WithStore(pod("running"), uploads, gone).wait().code is Code.GONE, "cancelled before the results were in the store"
    runs.end(place, "digits-1", "Succeeded", "all workers are done", 0)
    assert WithStore(pod("running"), uploads, gone).wait().code is Code.SUCCEEDED


def test_a_second_wait_attaches_to_the_same_job() -> None:
    scene = Scene(to("Running"), to("Succeeded"))
    scene.waiter.submit(scene.submit)  # its pod is killed here
    again = Waiter(scene.waiter.workloads, "digits", scene.said.append, scene.waiter.now, scene.waiter.sleep)
    again.submit(scene.submit)
    assert again.wait().code is Code.SUCCEEDED
    assert scene.said[:2] == ["ElasticJob digits created", "ElasticJob digits unchanged"]


def a_pod(*, reason: str = "", deleted: bool = False) -> Document:
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": reason}] if reason else []
    meta = {"name": "p", **({"deletionTimestamp": apiserver.NOW} if deleted else {})}
    return {"metadata": meta, "status": {"conditions": conditions}}


def a_workflow(*, deleted: bool = False, **spec: Any) -> Document:
    return {"metadata": {"name": "w", **({"deletionTimestamp": apiserver.NOW} if deleted else {})}, "spec": spec}


EVICTED = "the step's pod is evicted (%s), and the step is to be run again"


@pytest.mark.parametrize(
    ("pod", "owner", "sentence"),
    [
        (None, None, ""),
        (a_pod(), a_workflow(), ""),  # Argo signals the container, and deletes nothing
        (a_pod(deleted=True), a_workflow(shutdown="Stop"), ""),
        (a_pod(deleted=True), a_workflow(activeDeadlineSeconds=0), ""),
        (a_pod(deleted=True), a_workflow(deleted=True), ""),
        (a_pod(deleted=True), None, ""),  # the Workflow was deleted, or the pod has none
        (a_pod(reason="EvictionByEvictionAPI", deleted=True), a_workflow(shutdown="Terminate"), ""),  # nobody runs it again
        (a_pod(deleted=True), a_workflow(), "the step's pod is deleted, and Workflow w goes on"),
        (a_pod(reason="EvictionByEvictionAPI", deleted=True), a_workflow(), EVICTED % "EvictionByEvictionAPI"),
        (a_pod(reason="PreemptionByScheduler"), None, EVICTED % "PreemptionByScheduler"),
    ],
)
def test_sigterm_cancels_the_job_unless_the_step_is_to_be_run_again(
    pod: Document | None, owner: Document | None, sentence: str
) -> None:
    assert waiting.reason_to_continue(pod, owner) == sentence
    scene = Scene()
    scene.waiter.submit(scene.submit)
    ended = scene.waiter.on_sigterm("cancel", lambda: (pod, owner))
    assert (ended.code, scene.cluster.find(kinds.ELASTIC_JOB, "digits") is None) == (Code.TERMINATED, not sentence)
    assert ended.sentence == (
        f"SIGTERM: digits is not cancelled: {sentence}" if sentence else "SIGTERM: digits is cancelled; what it has saved stays"
    )


def test_a_step_knows_its_pod_and_the_workflow_that_owns_it_also_when_the_pod_was_deleted_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeconfig, "ACCOUNT", tmp_path)
    (tmp_path / "token").touch()
    (tmp_path / "namespace").write_text("team\n")
    environ = {"KUBERNETES_SERVICE_HOST": "h", contract.Env.POD: "step"}
    owner = {"kind": "Workflow", "name": "w", "uid": "u"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "step", "namespace": "team", "ownerReferences": [owner]}}
    workflow = {"apiVersion": kinds.WORKFLOW.api_version, "kind": "Workflow", "metadata": {"name": "w", "namespace": "team"}}
    cluster = FakeCluster(pod, workflow, served=(kinds.WORKFLOW,))
    before, found = waiting.own_pod(cluster, environ)  # type: ignore[arg-type]
    assert (before and before["metadata"]["name"], found and found["metadata"]["name"]) == ("step", "w")
    cluster.delete(kinds.POD, "step")
    assert waiting.reason_to_continue(*waiting.own_pod(cluster, environ, last=before)).endswith("Workflow w goes on")  # type: ignore[arg-type]
    cluster.delete(kinds.WORKFLOW, "w")
    assert waiting.reason_to_continue(*waiting.own_pod(cluster, environ, last=before)) == ""  # type: ignore[arg-type]
    assert waiting.own_pod(cluster, environ) == waiting.own_pod(cluster, {}) == (None, None)  # type: ignore[arg-type]


def test_sigterm_leaves_what_is_not_ours_and_what_is_to_be_left() -> None:
    scene = Scene()
    scene.cluster.put(scene.job("Running"))
    assert terminated(scene).endswith("is not cancelled: it was not submitted yet")
    scene.waiter.submit(scene.submit)
    assert terminated(scene, "leave").endswith("is not cancelled: --on-terminate is leave")
    to("Succeeded")(scene)
    assert terminated(scene) == "SIGTERM: digits has ended already (Succeeded)"
    scene.cluster.put({**scene.job("Running"), "metadata": {**scene.job()["metadata"], "uid": "another"}})
    assert terminated(scene).endswith("is not cancelled: somebody else has submitted it again")
    assert scene.cluster.find(kinds.ELASTIC_JOB, "digits") is not None
    gone(scene)
    assert terminated(scene) == "SIGTERM: digits is gone already"
    scene = Scene(*[nothing] * 10)
    scene.waiter.submit(scene.submit)
    away(scene)
    said = terminated(scene)
    assert said.startswith("SIGTERM: digits could not be cancelled: https://fake does not answer; do it with: outlast cancel")


def terminated(scene: Scene, mode: str = "cancel", pod: Document | None = None) -> str:
    def look() -> tuple[Document | None, Document | None]:
        scene.cluster._may(kinds.POD)
        return pod, None

    return scene.waiter.on_sigterm(mode, look).sentence


def test_at_sigterm_during_an_outage_the_pod_is_read_before_anything_is_cancelled() -> None:
    for pod, left in ((a_pod(reason="EvictionByEvictionAPI"), True), (None, False)):
        scene = Scene(nothing, back)
        scene.waiter.submit(scene.submit)
        away(scene)
        assert ("is evicted" in terminated(scene, pod=pod)) is left
        assert (scene.cluster.find(kinds.ELASTIC_JOB, "digits") is not None) is left
    scene = Scene(lambda scene: setattr(scene.cluster, "unserved", False))
    scene.waiter.submit(scene.submit)
    scene.cluster.unserved = True  # an API server that has just started
    assert terminated(scene).endswith("is cancelled; what it has saved stays")


# Outputs


def a_status(**fields: Any) -> JobStatus:
    return JobStatus(**{"name": "digits", "run": "digits-1", "state": State.SUCCEEDED, "step": 400, "submitted": 100.0, **fields})


def test_the_outputs_are_what_the_status_and_the_store_say(tmp_path: Path) -> None:
    logged = [{"step": 390, "loss": 0.5}, {"step": 400, "loss": 0.4, "lr": 0.1}, {"step": 400, "val_loss": 0.3}]
    there = {
        "output": "s3://b/digits",
        "run": "digits-1",
        "goodput": 0.9,
        "checkpoint": "s3://b/digits/checkpoints/step-400/x",
        "checkpoint_step": 400,
        "best_checkpoint": "s3://b/digits/checkpoints/step-300/y",
        "best_step": 300,
        "best_metric": 0.25,
        "best_by": "val_loss",
        **outcome.metric_outputs([{"accuracy": 97.5}], logged),
    }
    found = outcome.outcome(a_status(steps=400, finished=160.5, restarts=1, goodput=0.8), "team", there, now=1000.0)
    assert found.missing == {}
    texts = found.texts()
    assert (texts["state"], texts["step"], texts["seconds"], texts["restarts"]) == ("Succeeded", "400", "60.5", "1")
    assert {name: texts[name] for name in there} == {name: str(value) for name, value in there.items()}
    assert (texts["loss"], texts["accuracy"], texts["metrics"]) == ("0.3", "97.5", '{"step": 400, "val_loss": 0.3}')
    diverged = outcome.metric_outputs([], [{"loss": float("nan")}])
    found_nan = outcome.outcome(a_status(), "team", diverged, now=1.0)
    assert (found_nan.texts()["loss"], found_nan.texts()["metrics"]) == ("nan", '{"loss": null}')
    assert json.loads(found_nan.json(), parse_constant=pytest.fail)["loss"] is None
    found.write(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*outcome.OUTPUTS, outcome.FILE}
    assert json.loads((tmp_path / "out" / outcome.FILE).read_text())["best_metric"] == 0.25


def test_what_is_not_known_is_empty_and_has_its_reason() -> None:
    status = a_status(output="/out/digits in its pods", checkpoint=CheckpointStatus(step=380, path="", time=1.0))
    found = outcome.outcome(status, "team", outcome.read(status), now=130.0)
    assert (found.values["checkpoint_step"], found.values["seconds"], found.texts()["checkpoint"]) == (380, 30.0, "")
    assert found.missing["checkpoint"] == "the output is in no store (/out/digits in its pods), and this step does not see it"
    assert found.missing["steps"] == "the training does not tell how many"
    assert json.loads(found.json())["loss"] is None
    assert set(found.values) | set(found.missing) == set(outcome.OUTPUTS)
    lost = outcome.outcome(JobStatus(name="digits", run="", state=State.CANCELLED), "team", "unread", now=1.0)
    assert lost.missing["run"] == "the job was gone before its status could be read"


def test_a_store_with_nothing_or_none_at_all_is_no_error(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/digits"
    empty = outcome.read(a_status(store=StoreStatus(url=url)))
    assert isinstance(empty, dict)
    assert {name: value for name, value in empty.items() if value is not None} == {"output": url, "run": "digits-1"}
    found = outcome.outcome(a_status(), "team", empty, now=1.0)
    assert found.missing["best_step"] == "no checkpoint has a metric"
    assert found.missing["goodput"] == "the store has no ledger of the run"
    wrong = outcome.read(a_status(store=StoreStatus(url="nowhere://x/y")))
    assert isinstance(wrong, str)
    assert "nowhere://x/y cannot be read" in wrong


# The command

JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: digits}
spec: {image: example.org/outlast:1, module: outlast.recipes.smoke, workers: {replicas: 2}}
"""


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[apiserver.ApiServer]:
    api = apiserver.ApiServer(unserved=("scheduling.x-k8s.io",))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    with apiserver.entered(api, tmp_path, monkeypatch):
        yield api


def jobs(api: apiserver.ApiServer) -> dict[str, Document]:
    return {key[2]: each for key, each in api.documents.items() if key[0] == kinds.ELASTIC_JOB.resource}


def ends(api: apiserver.ApiServer, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Have an operator end every job at once when it has been submitted."""
    original = Waiter.submit

    def submitted(waiter: Waiter, apply: Callable[[], Iterator[str]]) -> None:
        original(waiter, apply)
        job = jobs(api)[waiter.name]
        api.put({**copy.deepcopy(job), "status": {"state": state, "run": "digits-1", "step": 8}})

    monkeypatch.setattr(Waiter, "submit", submitted)


def test_submit_waits_and_writes_the_outputs(
    api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(api, monkeypatch, "Succeeded")
    code, out, err = outlast("submit", "job.yaml", "--wait", "--outputs", "out")
    assert (code, out) == (0, "")
    assert err.endswith("outlast | digits has succeeded\n")
    assert "output loss is empty: the output is in no store" in err
    assert (tmp_path / "out" / "state").read_text() == "Succeeded"
    assert json.loads((tmp_path / "out" / "outputs.json").read_text())["step"] == 8
    code, _, err = outlast("submit", "job.yaml", "--wait")
    assert (code, "has ended (Succeeded) and is not run again" in err) == (0, True)


@pytest.mark.parametrize(("state", "code"), [("Failed", 3), ("Cancelled", 4)])
def test_the_exit_code_says_how_the_job_ended(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    ends(api, monkeypatch, state)
    assert outlast("submit", "job.yaml", "--wait", "--outputs", "out")[0] == code
    assert Path("out/state").read_text() == state


def test_each_key_has_a_job_of_its_own_and_finds_it_again(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(api, monkeypatch, "Succeeded")
    made = []
    for more in ([], [], ["--workers", "3"]):
        before = set(jobs(api))
        assert outlast("submit", "job.yaml", "--wait", "--idempotency-key", "run-1", *more)[0] == 0
        made.append(len(set(jobs(api)) - before))
    assert made == [1, 0, 1]
    names = {
        step.with_key(spec.parse(JOB), key, *content).metadata.name for key in ("run-1", "run-2") for content in ((), ("x",))
    }
    assert len(names) == 4
    longest = JOB.replace("name: digits", f"name: d{'i' * (contract.LONGEST_NAME - 1)}")
    assert len(step.with_key(spec.parse(longest), "run-1").metadata.name) == contract.LONGEST_NAME
    assert all(re.fullmatch(r"digits-[0-9a-f]{12}", name) for name in jobs(api))


@pytest.fixture
def sigterm() -> Iterator[None]:
    """The handler of SIGTERM afterwards is the one before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
@pytest.mark.parametrize(("mode", "left"), [("cancel", 0), ("leave", 1)])
def test_sigterm_ends_the_wait_and_the_job_if_that_is_wanted(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch, mode: str, left: int
) -> None:
    monkeypatch.setattr(Waiter, "wait", lambda waiter: os.kill(os.getpid(), signal.SIGTERM))
    code, _, err = outlast("submit", "job.yaml", "--wait", "--on-terminate", mode)
    assert (code, len(jobs(api))) == (143, left)
    assert f"SIGTERM: digits is {'not ' * left}cancelled" in err


@pytest.mark.usefixtures("sigterm")
def test_sigterm_while_the_job_is_submitted_comes_when_it_is_known_whether_it_is_ours(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = kube.Cluster.apply

    def apply(cluster: kube.Cluster, document: Document, **more: Any) -> Document:
        made = original(cluster, document, **more)
        os.kill(os.getpid(), signal.SIGTERM)
        return made

    monkeypatch.setattr(kube.Cluster, "apply", apply)
    code, _, err = outlast("submit", "job.yaml", "--wait")
    assert (code, jobs(api)) == (143, {})
    assert "SIGTERM: digits is cancelled" in err


def test_outputs_that_cannot_be_written_are_a_mistake_before_anything_is_submitted(
    api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path
) -> None:
    (tmp_path / "out").touch()
    code, _, err = outlast("submit", "job.yaml", "--wait", "--outputs", "out")
    assert (code, jobs(api)) == (2, {})
    assert err.splitlines()[-1].startswith("Error: the outputs cannot be written: ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--wait", "--fresh"), "--wait and --fresh exclude each other: a step that is run again would start again"),
        (("--outputs", "out"), "--outputs and --on-terminate are for --wait; add it"),
    ],
)
def test_options_that_exclude_each_other_are_one_sentence(
    api: apiserver.ApiServer, outlast: Outlast, words: tuple[str, ...], sentence: str
) -> None:
    code, out, err = outlast("submit", "job.yaml", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: {sentence}")
    assert jobs(api) == {}
