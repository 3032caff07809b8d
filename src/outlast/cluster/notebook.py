"""A notebook in a cluster: made or found, waited for, reached by way of the API server, stopped.

`bring` makes what is missing and changes nothing that is there. What keeps its pod from starting is found as for a job
(`diagnosis`). Docs: docs/guide/notebooks.md.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outlast import backoff, diagnosis, foreign, kube
from outlast.cluster import preparation
from outlast.diagnosis import gather
from outlast.diagnosis.cause import Cause
from outlast.errors import Absent, ClusterError, Forbidden, NotFound, NotServed, OutlastError, Taken
from outlast.kube import kinds, ownership, pods
from outlast.manifests import notebook as manifests
from outlast.manifests import objects, rbac
from outlast.manifests.notebook import Wanted

Document = kube.Document
Say = Callable[[str], None]

POLL_S = 2.0
"""Interval of looking at the pod."""
_WHY_S = 10.0
"""Interval of asking why it is not ready, which reads many kinds of documents. First after this time."""
_PAUSE_S = 0.1
"""Pause when no connection can be taken."""
_BITS = 256
_INDEX = "apps.kubernetes.io/pod-index"
"""Label of a StatefulSet's pods: this one is no worker 0."""
_OF_NOTEBOOKS = {"app.kubernetes.io/component": manifests.COMPONENT}
_INSTEAD = "choose another name for the notebook, or another namespace (-n)"
_REMEDIES = {
    "quota": "remove what is no longer needed, ask for less (--cpu, --memory, --gpu), or have the quota raised",
    "limit-range": "ask for what is within it (--cpu, --memory)",
    "pod-security": "choose a namespace with a lower level, or the image of Outlast",
    "image": "correct --image, or push it",
    "command-missing": "use an image with Outlast and JupyterLab (--image)",
    "claim-class": "name one of the cluster's with --storage-class (after --delete: a claim does not change), or make a volume",
    "claim-missing": "make it again with --stop and a new start",
    "out-of-memory": "ask for more with --memory",
    "unschedulable-cpu": "ask for less with --cpu, or add nodes",
    "unschedulable-memory": "ask for less with --memory, or add nodes",
    "unschedulable-gpu": "ask for fewer with --gpu, or add nodes with them",
    "secret-missing": "make it, or leave out --secret; --stop and a new start make the one with the token",
    "account-missing": "--stop and a new start make the notebook's own; any other has to be there (--account)",
    "volume-elsewhere": "add a node where the volume is; or --delete it, and name a --storage-class with WaitForFirstConsumer",
    "unschedulable-selector": "add nodes that are not spot machines, where no notebook runs",
    "failing-script": "correct what it says; an image of yours needs Outlast and JupyterLab (--image)",
}
"""Remedies by rule of the diagnosis; others are as for a job."""


@dataclass(frozen=True)
class Found:
    """A notebook as the cluster has it."""

    name: str
    namespace: str
    kubeflow: bool
    """Whether it is a Notebook of Kubeflow; otherwise it is a StatefulSet."""
    document: Document = field(repr=False)
    token: str = field(default="", repr=False)
    """Empty where somebody else made it, or without the right to read its Secret."""

    @property
    def title(self) -> str:
        """`Notebook notebook`."""
        return f"{self.document['kind']} {self.name}"

    @property
    def base(self) -> str:
        """The path below which it serves, with a slash at both ends."""
        return f"{manifests.prefix(self.namespace, self.name)}/" if self.kubeflow else "/"

    @property
    def pod(self) -> str:
        """The name of its pod."""
        return manifests.pod_name(self.name)


def find(cluster: kube.Cluster, name: str) -> Found | None:
    """The notebook of a name. Raises OutlastError for a StatefulSet that is none of ours."""
    for kind in (kinds.NOTEBOOK, kube.STATEFUL_SET):
        try:
            there = cluster.find(kind, name)
        except NotServed:
            continue
        if there is None:
            continue
        if kind is kube.STATEFUL_SET:
            foreign.check(there, _OF_NOTEBOOKS, instead=_INSTEAD)
        return Found(name, cluster.namespace, kind is kinds.NOTEBOOK, there, _token(cluster, name))
    return None


