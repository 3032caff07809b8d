"""`outlast notebook --on kubernetes`: its objects, its rights, and the command against a small API server."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as schemas

import apiserver
import ports
from fake_cluster import FakeCluster
from outlast.cluster import notebook as cluster_notebook
from outlast.errors import Forbidden, OutlastError
from outlast.kube import kinds
from outlast.manifests import notebook, rbac
from outlast.manifests.notebook import Wanted
from rights import needed, rights
from test_fleet import closed
from test_kube import upgraded

Document = dict[str, Any]
Outlast = Callable[..., tuple[int, str, str]]
NEWEST = max(schemas.all_versions(), key=lambda version: [int(part) for part in version.split(".")])
PUBLISHED = Path(__file__).parent / "published" / "kubeflow"


def a_notebook(**fields: Any) -> Wanted:
    return Wanted(**{"name": "notebook", "namespace": "team", **fields})


FOR_SPARK = {("get", "", "serviceaccounts"), *(("get", "rbac.authorization.k8s.io", each) for each in ("roles", "rolebindings"))}
TO_FOLLOW = {("get", "", "pods"), ("watch", "", "pods")}
"""For `outlast logs -f` and `--follow`."""
WANTED = [
    a_notebook(),
    a_notebook(name="n" * 52, gpus=2, storage_class="fast", shared=True, secrets=("aws", "hf"), cpu=0.5, image="mine:1"),
]


@functools.cache
def of_kubeflow() -> jsonschema.Draft7Validator:
    """The schema of Kubeflow's v1 Notebook, without unknown fields, which an API server would drop."""
    text = (PUBLISHED / "kubeflow.org_notebooks.yaml").read_text().partition("\n  - name: v1alpha1\n")[0]
    (version,) = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    assert version["name"] == kinds.NOTEBOOK.api_version.partition("/")[2]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"]["additionalProperties"] = True
    return jsonschema.Draft7Validator(closed(schema))


def pod_of(document: Document) -> Document:
    return dict(document["spec"]["template"]["spec"])


# What is made


@pytest.mark.parametrize("wanted", WANTED, ids=["default", "all"])
def test_its_objects_are_valid_and_its_pod_is_restricted(wanted: Wanted) -> None:
    made = notebook.documents(wanted, kubeflow=False)
    assert [each["kind"] for each in made] == ["PersistentVolumeClaim", "Service", "StatefulSet"]
    for document in [*made, notebook.secret(wanted.name, wanted.namespace, "t" * 64), *rbac.notebook("team", {})]:
        schemas.validate(document, NEWEST, strict=True)
    *_, claim, own = notebook.documents(wanted, kubeflow=True)
    assert list(of_kubeflow().iter_errors(own)) == []
    assert claim == made[0]
    pod, pod_there = pod_of(made[-1]), pod_of(own)
    (container,), (container_there,) = pod["containers"], pod_there["containers"]
    assert container.pop("readinessProbe")["httpGet"]["path"] == "/api"
    assert container_there.pop("readinessProbe")["httpGet"]["path"] == f"/notebook/team/{wanted.name}/api"
    assert container_there["args"].pop(0) == "--kubeflow", "serve below NB_PREFIX"
    assert pod == pod_there, "one pod, whoever makes it"
    assert pod["securityContext"]["runAsNonRoot"] is container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["name"] == wanted.name, "Kubeflow shows the state of that container"
    assert container["image"] == (wanted.image or notebook.IMAGE)
    assert [each["secretRef"]["name"] for each in container.get("envFrom", ())] == list(wanted.secrets)
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == wanted.gpus
    assert made[0]["spec"].get("storageClassName", "") == wanted.storage_class
    assert made[0]["spec"]["accessModes"] == ["ReadWriteMany" if wanted.shared else "ReadWriteOnce"]
    (tolerated,) = pod.get("tolerations") or [{"key": "nvidia.com/gpu"}]
    assert tolerated["key"] == "nvidia.com/gpu", "and no taint of spot nodes"
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]} in term["matchExpressions"]


def test_a_notebook_with_gpus_has_the_image_with_cuda_unless_another_is_named() -> None:
    (container,) = pod_of(notebook.documents(a_notebook(gpus=1), kubeflow=False)[-1])["containers"]
    assert container["image"] == notebook.IMAGE_CUDA


