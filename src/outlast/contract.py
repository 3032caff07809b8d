"""What Outlast's processes agree on: exit codes, environment variables, places and file formats.

The agent, the training library, the launcher and the operator are different programs, perhaps of different versions. What they
say to each other is written here and nowhere else. Pure: imports nothing of ours but the standard library.
"""

from __future__ import annotations

import enum
import re
import signal
from typing import Literal

API_VERSION = "outlast.dev/v1alpha1"
KIND = "ElasticJob"
GROUP = "outlast.dev"
"""API group, and what our labels, annotations and finalizers begin with."""


class Exit(enum.IntEnum):
    """Exit codes of a worker (and of a training process that knows Outlast)."""

    DONE = 0
    FAILED = 1
    INTERRUPTED = 75
    """Told to leave, state saved: start me again. Never counts as a failure (EX_TEMPFAIL)."""
    MISCONFIGURED = 78
    """The configuration is wrong: starting again cannot help (EX_CONFIG)."""
    GIVEN_UP = 79
    """The restarts of the job are used up: whoever counts pods is not to begin again."""


def exit_code(status: int) -> int:
    """The shell's exit code of a process: `-9` (killed by signal 9, as Python says it) becomes 137."""
    return 128 - status if status < 0 else status


def killed(code: int) -> bool:
    """Whether an exit code says that somebody killed the process: SIGHUP, SIGINT, SIGKILL, SIGUSR1's 138 and SIGTERM."""
    return code in (129, 130, 137, 138, 143)


def signal_name(number: int) -> str:
    """The name of a signal; most of the real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class FailureCause(enum.StrEnum):
    """What a worker failed of, for programs; people read the sentence beside it."""

    UNKNOWN = ""
    """Not told, or told by a version that knows other causes."""
    OUT_OF_MEMORY = "oom"
    HANG = "hang"
    """Killed for standing still."""

    @classmethod
    def _missing_(cls, value: object) -> FailureCause:
        return cls.UNKNOWN


class End(enum.StrEnum):
    """Why a job ended for good: also the reason of its condition on Kubernetes, where that writes them in CamelCase."""

    UNKNOWN = ""
    SUCCEEDED = "JobSucceeded"
    NO_PROGRESS = "NoProgress"
    """The same step failed too often."""
    MISCONFIGURED = "WrongConfiguration"
    LIMIT = "BackoffLimitExceeded"
    """`restarts.limit` is used up."""
    DEADLINE = "DeadlineExceeded"
    STARTUP_DEADLINE = "StartupDeadlineExceeded"
    INVALID = "InvalidJob"

    @classmethod
    def _missing_(cls, value: object) -> End:
        return cls.UNKNOWN


class Env:
    """Environment variables that a training process may read. A job file may not set them."""

    JOB = "OUTLAST_JOB"
    RUN = "OUTLAST_RUN"
    """Unique id of this submission; two runs of one name never meet."""
    WORKER = "OUTLAST_WORKER"
    """Index of the worker, 0 ... max-1; not its rank."""
    GENERATION = "OUTLAST_GENERATION"
    """Of the world that trains; of the elastic agent, the newest that the run has had before this worker was started."""
    DATA = "OUTLAST_DATA"
    """The directory of the job's only data; of several, the directory that holds them all."""
    MODELS = "OUTLAST_MODELS"
    """The directory that holds the job's models, each under its name."""
    OUTPUT = "OUTLAST_OUTPUT"
    """The job's output directory: `checkpoints/`, `logs/`, `ledger/` live in it."""
    LEDGER = "OUTLAST_LEDGER"
    NOTICE = "OUTLAST_NOTICE"
    """Path of the notice file; it exists while this worker is asked to save and leave."""
    STATE = "OUTLAST_WORKER_STATE"
    """Directory for the worker's own small files: progress, errors, world."""
    RENDEZVOUS = "OUTLAST_RENDEZVOUS"
    """Endpoint of whoever decides the world, as given to `--rdzv-endpoint`."""
    RENDEZVOUS_KEY = "OUTLAST_RENDEZVOUS_KEY"
    """By which workers that meet at worker 0 know each other; default: a digest of OUTLAST_JOB_FILE."""
    ETCD_PREFIX = "OUTLAST_ETCD_PREFIX"
    """What all keys begin with in the etcd that OUTLAST_RENDEZVOUS names; default: the path of that endpoint, else `/outlast`."""
    ETCD_CACERT = "OUTLAST_ETCD_CACERT"
    """File of the authorities that its certificate may be signed by, PEM; with it, TLS is spoken."""
    ETCD_CERT = "OUTLAST_ETCD_CERT"
    ETCD_KEY = "OUTLAST_ETCD_KEY"
    """Files of the certificate and the key that this machine shows to it, PEM."""
    ETCD_USER = "OUTLAST_ETCD_USER"
    ETCD_PASSWORD = "OUTLAST_ETCD_PASSWORD"
    CHECKPOINT_EVERY = "OUTLAST_CHECKPOINT_EVERY"
    """`300s` or `200 steps`."""
    CHECKPOINT_KEEP = "OUTLAST_CHECKPOINT_KEEP"

    # For the agent alone
    JOB_FILE = "OUTLAST_JOB_FILE"
    """The job as submitted, with absolute paths."""
    CODE = "OUTLAST_CODE"
    """Directory from which the command runs; code from an archive or a store is brought there."""
    SHARED = "OUTLAST_SHARED"
    """Directory of what the workers of one run on one machine share: which code and data they use. Default: STATE."""
    CACHE = "OUTLAST_CACHE"
    """Directory for what all jobs of a machine share: data, models and environments. Default: `outlast` in $XDG_CACHE_HOME,
    else in ~/.cache."""
    PROBE_PORT = "OUTLAST_PROBE_PORT"
    """Port for `/healthz`, `/readyz`, `/metrics`; 0 or unset: any free one. On one machine worker i serves on this plus i."""
    STORE = "OUTLAST_STORE"
    """URL of the job's output in a store; unset when the output is a directory."""
    STAY = "OUTLAST_STAY"
    """`1`: when its run is over this worker stays up, quietly, and never trains that run again (StatefulSets restart all that
    ends)."""
    ADDRESS = "OUTLAST_ADDRESS"
    """Address by which other workers reach this one; default: 127.0.0.1, all on one machine."""
    NAMESPACE = "OUTLAST_NAMESPACE"
    """Namespace of the pod; pod 0's name in OUTLAST_RENDEZVOUS is made with it."""
    FRESH = "OUTLAST_FRESH"
    """`1`: the run begins from the beginning, although another has not ended in its place."""
    POD = "OUTLAST_POD"
    """Name of the pod."""
    MEMBER = "OUTLAST_MEMBER"
    """Uid of the pod: by it a report on a Lease is known to be of this pod, and not of one of the same name before it. Only pods
    that an operator makes have it."""
    OWNER = "OUTLAST_OWNER"
    """With which word this machine has taken up the run in its store; who finds another there is a zombie."""
    REVIVE = "OUTLAST_REVIVE"
    """JSON list: the command that restarts the launcher when it cannot be reached."""


