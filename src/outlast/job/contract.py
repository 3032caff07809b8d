"""The contract between Outlast's processes: exit codes, environment variables, paths and file formats.

The agent, the training library, the launcher and the operator are separate programs, perhaps of different versions. This module
imports only the standard library.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Mapping
from typing import Literal

API_VERSION = "outlast.dev/v1alpha1"
KIND = "ElasticJob"
GROUP = "outlast.dev"
"""API group, and prefix of Outlast's labels, annotations and finalizers."""


class Exit(enum.IntEnum):
    """Exit codes for a worker, and for a training process that uses Outlast."""

    DONE = 0
    FAILED = 1
    INTERRUPTED = 75
    """The worker left on request, with its state saved, and is to be restarted. Never counts as a failure (EX_TEMPFAIL)."""
    MISCONFIGURED = 78
    """The configuration is wrong: a restart cannot help (EX_CONFIG)."""
    GIVEN_UP = 79
    """The job has used up its restarts: a controller that counts failed pods must not restart it."""


def exit_code(status: int) -> int:
    """Convert a process's exit status in Python to the exit code that a shell reports: `-9`, for signal 9, becomes 137."""
    return 128 - status if status < 0 else status


def job_name(text: str) -> str:
    """Derive a job's name from the name of a script, module or function."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (words if words[:1].isalpha() else f"job-{words}")[:LONGEST_NAME].strip("-")


def killed(code: int) -> bool:
    """Return whether an exit code means that the process was killed: by SIGHUP, SIGINT, SIGKILL, SIGUSR1 (138) or SIGTERM."""
    return code in (129, 130, 137, 138, 143)


def signal_name(number: int) -> str:
    """Return the name of a signal; `signal 40` for a signal without a name, such as most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_ended(status: int) -> str:
    """Return how a process ended, from its exit code or negative signal number."""
    return f"was killed by {signal_name(-status)}" if status < 0 else f"exited with code {status}"


class FailureCause(enum.StrEnum):
    """Machine-readable cause of a worker's failure; the accompanying sentence is for people."""

    UNKNOWN = ""
    """No cause was reported, or another version of Outlast reported one that this version does not know."""
    OUT_OF_MEMORY = "oom"
    DISK_FULL = "disk"
    """The script ran out of disk space: an immediate retry would fail, too, but a later one may find space."""
    HANG = "hang"
    """The process was killed because it hung."""
    BITS = "bits"
    """The rank's state differed from most other ranks'; the run goes back to an earlier step without this worker."""

    @classmethod
    def _missing_(cls, value: object) -> FailureCause:
        return cls.UNKNOWN