def test_kubeflow_knows_it_as_one_of_its_own() -> None:
    _, own = notebook.documents(a_notebook(), kubeflow=True)
    meta = own["metadata"]
    assert meta["annotations"]["notebooks.kubeflow.org/server-type"] == "jupyter", "else its list has no Connect"
    assert meta["annotations"]["karpenter.sh/do-not-disrupt"] == "true", "it is copied to the pod"
    assert meta["labels"]["app"] == "notebook"
    names = [each["name"] for each in pod_of(own)["containers"][0]["env"]]
    assert "NB_PREFIX" not in names, "its controller adds it, and leaves one that is there as it is"


def test_the_token_is_in_a_file_alone() -> None:
    token = "0123456789abcdef" * 4
    made = notebook.secret("notebook", "team", token)
    assert base64.b64decode(made["data"]["token"]).decode() == token
    assert made["immutable"]
    for kubeflow in (False, True):
        text = json.dumps(notebook.documents(a_notebook(), kubeflow=kubeflow))
        assert "secretKeyRef" not in text, "neither in a variable, which kernels would inherit"
        (container,) = pod_of(notebook.documents(a_notebook(), kubeflow=kubeflow)[-1])["containers"]
        assert container["args"][-2:] == ["--token-file", "/etc/outlast-notebook/token"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"size": "ten"}, "--size ten: "),
        ({"memory": "4GB!"}, "--memory 4GB!: "),
    ],
)
def test_what_cannot_be_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OutlastError, match=re.escape(sentence)):
        notebook.documents(a_notebook(**given), kubeflow=False)


@pytest.mark.parametrize("name", ["Notebook", "1st", "a-", "n" * 53, "a.b"])
def test_a_name_that_pods_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(OutlastError, match="cannot name a notebook; at most 52 lower-case letters"):
        notebook.checked(name)


# Its rights


def test_its_account_reads_no_secret_and_gives_no_rights() -> None:
    account, role, binding = rbac.notebook("team", {})
    allowed = rights(role["rules"])
    assert not {(verb, group) for verb, group, what in allowed if what == "secrets"} - {("create", "")}
    assert allowed >= TO_FOLLOW
    given = {(verb, what) for verb, _, what in allowed if what in ("roles", "rolebindings", "serviceaccounts")}
    assert {verb for verb, _ in given} == {"get"}
    assert not {verb for verb, _, _ in allowed} & {"*", "escalate", "bind", "impersonate"}
    assert not {what for _, _, what in allowed} & {"pods/exec", "pods/portforward", "pods/ephemeralcontainers", "*"}
    assert role["kind"] == "Role", "in its namespace alone"
    assert binding["roleRef"]["name"] == account["metadata"]["name"] == rbac.NOTEBOOK


JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: train}
spec:
  image: example.org/outlast:1
  module: outlast.recipes.smoke
  code: .
  workers: {replicas: 2, min: 1, max: 3}
  volumes: [{claim: disk, to: /data, size: 1Gi}]
"""
NAMESPACE: Document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[apiserver.ApiServer]:
    """A cluster with the operator's definition and without Kubeflow, and a namespace `team` in it."""
    api = apiserver.ApiServer(unserved=("kubeflow.org", "batch.volcano.sh", "scheduling.x-k8s.io", "scheduling.volcano.sh"))
    monkeypatch.chdir(tmp_path)
    api.put(json.loads(json.dumps(NAMESPACE)))
    with apiserver.serving(api) as url:
        monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path / "config", url)))
        monkeypatch.setenv("OUTLAST_STATE_DIR", str(tmp_path / "state"))
        yield api