RESERVED_ENV = re.compile(
    r"^(OUTLAST_(?!ETCD_)|PET_|TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$)"
)
"""Names that a job file's `env` may not set: ours, but for those that say who asks an etcd, and torchrun's."""


class Pod:
    """Places in a worker's pod, and what its processes listen on. `manifests.pods` makes the pods."""

    CONTAINER = "worker"
    """The container that runs the agent."""
    CODE = "/workspace"
    DATA = "/data"
    MODELS = "/models"
    OUTPUT = "/out"
    """Above the outputs of jobs; a job's own is `/out/<job>`."""
    STATE = "/run/outlast"
    CACHE = "/var/cache/outlast"
    HOME = "/home/outlast"
    CONFIG = "/etc/outlast"
    """Directory of the job file, and of the files of this machine that the job names."""
    JOB_FILE = "/etc/outlast/job.yaml"
    ETCD = "/etc/outlast-etcd"
    """Directory of the certificates for the etcd that `outlast install --etcd` brings."""
    SHIPPED = "/etc/outlast-code"
    """Directory of the archive of code that comes in a ConfigMap."""
    PROBE_PORT = 8080
    RENDEZVOUS_PORT = 29400
    LAST_PUSH_S = 30
    """How much longer than its grace a pod is left alone: for the pusher to put down what it does (10 s at most), to push the
    rest and its log (10 s at least), and to stop a push that hangs (10 s)."""


class Label:
    """Labels of what is made for a job on Kubernetes."""

    JOB = f"{GROUP}/job"
    WORKER = f"{GROUP}/worker"
    """Index of the worker, where each pod is made by itself."""
    GENERATION = f"{GROUP}/generation"
    RUN = f"{GROUP}/run"
    SETTING = f"args.{GROUP}/"
    """Before the names of arguments: `args.outlast.dev/batch: "128"` is an argument that training really has."""


class Annotation:
    """Annotations by which agents, pods and the operator tell each other things."""

    REPORT = f"{GROUP}/report"
    """Of a member's Lease: a `rendezvous.transports.sockets.Report` as JSON."""
    FRESH = f"{GROUP}/fresh"
    """Of an ElasticJob that was submitted to begin from the beginning: `true`."""
    PROGRESS = f"{GROUP}/progress"
    """Of a member's Lease: `{generation, step, steps, committed, time}` as JSON; `steps` may be null."""
    DECIDED = f"{GROUP}/decided"
    """Of a member's Lease where agents decide by an etcd: `{revision, said}` as JSON, the last `rendezvous.etcd.schema.Said`
    heard."""
    JOB_FILE = f"{GROUP}/job-file"
    """Of a pod that the operator makes: the job file as pods read it."""