class End(enum.StrEnum):
    """Why a job has ended for good. Also the reason in its Kubernetes condition, hence CamelCase."""

    UNKNOWN = ""
    SUCCEEDED = "JobSucceeded"
    NO_PROGRESS = "NoProgress"
    """The same step failed too often."""
    MISCONFIGURED = "WrongConfiguration"
    LIMIT = "BackoffLimitExceeded"
    """`restarts.limit` is used up."""
    POLICY = "PodFailurePolicy"
    """The job's restartPolicy does not allow a restart after this failure. The value is a Kubernetes Job's reason for this."""
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
    """Unique id of this run; two runs of the same name never share a world."""
    WORKER = "OUTLAST_WORKER"
    """Index of the worker, from 0 to `workers.max` - 1; not its rank."""
    GENERATION = "OUTLAST_GENERATION"
    """Generation of the current world; for the agent, the run's newest generation before this worker was started."""
    HELD = "OUTLAST_HELD"
    """The newest step that any worker of the previous world is known to have completed; 0 if unknown."""
    ATTEMPT = "OUTLAST_ATTEMPT"
    """How many times the world's members have restarted its processes without the coordinator."""
    DATA = "OUTLAST_DATA"
    """Directory with the job's dataset, or the parent directory of several datasets."""
    MODELS = "OUTLAST_MODELS"
    """Directory with the job's models, each in a subdirectory named after the model."""
    OUTPUT = "OUTLAST_OUTPUT"
    """The job's output directory, with `checkpoints/`, `logs/` and `ledger/`."""
    LEDGER = "OUTLAST_LEDGER"
    NOTICE = "OUTLAST_NOTICE"
    """Path of the notice file, which exists while this worker is asked to save and leave."""
    STATE = "OUTLAST_WORKER_STATE"
    """The worker's state directory, which holds its progress, errors and current world."""
    RENDEZVOUS = "OUTLAST_RENDEZVOUS"
    """The coordinator's endpoint, as given to `--rdzv-endpoint`."""
    RENDEZVOUS_KEY = "OUTLAST_RENDEZVOUS_KEY"
    """Shared key that a run's workers authenticate with; default: a digest of OUTLAST_JOB_FILE if they meet at worker 0, else of
    the run's name."""
    ETCD_PREFIX = "OUTLAST_ETCD_PREFIX"
    """Prefix of all keys in etcd. Default: the path in OUTLAST_RENDEZVOUS, or else `/outlast`."""
    ETCD_CACERT = "OUTLAST_ETCD_CACERT"
    """PEM file of the certificate authorities that verify etcd's certificate; turns TLS on."""
    ETCD_CERT = "OUTLAST_ETCD_CERT"
    ETCD_KEY = "OUTLAST_ETCD_KEY"
    """PEM files of the client certificate and its key."""
    ETCD_USER = "OUTLAST_ETCD_USER"
    ETCD_PASSWORD = "OUTLAST_ETCD_PASSWORD"
    CHECKPOINT_EVERY = "OUTLAST_CHECKPOINT_EVERY"
    """Interval between checkpoints, such as `300s` or `200 steps`."""
    CHECKPOINT_KEEP = "OUTLAST_CHECKPOINT_KEEP"
    CHECKPOINT_BEST = "OUTLAST_CHECKPOINT_BEST"
    """Number of best checkpoints to keep, whether `min` or `max` is best, and the metric, such as `2 min val_loss`. Absent if
    none are kept."""
    MEMORY = "OUTLAST_CHECKPOINT_MEMORY"
    """A worker's memory for snapshots: `auto`, `off`, or a number of bytes; absent if an earlier version started the worker."""
    REPLICAS = "OUTLAST_CHECKPOINT_REPLICAS"
    """Number of other workers that hold a replica of state that only one rank has."""
    GO_BACK = "OUTLAST_CHECKPOINT_GO_BACK"
    """If `1`, the run goes back to an earlier step when a rank's state differs from most other ranks'."""
    TENSORBOARD = "OUTLAST_TENSORBOARD"
    """If `1`, metrics are also written to TensorBoard event files in the output."""
    MLFLOW = "OUTLAST_MLFLOW"
    """URI of an MLflow server, or the path of its directory; `none` disables MLflow even if MLFLOW_TRACKING_URI is set."""
    EXPERIMENT = "OUTLAST_EXPERIMENT"
    """Name of the experiment in MLflow, and of the project in Weights & Biases."""

    # For the agent only
    JOB_FILE = "OUTLAST_JOB_FILE"
    """The job as submitted, with absolute paths."""
    CODE = "OUTLAST_CODE"
    """The command's working directory, where code from an archive or a store is unpacked."""
    SHARED = "OUTLAST_SHARED"
    """Directory shared by the workers of one run on one machine, which records their code and data. Default: STATE."""
    CACHE = "OUTLAST_CACHE"
    """Directory for data, models and environments, shared by all jobs on a machine. Default: `outlast` in $XDG_CACHE_HOME, else
    in ~/.cache."""
    NETRC = "OUTLAST_NETRC"
    """Logins to web servers, in the format of ~/.netrc. Set in the shell or by a Secret."""
    CACHE_SIZE = "OUTLAST_CACHE_SIZE"
    """Size limit for the data, models and shards in CACHE, e.g. `200GiB`; see `prepare.data_cache_eviction`."""
    PROBE_PORT = "OUTLAST_PROBE_PORT"
    """Port for `/healthz`, `/readyz` and `/metrics`; 0 or unset means any free port. On one machine, worker i adds i to it."""
    PYTHON = "OUTLAST_PYTHON"
    """Path of the Python interpreter for training, unless it is the agent's."""
    STORE = "OUTLAST_STORE"
    """URL of the job's output in a store; unset if the output is a directory."""
    STAY = "OUTLAST_STAY"
    """If `1`, this worker idles after the end of its run and never trains that run again (StatefulSets restart containers that
    exit)."""
    ADDRESS = "OUTLAST_ADDRESS"
    """Address at which other workers reach this one. Default: 127.0.0.1, for workers on one machine."""
    NAMESPACE = "OUTLAST_NAMESPACE"
    """The pod's namespace, which is also part of pod 0's host name in OUTLAST_RENDEZVOUS."""
    FRESH = "OUTLAST_FRESH"
    """If `1`, the run starts from the beginning, even if another run with the same output has not ended."""
    POD = "OUTLAST_POD"
    """Name of the pod."""
    NODE = "OUTLAST_NODE"
    """Name of the worker's node; if unset, machines are distinguished by their boot id. Replicas go to other nodes."""
    ZONE = "OUTLAST_ZONE"
    """The node's failure domain; empty if unknown. Replicas go to another zone if possible."""
    MEMBER = "OUTLAST_MEMBER"
    """The pod's uid, which distinguishes its reports on the Lease from those of an earlier pod with the same name. Only the
    operator sets this variable."""
    OWNER = "OUTLAST_OWNER"
    """This machine's fencing token in the run's store. A process that finds another token there is a zombie."""
    REVIVE = "OUTLAST_REVIVE"
    """JSON list with the command that restarts the launcher when it cannot be reached."""