def bring(cluster: kube.Cluster, wanted: Wanted) -> Iterator[str]:
    """Make a notebook, and yield each thing done. One that is there stays as it is; one that Kubeflow has stopped is started.

    Raises OutlastError, before anything is made, when an object of its name belongs to somebody else; Forbidden.
    """
    if not cluster.has_namespace():
        raise Absent(f"there is no namespace {cluster.namespace} in {cluster.context}; create it, or choose another with -n")
    there = find(cluster, wanted.name)
    if there is not None:
        yield from _again(cluster, there)
        return
    documents = manifests.documents(wanted, kubeflow=cluster.serves(kinds.NOTEBOOK))
    token = manifests.secret(wanted.name, wanted.namespace, secrets.token_hex(_BITS // 8))
    before, known = [_ours(cluster, document) for document in documents], _ours(cluster, token)
    yield from _account(cluster, wanted)
    if known is None:
        cluster.create(token)
        yield f"Secret {manifests.secret_name(wanted.name)} created"
    for document, old in zip(documents, before, strict=True):
        if old is None:
            cluster.create(document)
            yield f"{document['kind']} {document['metadata']['name']} created"
        elif kube.kind_of(document) is kube.CLAIM:
            yield objects.kept(document, old)


def _again(cluster: kube.Cluster, there: Found) -> Iterator[str]:
    meta = there.document["metadata"]
    if "deletionTimestamp" in meta:
        raise OutlastError(f"{there.title} is being deleted; try again in a minute")
    yield f"{there.title} exists and is used as it is"
    if there.kubeflow and manifests.STOPPED in (meta.get("annotations") or {}):
        cluster.patch(kinds.NOTEBOOK, there.name, {"metadata": {"annotations": {manifests.STOPPED: None}}})
        yield f"{there.title} was stopped, and is started again"


def _ours(cluster: kube.Cluster, document: Document) -> Document | None:
    """What there is of a document's name, from an earlier notebook of this one. Raises OutlastError for what others have made."""
    kind, name = kube.kind_of(document), document["metadata"]["name"]
    there = cluster.find(kind, name)
    foreign.check(there, _OF_NOTEBOOKS, instead=_INSTEAD)
    if there is not None and "deletionTimestamp" in there["metadata"]:
        raise OutlastError(f"{kind} {name} is being deleted; try again in a minute")
    return there


def _account(cluster: kube.Cluster, wanted: Wanted) -> Iterator[str]:
    """The account and its Role. Raises Forbidden where neither the user nor anybody before could make them."""
    there = cluster.find(kinds.SERVICE_ACCOUNT, wanted.account)
    if wanted.account != rbac.NOTEBOOK:
        if there is None:
            raise Absent(f"there is no ServiceAccount {wanted.account} in namespace {wanted.namespace}; correct --account")
        return
    account, *roles = rbac.notebook(wanted.namespace, manifests.shared_labels())
    try:
        for document in (*roles, account):
            foreign.check(cluster.find(kube.kind_of(document), wanted.account), _OF_NOTEBOOKS, instead=_INSTEAD)
        for document in (*roles, account):  # the account last: it is there when its rights are
            cluster.apply(document)
    except Forbidden as error:
        if there is None:
            raise Forbidden(
                f"{error}; or have an administrator start one notebook here, or name an account that is there with --account"
            ) from error
        yield f"ServiceAccount {wanted.account} is used with the rights that somebody else has given it"
        return
    if there is None:
        yield f"ServiceAccount {wanted.account} created, with a Role of its own"
    try:  # which it may use, and not make
        preparation.ensure_account(cluster, wanted.namespace)
    except (Forbidden, Taken) as error:
        yield f"data cannot be prepared on Spark from it: {error}"


def _token(cluster: kube.Cluster, name: str) -> str:
    """The token of a notebook; empty when it has none of ours, or we may not read it."""
    try:
        secret = cluster.find(kube.SECRET, manifests.secret_name(name))
    except Forbidden:
        return ""
    if secret is None or not foreign.ours(secret, _OF_NOTEBOOKS):
        return ""
    return base64.b64decode((secret.get("data") or {}).get(manifests.TOKEN, "")).decode()


# Waiting


def await_ready(cluster: kube.Cluster, there: Found, say: Say) -> None:
    """Wait until the notebook answers, and say why it does not, each reason once. Raises NotFound when somebody deletes it."""
    said, asked = "", time.monotonic() - _WHY_S / 2
    while not backoff.until_answered(lambda: _ready(cluster, there), say, every_s=POLL_S):
        if time.monotonic() - asked >= _WHY_S:
            asked = time.monotonic()
            reason = backoff.until_answered(lambda: why(cluster, there), say, every_s=POLL_S)
            if reason and reason != said:
                say(reason)
            said = reason
        time.sleep(POLL_S)


def _ready(cluster: kube.Cluster, there: Found) -> bool:
    pod = cluster.find(kube.POD, there.pod)
    if pod is not None:
        return bool(pods.condition(pod, "Ready")) and not pods.leaves(pod)
    kind = kube.kind_of(there.document)
    if cluster.find(kind, there.name) is None:
        raise NotFound(f"{there.title} is gone: somebody has deleted it; its claim is kept unless they deleted that, too")
    return False


def why(cluster: kube.Cluster, there: Found) -> str:
    """Why it is not ready, as a sentence with a remedy; empty when nothing is known, or all takes its course."""
    selected = {"notebook-name": there.name} if there.kubeflow else manifests.selector(there.name)
    labels = ",".join(f"{key}={value}" for key, value in selected.items())
    seen = gather.workload(cluster, there.name, there.namespace, labels=labels, kind=kube.STATEFUL_SET)
    if there.kubeflow and not seen.workload:
        return "Kubeflow has made no StatefulSet of it yet; if it stays so, its notebook controller does not run"
    found = diagnosis.causes(dataclasses.replace(seen, pods=tuple(map(_unnumbered, seen.pods))), time.time())
    return next((_sentence(cause, seen.pods) for cause in found if cause.wrong and cause.rule != "absent"), "")


def _unnumbered(pod: Document) -> Document:
    meta = pod["metadata"]
    return {**pod, "metadata": {**meta, "labels": {k: v for k, v in (meta.get("labels") or {}).items() if k != _INDEX}}}


def _sentence(cause: Cause, of: Sequence[Document]) -> str:
    remedy = _REMEDIES.get(cause.rule, cause.remedy)
    what = cause.what
    if cause.rule == "failing-script":
        messages = [str((pods.termination(pod) or {}).get("message", "")) for pod in of]
        what = ": ".join((what, *(message.strip().splitlines()[-1] for message in messages if message.strip())))
    return f"{what}; {remedy}" if remedy else what


# Reaching


@contextlib.contextmanager
def forwarded(cluster: kube.Cluster, pod: str, port: int, say: Say) -> Iterator[int]:
    """A port of this machine, `port` or a free one for 0, that leads to the notebook in a pod; also in the next pod of that name.

    Says once that the right to it is missing. Raises OSError when the port is taken.
    """
    said: set[str] = set()
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", port)) as listener:

        def carry(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                try:
                    cluster.forward(pod, manifests.PORT, connection)
                except Forbidden as error:
                    if str(error) not in said:
                        said.add(str(error))
                        say(f"the notebook cannot be reached from here: {error}")
                except ClusterError:
                    pass  # the browser says that it has no answer, and tries again
                connection.shutdown(socket.SHUT_RDWR)  # to close it is not enough while a thread reads from it

        def accept() -> None:
            while not ended.is_set():
                try:
                    connection = listener.accept()[0]
                except OSError:  # the end; or too many open files, which is over when others end
                    ended.wait(_PAUSE_S)
                    continue
                try:
                    threading.Thread(target=carry, args=(connection,), daemon=True).start()
                except RuntimeError:  # too many threads
                    connection.close()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def stay(cluster: kube.Cluster, there: Found, say: Say) -> None:
    """Watch the notebook until the user stops us or somebody deletes it (NotFound); say when its pod is replaced."""
    while True:
        time.sleep(POLL_S)
        if not backoff.until_answered(lambda: _ready(cluster, there), say, every_s=POLL_S):
            say("the notebook is not ready any more: its pod is started again, or replaced")
            await_ready(cluster, there, say)
            say("it is ready again; reload the page if it does not connect by itself")


# Stopping


def stop(cluster: kube.Cluster, name: str, *, claim: bool) -> Iterator[str]:
    """Delete a notebook, its Service and its token, and yield each thing done; its claim with `claim` only. The account goes with
    the last notebook of the namespace. Raises NotFound when there is nothing, OutlastError when it is not ours."""
    there = find(cluster, name)
    foreign.check(there.document if there else None, _OF_NOTEBOOKS, instead=_INSTEAD)
    wanted = [(kube.kind_of(there.document), name)] if there else []
    wanted += [(kube.SERVICE, name)] if there is None or not there.kubeflow else []
    wanted += [(kube.SECRET, manifests.secret_name(name))]
    wanted += [(kube.CLAIM, manifests.claim_name(name))] if claim else []
    done = [title for kind, each in wanted if (title := _delete(cluster, kind, each))]
    if not done:
        kept = cluster.find(kube.CLAIM, manifests.claim_name(name)) if not claim else None
        more = "; its claim is kept, --delete removes that, too" if kept else ""
        raise NotFound(f"there is no notebook {name} in namespace {cluster.namespace}{more}")
    yield from done
    if not _others(cluster, name):
        for document in reversed(rbac.notebook(cluster.namespace, {})):
            with contextlib.suppress(Forbidden):
                if title := _delete(cluster, kube.kind_of(document), document["metadata"]["name"]):
                    yield title


def _delete(cluster: kube.Cluster, kind: kube.Kind, name: str) -> str:
    """Delete a document of ours; a sentence, empty when there is none."""
    there = cluster.find(kind, name)
    if there is None or not foreign.ours(there, _OF_NOTEBOOKS):
        return ""
    with contextlib.suppress(Absent):
        cluster.delete(kind, name, uid=there["metadata"]["uid"])
    return f"{kind} {name} deleted"


def _others(cluster: kube.Cluster, name: str) -> list[str]:
    """The notebooks of ours in the namespace besides this one."""
    found: list[Document] = []
    for kind in (kinds.NOTEBOOK, kube.STATEFUL_SET):
        with contextlib.suppress(NotServed):
            found += cluster.list_(kind, labels=f"app.kubernetes.io/component={manifests.COMPONENT}")
    return [pods.name(each) for each in found if pods.name(each) != name and not ownership.owners(each)]