@pytest.mark.slow
def test_the_rights_of_a_notebook_are_those_that_its_commands_use(
    api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path
) -> None:
    _, role, _ = rbac.notebook("team", {})
    allowed = rights(role["rules"])
    used: set[tuple[str, str, str]] = set()

    def may(asked: str) -> bool:
        if (found := needed(asked)) is None or found[0][2] == "namespaces":
            return True
        right, _, name = found
        asks = {right, ("create", *right[1:])} if "force=true" in asked else {right}  # an apply may have to create
        if not asks <= rights(role["rules"], name or None):
            return False
        used.update(asks)
        return True

    def do(*words: str) -> str:
        code, out, err = outlast(*words, "-n", "team")
        assert code == 0, f"{words}: {err}"
        return out

    api.may, api.forbids = may, 'User "me" cannot send resource "{asked}"'
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "main.py").write_text("")
    assert "ElasticJob train created" in do("submit", "job.yaml")
    job = api.documents["elasticjobs.outlast.dev", "team", "train"]
    labels = {"outlast.dev/job": "train", "app.kubernetes.io/component": "worker"}
    running = {"name": "worker", "ready": True, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    api.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "train-worker-0", "namespace": "team", "labels": {**labels, "outlast.dev/worker": "0"}},
            "spec": {"containers": [{"name": "worker"}], "nodeName": "a"},
            "status": {"phase": "Running", "containerStatuses": [running]},
        }
    )
    api.logs["train-worker-0"] = ["2026-01-01T00:00:00Z begun"]
    api.metrics["train-worker-0"] = "outlast_step 7\n"
    assert "7" in do("status", "train")
    assert "begun" in do("logs", "train")
    do("why", "train")
    do("scale", "train", "3")
    do("chaos", "train", "kill-worker", "--yes")
    do("cancel", "train")
    assert job["metadata"]["name"] not in [name for _, _, name in api.documents]
    do("submit", "job.yaml", "--as", "indexed-job", "--name", "plain")
    assert ("secrets", "team", "plain-rdzv") in api.documents, "made, although none may be read"
    do("cancel", "plain")
    do("data", "get", "cifar10", "--on", "kubernetes", "--claim", "disk:/data")
    do("cancel", "data-cifar10")
    assert allowed - used == FOR_SPARK | TO_FOLLOW


# Why it does not start

EVENT: Document = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "lastTimestamp": "2026-01-01T00:00:00Z"}


def a_pod(**status: Any) -> Document:
    (made,) = (each for each in notebook.documents(a_notebook(), kubeflow=False) if each["kind"] == "StatefulSet")
    template = made["spec"]["template"]
    labels = {**template["metadata"]["labels"], "apps.kubernetes.io/pod-index": "0", "notebook-name": "notebook"}
    meta = {"name": "notebook-0", "namespace": "team", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": dict(template["spec"]), "status": status}


def an_event(about: str, reason: str, message: str) -> Document:
    name = "notebook-0" if about == "Pod" else "notebook"
    return {**EVENT, "involvedObject": {"kind": about, "name": name}, "reason": reason, "message": message}


def waiting(reason: str, message: str) -> Document:
    state = {"waiting": {"reason": reason, "message": message}}
    pod = a_pod(phase="Pending", containerStatuses=[{"name": "notebook", "image": notebook.IMAGE, "state": state}])
    pod["spec"]["nodeName"] = "a"
    return pod


ELSEWHERE = "2 node(s) didn't match PersistentVolume's node affinity"
SPOT = "2 node(s) didn't match Pod's node affinity/selector"


def ended(said: str) -> Document:
    """A pod whose container ends again and again."""
    pod = waiting("CrashLoopBackOff", "back-off 40s restarting failed container")
    last = {"exitCode": 2, "reason": "Error", "message": f"{said}\n", "finishedAt": "2026-01-01T00:00:00Z"}
    pod["status"]["containerStatuses"][0] |= {"restartCount": 3, "lastState": {"terminated": last}}
    return pod


BOUND = {**notebook.documents(a_notebook(), kubeflow=False)[0], "status": {"phase": "Bound"}}
SCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
NODE: Document = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}, "spec": {}}
NODE |= {"status": {"allocatable": {"cpu": "0.5"}, "conditions": [{"type": "Ready", "status": "True"}]}}


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [
        (
            [
                an_event(
                    "StatefulSet",
                    "FailedCreate",
                    'create Pod notebook-0 in StatefulSet notebook failed error: pods "notebook-0" is forbidden: exceeded quota: '
                    "small, requested: pods=1, used: pods=3, limited: pods=3",
                )
            ],
            "it has no pod: the quota small of the namespace leaves too little: pods: a pod asks for 1, 3 of 3 are used; "
            "remove what is no longer needed, ask for less (--cpu, --memory, --gpu), or have the quota raised",
        ),
        (
            [
                an_event(
                    "StatefulSet",
                    "FailedCreate",
                    'pods "notebook-0" is forbidden: violates PodSecurity "restricted:latest": unrestricted capabilities',
                )
            ],
            "it has no pod: the Pod Security level restricted:latest of the namespace refuses the pods: unrestricted "
            "capabilities; choose a namespace with a lower level, or the image of Outlast",
        ),
        (
            [NODE, BOUND, waiting("ImagePullBackOff", "ghcr.io/outlast/outlast:0.1-notebook: not found")],
            "pod notebook-0 waits for the image ghcr.io/outlast/outlast:0.1-notebook, which does not exist in its registry; "
            "correct --image, or push it",
        ),
        (
            [a_pod(phase="Pending"), notebook.documents(a_notebook(), kubeflow=False)[0]],
            "pod notebook-0 waits for the claim notebook-work, which has no volume: it names no storage class, and the cluster "
            "has no default one; name one of the cluster's with --storage-class (after --delete: a claim does not change), "
            "or make a volume",
        ),
        (
            [
                NODE,
                BOUND,
                a_pod(
                    phase="Pending",
                    conditions=[{**SCHEDULED, "message": "0/1 nodes are available: 1 Insufficient cpu. preemption: none"}],
                ),
            ],
            "pod notebook-0 finds no node that is large enough: each asks for 1 cores; ask for less with --cpu, or add nodes",
        ),
        (
            [
                NODE,
                BOUND,
                a_pod(phase="Pending", conditions=[{**SCHEDULED, "message": f"0/2 nodes are available: {ELSEWHERE}."}]),
            ],
            "pod notebook-0 finds no node: its volume is in another zone or on another machine than the free nodes; add a node "
            "where the volume is; or --delete it, and name a --storage-class with WaitForFirstConsumer",
        ),
        (
            [NODE, BOUND, a_pod(phase="Pending", conditions=[{**SCHEDULED, "message": f"0/2 nodes are available: {SPOT}."}])],
            "pod notebook-0 finds no node: none has the labels that it needs; add nodes that are not spot machines, where no "
            "notebook runs",
        ),
        (
            [NODE, BOUND, ended("Error: JupyterLab is not installed; pip install 'outlast[notebook]'")],
            "pod notebook-0 ended with exit code 2: Error: JupyterLab is not installed; pip install 'outlast[notebook]'; "
            "correct what it says; an image of yours needs Outlast and JupyterLab (--image)",
        ),
        ([a_pod(phase="Running")], ""),
    ],
    ids=["quota", "pod-security", "image", "claim", "cpu", "elsewhere", "spot", "no-jupyterlab", "nothing"],
)
def test_why_it_does_not_start_is_one_sentence(documents: list[Document], sentence: str) -> None:
    there = notebook.documents(a_notebook(), kubeflow=False)[-1]
    cluster: Any = FakeCluster(there, *json.loads(json.dumps(documents)))
    found = cluster_notebook.find(cluster, "notebook")
    assert found is not None
    assert cluster_notebook.why(cluster, found) == sentence