RESERVED_ENV = re.compile(
    r"^(OUTLAST_(?!ETCD_|CACHE_SIZE$)|PET_|TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$)"
)
"""Names that `env` in a job file may not set: torchrun's and Outlast's own, except for etcd credentials and the cache size."""


_S3_KEYS = "--from-literal=AWS_ACCESS_KEY_ID=... --from-literal=AWS_SECRET_ACCESS_KEY=..."
S3_SECRET = f"kubectl create secret generic s3 {_S3_KEYS}, and secrets: [{{name: s3}}] in the job file"
"""How to give pods S3 credentials if their nodes have no role, for error messages."""


class Pod:
    """Paths and ports in a worker's pod."""

    TRAINER = "trainer"
    """Container that runs the agent."""
    CONTAINER = "worker"
    """Container in other pods: dataset downloads, Spark, checks. In pods created by earlier versions, it also runs the agent."""
    AGENT = (TRAINER, CONTAINER)
    USER = 1000
    """User and group id of the processes in a pod."""
    CODE = "/workspace"
    DATA = "/data"
    MODELS = "/models"
    OUTPUT = "/out"
    """Parent directory of all job outputs: each job writes to `/out/<job>`."""
    STATE = "/run/outlast"
    CACHE = "/var/cache/outlast"
    HOME = "/home/outlast"
    CONFIG = "/etc/outlast"
    """Directory with the job file, and with the local files of the submitter that the job refers to."""
    JOB_FILE = "/etc/outlast/job.yaml"
    INJECTED = "/opt/outlast-agent"
    """Directory to which an init container copies the agent, for images without Outlast."""
    SHIPPED = "/etc/outlast-code"
    """Directory at which a code archive is mounted from a ConfigMap."""
    PROBE_PORT = 8080
    RENDEZVOUS_PORT = 29400
    LAST_PUSH_S = 30
    """Seconds added to a pod's grace period: up to 10 s to finish the upload in progress, 10 s for the remaining files and the
    log, 10 s to stop an upload that hangs."""


class Label:
    """Labels on a job's Kubernetes objects."""

    JOB = f"{GROUP}/job"
    WORKER = f"{GROUP}/worker"
    """Index of the worker, on pods that are created one by one."""
    GENERATION = f"{GROUP}/generation"
    RUN = f"{GROUP}/run"
    DATASET = f"{GROUP}/dataset"
    """Label on a Job that downloads a dataset instead of training."""
    SETTING = f"args.{GROUP}/"
    """Prefix of labels named after arguments, such as `args.outlast.dev/batch: "128"`."""