LEASE_S = 30.0
"""A member whose Lease has not been renewed for so long is taken for dead."""
RENEW_S = 10.0
"""How often a member renews its Lease."""
RENEWALS_PER_S = 200
"""The most that the members of one job write to their Leases, in a second: those of many workers are renewed less often, and last
longer. Kubernetes is tested with 500 of its nodes' own."""
OPERATOR = "outlast-operator"
"""The operator's Deployment, account, roles and leader lease."""
MANAGED_BY = f"{GROUP}/operator"
"""The operator in a job's `managedBy`."""
KUBERNETES = "kubernetes://"
"""What the endpoint of the rendezvous begins with where the operator decides; the name of the ElasticJob follows."""
ETCD = ("etcd://", "etcds://")
"""What it begins with where agents elect one of them to decide, by an etcd: plain, and with TLS."""
Backend = Literal["auto", "etcd", "c10d"]
"""Values of `rendezvous.backend` in a job file."""
SCHEMES = {
    "c10d": {"": "c10d", "c10d": "c10d", "tcp": "c10d"},
    "etcd": {"": "etcd", "etcd": "etcd", "http": "etcd", "etcds": "etcds", "https": "etcds"},
}
"""By backend, the schemes that `rendezvous.endpoint` may have, each with that of the endpoint in Env.RENDEZVOUS. The transport of
that one is found in `rendezvous.transport`."""
OPERATOR_NAMESPACE = "outlast-system"
CLUSTER_DOMAIN = "cluster.local"
"""What names in a cluster end with."""

LONGEST_HOST = 63
"""Of a host name, a label's value and a Service's name (RFC 1123)."""
MOST_WORKERS = 10_000
"""Of one job."""


def worker_name(job: str, index: int) -> str:
    """The name of a worker's pod, and of its Lease."""
    return f"{job}-worker-{index}"


LONGEST_NAME = LONGEST_HOST - len(worker_name("", MOST_WORKERS - 1))
"""Of a job: the name of each of its pods is a host name."""

# Below the output of a job
CHECKPOINTS = "checkpoints"
LOGS = "logs"
LEDGER = "ledger"
METRICS = "metrics.jsonl"
WORK = "work"
"""The working directory of training processes, see `prepare.workdir`."""
WORKED = ".outlast-generation"
"""In it: the generation whose rank 0 worked there last; written by `launch.rank`."""
OWNER = ".owner"
"""Locked by the launcher that drives the job of this output; in it stands where its state is."""
COMMIT = "COMMIT"
"""Written last into a checkpoint's directory; a checkpoint exists from the moment this file does."""

# Below a worker's state directory
PROGRESS = "progress-{local_rank}.json"
"""See `workerfiles.progress`."""
PULSE = "pulse-{local_rank}.json"
"""See `workerfiles.progress.Pulse`."""
ERROR = "error-{local_rank}.json"
"""What a training process died of: `{rank, generation, type, message, traceback, time}`; written by `launch.rank`."""
VERDICT = "verdict-{local_rank}.json"
"""`{pid, reason, stuck, early, time}`: why the agent killed this training process (it hung); `stuck` unless somebody stopped it,
`early` if it had stood still for longer than it had moved."""
WORKER = "worker.json"
"""What the agent says of its worker: `{pid, state, reason, code, ranks, probes, still}`."""
WORLD = "world.json"
"""The world this worker is in, written by the rendezvous handler."""
END = "end.json"
"""`{reason, code}`: how the run has ended, as the operator said, for the agent to record; written by
`rendezvous.transports.kubernetes`."""
NOTICE = "notice.json"
"""`{kind: leave|call, reason, generation, deadline}`: the agent asks this worker to leave, or the coordinator calls the world
together again (then `generation` is the one to come). Training saves at the next step boundary and exits with 75."""


def worker_log(index: int) -> str:
    """File name of a worker's log."""
    return f"worker-{index}.log"


def checkpoint_name(step: int) -> str:
    """Directory name of the checkpoint of `step`; sorts by step."""
    return f"step-{step:08d}"


STAYS = "stays up and does nothing more"
"""How the last line of a worker ends that has ended and waits to be deleted."""
_END_LINE = re.compile(r"outlast \| worker (\S+): (?P<reason>.*) \(exit (?P<code>\d+|None)\)$")


def end_line(worker: int | str, reason: str, code: int | None) -> str:
    """The line of a worker's log that tells how the worker ended."""
    return f"outlast | worker {worker}: {reason} (exit {code})"


def ended(line: str) -> tuple[str, int | None] | None:
    """Reason and exit code in such a line; None if it is another."""
    found = _END_LINE.search(line)
    return found and (found["reason"], None if found["code"] == "None" else int(found["code"]))