# The command


class Notebook(BaseHTTPRequestHandler):
    """Answers as JupyterLab: with the token, or not."""

    token = ""

    def do_GET(self) -> None:
        self.send_response(200 if self.token and self.path.endswith(f"?token={self.token}") else 403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def frame(handler: BaseHTTPRequestHandler) -> bytes:
    """The next message of a client over a websocket; empty at its end."""
    head = handler.rfile.read(2)
    if len(head) < 2 or head[0] & 0x0F == 8:
        return b""
    length = head[1] & 0x7F
    length = int.from_bytes(handler.rfile.read(2), "big") if length == 126 else length
    mask, message = handler.rfile.read(4), handler.rfile.read(length)
    return bytes(byte ^ mask[n % 4] for n, byte in enumerate(message))


@contextlib.contextmanager
def forwarding(api: apiserver.ApiServer, times: int) -> Iterator[None]:
    """The ports of pods lead to a Notebook, so many times."""

    def forwarded(handler: BaseHTTPRequestHandler) -> bool:
        upgraded(handler, "v4.channel.k8s.io")
        for message in (b"\0\xb8\x22", b"\1\xb8\x22"):
            handler.wfile.write(bytes([0x82, len(message)]) + message)
        handler.wfile.flush()
        asked = frame(handler)[1:]
        with socket.create_connection(server.server_address[:2]) as there:
            there.sendall(asked)
            there.shutdown(socket.SHUT_WR)
            answer = b"\0" + b"".join(iter(functools.partial(there.recv, 4096), b""))
        size = bytes([len(answer)]) if len(answer) < 126 else bytes([126, *len(answer).to_bytes(2, "big")])
        handler.wfile.write(b"\x82" + size + answer + b"\x88\0")
        handler.wfile.flush()
        return True

    with ThreadingHTTPServer(("127.0.0.1", 0), Notebook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api.prescribe("GET .*/pods/notebook-0/portforward", *[forwarded] * times)
        yield
        server.shutdown()


def answer(port: int, path: str) -> int:
    """The HTTP status over a forwarded port; 0 while nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        return connection.getresponse().status
    return 0


class Full:
    """A listener for which there are too many open files, once."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.refusals = listener, [OSError(errno.EMFILE, "Too many open files")]

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *error: object) -> None:
        self.listener.close()

    def accept(self) -> tuple[socket.socket, Any]:
        if self.refusals:
            raise self.refusals.pop()
        return self.listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.listener, name)