class Annotation:
    """Annotations through which agents, pods and the operator communicate."""

    REPORT = f"{GROUP}/report"
    """On a member's Lease: a `rendezvous.messages.Report` as JSON."""
    FRESH = f"{GROUP}/fresh"
    """`true` on an ElasticJob that was submitted with --fresh."""
    PROGRESS = f"{GROUP}/progress"
    """On a member's Lease: `{generation, step, steps, committed, snapshot, every, time}` as JSON; `steps` may be null,
    `snapshot` and `every` are absent while there is no snapshot. The member of rank 0 adds `{goodput, lost, lostSteps}`."""
    JOB_FILE = f"{GROUP}/job-file"
    """On a pod that the operator creates: the job file, as read by pods."""
    LEAVING_AT = f"{GROUP}/leaving-at"
    """On a node that is about to go away, or on a worker's pod that must leave: the deadline, RFC 3339 in UTC."""
    LEAVING_REASON = f"{GROUP}/leaving-reason"
    """The reason for leaving, as one sentence. Set together with LEAVING_AT."""
    CORDONED = f"{GROUP}/cordoned"
    """`true` on a node that the node watcher has cordoned. A node that was already cordoned does not get this annotation, and
    stays cordoned."""


class LeavingKind(enum.StrEnum):
    """Values of the taint LEAVING: the reason why a node is about to go away."""

    SPOT = "spot"
    REBALANCE = "rebalance"
    MAINTENANCE = "maintenance"
    UNKNOWN = ""
    """No kind was given, or another version of Outlast gave one that this version does not know."""

    @classmethod
    def _missing_(cls, value: object) -> LeavingKind:
        return cls.UNKNOWN


LEAVING = f"{GROUP}/leaving"
"""Key of the taint on a node that is about to go away, with effect NoSchedule. Its value is a `LeavingKind`."""


LEASE_S = 30.0
"""A member is considered dead if it has not renewed its Lease for this many seconds."""
RENEW_S = 10.0
"""Interval between renewals of a member's Lease, in seconds."""
MESH_LEASE_S = 100.0
MESH_RENEW_S = 30.0
"""Lease duration and renewal interval, in seconds, for worlds whose members watch each other and report a lost member at once."""
RENEWALS_PER_S = 200
"""Maximum Lease renewals per second for one job: with many workers, Leases are renewed less often and last longer. Kubernetes
is tested with 500 per second for its nodes."""
OPERATOR = "outlast-operator"
"""Name of the operator's Deployment, account, roles and leader lease."""
MANAGED_BY = f"{GROUP}/operator"
"""Value of `managedBy` in jobs that the operator manages."""
KUBERNETES = "kubernetes://"
"""Scheme of the rendezvous endpoint if the operator coordinates; the ElasticJob's name follows."""
ETCD = ("etcd://", "etcds://")
"""Schemes of the endpoint if agents elect a coordinator through etcd, without and with TLS."""
Backend = Literal["auto", "etcd", "c10d"]
"""Values of `rendezvous.backend` in a job file."""
SCHEMES = {
    "c10d": {"": "c10d", "c10d": "c10d", "tcp": "c10d"},
    "etcd": {"": "etcd", "etcd": "etcd", "http": "etcd", "etcds": "etcds", "https": "etcds"},
}
"""For each backend, the schemes allowed in `rendezvous.endpoint`, mapped to those used in Env.RENDEZVOUS (see
`rendezvous.transport`)."""
OPERATOR_NAMESPACE = "outlast-system"
CLUSTER_DOMAIN = "cluster.local"
"""A cluster's DNS domain."""

LONGEST_HOST = 63
"""Maximum length of a host name, a label value and a Service name (RFC 1123)."""
MOST_WORKERS = 10_000
"""Maximum number of workers in one job."""


def worker_name(job: str, index: int) -> str:
    """Return the name that a worker's pod and Lease share."""
    return f"{job}-worker-{index}"


LONGEST_NAME = LONGEST_HOST - len(worker_name("", MOST_WORKERS - 1))
"""Maximum length of a job's name: its pods' names are derived from it and must be valid host names."""

EVALUATE = "--evaluate"
"""Argument that makes a job's module evaluate its model instead of training it."""
EVALUATED = "--checkpoint="
"""Argument for the checkpoint to evaluate: `--checkpoint=best` or `--checkpoint=1200`. By default, the module decides."""