def test_a_port_goes_on_when_files_were_short_and_a_missing_right_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def forward(self, pod: str, port: int, connection: socket.socket) -> None:
            raise Forbidden("eve may not forward to pods")

    made = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda address: Full(made(address)))
    monkeypatch.setattr(cluster_notebook, "_PAUSE_S", 0.0)
    said: list[str] = []
    cluster: Any = Refusing()
    with cluster_notebook.forwarded(cluster, "notebook-0", 0, said.append) as port:
        assert [answer(port, "/") for _ in range(2)] == [0, 0], "closed, and not left waiting"
    assert said == ["the notebook cannot be reached from here: eve may not forward to pods"]


START = ("notebook", "--on", "kubernetes", "-n", "team")
SET, POD = ("statefulsets.apps", "team", "notebook"), ("pods", "team", "notebook-0")
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def test_it_is_made_reached_with_its_token_found_again_and_stopped(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_notebook, "POLL_S", 0.02)
    monkeypatch.setattr(cluster_notebook, "_WHY_S", 0.0)
    port, statuses = ports.free(), []

    looks = "GET /api/v1/namespaces/team/pods/notebook-0"

    def asked(path: str) -> int:
        return sum(path in each for each in list(api.asked))

    def person() -> None:
        api.until(lambda: SET in api.documents)
        for document in (NODE, BOUND):
            api.put(json.loads(json.dumps(document)))
        api.put(waiting("ImagePullBackOff", "not found"))
        api.until(lambda: asked("/storageclasses") > 1)
        Notebook.token = base64.b64decode(api.documents["secrets", "team", "notebook-token"]["data"]["token"]).decode()
        api.put(a_pod(**READY))
        api.until(lambda: answer(port, "/lab") == 403)
        statuses.append(answer(port, f"/lab?token={Notebook.token}"))
        api.remove(*POD[::2], "team")
        known = asked("/storageclasses")
        api.until(lambda: asked("/storageclasses") > known + 1)
        api.put(a_pod(**READY))
        api.until(lambda: answer(port, f"/lab?token={Notebook.token}") == 200)
        known = asked(looks)
        api.until(lambda: asked(looks) > known + 2)  # also that it is ready has been seen
        api.remove(*POD[::2], "team")
        api.remove(*SET[::2], "team")

    thread = threading.Thread(target=person)
    with forwarding(api, 100):
        thread.start()
        code, out, err = outlast(*START, "--port", port, "--secret", "aws")
        thread.join(60)
    assert statuses == [200]
    url = f"http://localhost:{port}/lab/tree/first.ipynb?token={Notebook.token}"
    assert (code, out) == (2, f"JupyterLab: {url} (Ctrl-C ends the connection, the notebook goes on)\n")
    assert len(Notebook.token) == 64
    said = [line.removeprefix("outlast | ") for line in err.splitlines()]
    assert said[:6] == [
        "ServiceAccount notebook created, with a Role of its own",
        "Secret notebook-token created",
        "PersistentVolumeClaim notebook-work created",
        "Service notebook created",
        "StatefulSet notebook created",
        "pod notebook-0 waits for the image ghcr.io/outlast/outlast:0.1-notebook, which does not exist in its registry; "
        "correct --image, or push it",
    ]
    assert "the notebook is not ready any more: its pod is started again, or replaced" in said
    assert "it is ready again; reload the page if it does not connect by itself" in said
    assert said[-1].startswith("Error: StatefulSet notebook is gone: somebody has deleted it")
    code, _, err = outlast(*START, "--detach")
    assert "PersistentVolumeClaim notebook-work exists and is used as it is\n" in err
    before = json.dumps(sorted(map(list, api.documents)))
    assert outlast(*START, "--detach", "--size", "20Gi") == (
        0,
        "open it with: outlast notebook --on kubernetes -n team\n",
        "outlast | StatefulSet notebook exists and is used as it is\n",
    )
    assert json.dumps(sorted(map(list, api.documents))) == before
    code, out, _ = outlast(*START, "--stop")
    assert out.splitlines() == [
        "StatefulSet notebook deleted",
        "Service notebook deleted",
        "Secret notebook-token deleted",
        "RoleBinding notebook deleted",
        "Role notebook deleted",
        "ServiceAccount notebook deleted",
        "the work is kept in PersistentVolumeClaim notebook-work; --delete deletes it, too",
    ]
    assert outlast(*START, "--stop")[2] == (
        "Error: there is no notebook notebook in namespace team; its claim is kept, --delete removes that, too\n"
    )
    assert "and all work on its claim; add --yes to confirm" in outlast(*START, "--delete")[2]
    assert outlast(*START, "--delete", "--yes")[1] == "PersistentVolumeClaim notebook-work deleted\n"
    left = sorted(key for key in api.documents if key[1] == "team")
    assert left == [
        ("rolebindings.rbac.authorization.k8s.io", "team", "spark"),
        ("roles.rbac.authorization.k8s.io", "team", "spark"),
        ("serviceaccounts", "team", "spark"),
    ], "whose jobs may go on"


def test_where_kubeflow_is_it_is_one_of_its_notebooks(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.unserved = ()
    assert "Notebook notebook created" in outlast(*START, "--detach")[2]
    key = ("notebooks.kubeflow.org", "team", "notebook")
    assert SET not in api.documents, "its controller makes it"
    with api.lock:
        idle = json.loads(json.dumps(api.documents[key]))
        idle["metadata"]["annotations"][notebook.STOPPED] = "2026-01-01T00:00:00Z"
        api.put(idle)
    assert "Notebook notebook was stopped, and is started again" in outlast(*START, "--detach")[2]
    assert notebook.STOPPED not in [k for k, v in api.documents[key]["metadata"]["annotations"].items() if v]
    assert outlast(*START, "--stop")[1].splitlines()[:2] == ["Notebook notebook deleted", "Secret notebook-token deleted"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--on", "cluster"), "no place for a notebook cluster; there is kubernetes"),
        (("--image", "a:1", "--stop"), "--image, --stop: only for a notebook in a cluster; add --on kubernetes"),
        (("--on", "kubernetes", "--bind", "0.0.0.0"), "--bind, --token-file, --open and --kubeflow are for a notebook on this"),
        (("--on", "kubernetes", "-n", "nowhere"), "there is no namespace nowhere in "),
        (("--on", "kubernetes", "-n", "team", "A"), "A cannot name a notebook; at most 52 lower-case letters"),
        (("--on", "kubernetes", "-n", "team", "--cpu", "x"), "--cpu x: "),
        (("--on", "kubernetes", "-n", "team", "--account", "x"), "there is no ServiceAccount x in namespace team; correct --acc"),
        (
            ("--on", "kubernetes", "-n", "team", "taken"),
            "Service taken in namespace team belongs to somebody else and stays as it is; ",
        ),
        (
            ("--on", "kubernetes", "-n", "team", "web"),
            "StatefulSet web in namespace team belongs to somebody else and stays as it is; ",
        ),
    ],
)
def test_what_cannot_be_started_is_one_sentence(
    api: apiserver.ApiServer, outlast: Outlast, options: tuple[str, ...], sentence: str
) -> None:
    for version, kind, name in (("v1", "Service", "taken"), ("apps/v1", "StatefulSet", "web")):
        api.put({"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "team"}})
    before = sorted(api.documents)
    code, out, err = outlast("notebook", *options)
    assert (code, out, sorted(api.documents)) == (2, "", before)
    assert err.startswith(f"Error: {sentence}"), err


def test_a_right_that_is_missing_is_named_before_anything_is_made(api: apiserver.ApiServer, outlast: Outlast) -> None:
    before = sorted(api.documents)
    api.may = lambda asked: not (asked.startswith("PATCH") and "/roles/" in asked)
    api.forbids = 'User "eve" cannot patch resource "roles" in API group "rbac.authorization.k8s.io" in the namespace "team"'
    code, _, err = outlast(*START)
    assert code == 1
    assert err.startswith("Error: eve may not patch roles.rbac.authorization.k8s.io in namespace team; ask the cluster's")
    assert err.endswith("or have an administrator start one notebook here, or name an account that is there with --account\n")
    assert sorted(api.documents) == before
    account = rbac.notebook("team", notebook.shared_labels())[0]
    api.put(account)
    assert "ServiceAccount notebook is used with the rights that somebody else has given it" in outlast(*START, "--detach")[2]