# In a job's output directory
CHECKPOINTS = "checkpoints"
LOGS = "logs"
LEDGER = "ledger"
METRICS = "metrics.jsonl"
JOB_FILE = "job.yaml"
"""The job file, without secrets."""
PARAMETERS = "parameters.json"
"""Settings of the run; see `training.parameters`."""
TENSORBOARD = "tensorboard"
"""Directory for TensorBoard event files: Outlast's go into `metrics/`, a script's go next to that subdirectory."""
TRACKING = ".tracking"
"""Directory for the process that forwards metrics; see `tracking.follower_supervisor`."""
WORK = "work"
"""The training processes' working directory; see `prepare.workdir`."""
WORKED = ".outlast-generation"
"""File in WORK with the generation of the last rank 0 that ran there; written by `launch.training_process`."""
OWNER = ".owner"
"""Lock file of the launcher that uses this output. It contains the path of that launcher's state directory."""
COMMIT = "COMMIT"
"""Last file written to a checkpoint's directory: a checkpoint exists once this file does."""

# In a worker's state directory
PROGRESS = "progress-{local_rank}.json"
"""File with a process's progress; see `workerfiles.progress_file`."""
PULSE = "pulse-{local_rank}.json"
"""File with a process's heartbeat; see `workerfiles.progress_file.Pulse`."""
NEXT = "next-{local_rank}.json"
"""File with a waiting process's place in the next world; see `workerfiles.next_world`."""
ERROR = "error-{local_rank}.json"
"""A failed training process's error: `{rank, generation, type, message, traceback, time}`; written by
`launch.training_process`."""
WORKER = "worker.json"
"""The agent's report: `{pid, state, reason, code, ranks, probes, still}`."""
WORLD = "world.json"
"""File with this worker's current world, written by its membership in the rendezvous."""
NOTICE = "notice.json"
"""File with `{kind: leave|call, reason, generation, deadline}`: the agent asks this worker to leave, or the coordinator calls
for a new rendezvous, for `generation`. Training saves at the next step boundary and exits with 75."""

SNAPSHOTS = "snapshots.sock"
"""Socket on which the agent serves memory for snapshots; absent if it serves none. See `snapshots.server`."""


def worker_log(index: int) -> str:
    """Return the file name of a worker's log."""
    return f"worker-{index}.log"


def ledger_source(env: Mapping[str, str]) -> str:
    """Return a training process's name in the ledger. The name includes the worker, since a rank may move to another worker but
    its files do not."""
    if Env.WORKER not in env:
        return f"rank-{env.get('RANK', 0)}"
    return f"worker-{env[Env.WORKER]}-process-{env.get('LOCAL_RANK', 0)}"


def checkpoint_name(step: int) -> str:
    """Return the directory name for the checkpoint at `step`. Names sort by step."""
    return f"step-{step:08d}"


STAYS = "stays up and does nothing more"
"""Suffix of the last log line from a worker that has ended and waits to be deleted."""
_END_LINE = re.compile(r"outlast \| worker (\S+): (?P<reason>.*) \(exit (?P<code>\d+|None)\)$")
_START_LINE = re.compile(r"outlast \| (attempt \d+ of )?generation \d+: ")


ECHO = "outlast echo | "
"""Prefix of log lines that only repeat how another rank ended; log readers skip these lines."""


def start_line(generation: int, attempt: int, reason: str) -> str:
    """Return the log line written when a worker's training processes start again, for a new world or another attempt."""
    return f"outlast | {f'attempt {attempt} of ' if attempt else ''}generation {generation}: {reason}"


def is_start_line(line: str) -> bool:
    """Return whether a log line is a `start_line`."""
    return _START_LINE.match(line) is not None


def end_line(worker: int | str, reason: str, code: int | None) -> str:
    """Return the log line that says how a worker ended."""
    return f"outlast | worker {worker}: {reason} (exit {code})"


def parse_end_line(line: str) -> tuple[str, int | None] | None:
    """Return the reason and exit code in an `end_line`; None for any other line."""
    match = _END_LINE.search(line)
    return match and (match["reason"], None if match["code"] == "None" else int(match["code"]))
