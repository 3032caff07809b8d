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
    """Exit codes of a worker, and of a training process that uses Outlast."""

    DONE = 0
    FAILED = 1
    INTERRUPTED = 75
    """The worker left on request, with its state saved, and is to be restarted. Never counts as a failure (EX_TEMPFAIL)."""
    MISCONFIGURED = 78
    """The configuration is wrong: a restart cannot help (EX_CONFIG)."""
    GIVEN_UP = 79
    """The job has used up its restarts: a controller that counts failed pods must not restart it."""


def exit_code(status: int) -> int:
    """Convert Python's exit status of a process to the exit code that a shell reports: `-9`, for signal 9, becomes 137."""
    return 128 - status if status < 0 else status


def job_name(text: str) -> str:
    """Derive a job's name from that of a script, module or function."""
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
    """Not reported, or reported by another version of Outlast with an unknown cause."""
    OUT_OF_MEMORY = "oom"
    DISK_FULL = "disk"
    """The script ran out of disk space: an immediate retry would fail, too, but a later one may find space."""
    HANG = "hang"
    """The process was killed because it hung."""
    BITS = "bits"
    """The rank had other bits than most others; the run goes back without its worker (decision 69)."""

    @classmethod
    def _missing_(cls, value: object) -> FailureCause:
        return cls.UNKNOWN


class End(enum.StrEnum):
    """Reason for the final end of a job. Also the reason of its condition on Kubernetes, hence CamelCase."""

    UNKNOWN = ""
    SUCCEEDED = "JobSucceeded"
    NO_PROGRESS = "NoProgress"
    """The same step failed too often."""
    MISCONFIGURED = "WrongConfiguration"
    LIMIT = "BackoffLimitExceeded"
    """`restarts.limit` is used up."""
    POLICY = "PodFailurePolicy"
    """The job's restartPolicy does not allow a restart after this failure. The value is the reason that a Kubernetes Job
    reports."""
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
    """Index of the worker, 0 ... max-1; not its rank."""
    GENERATION = "OUTLAST_GENERATION"
    """Generation of the world that trains; for the agent, the run's newest generation before this worker was started."""
    HELD = "OUTLAST_HELD"
    """The newest step that any worker of the previous world is known to have completed; 0 if unknown."""
    ATTEMPT = "OUTLAST_ATTEMPT"
    """Number of times that the members of the world have restarted its processes without the coordinator."""
    DATA = "OUTLAST_DATA"
    """Directory of the job's dataset, or the parent directory of several datasets."""
    MODELS = "OUTLAST_MODELS"
    """Directory of the job's models, each in a subdirectory with its name."""
    OUTPUT = "OUTLAST_OUTPUT"
    """The job's output directory, with `checkpoints/`, `logs/` and `ledger/`."""
    LEDGER = "OUTLAST_LEDGER"
    NOTICE = "OUTLAST_NOTICE"
    """Path of the notice file, which exists while this worker is asked to save and leave."""
    STATE = "OUTLAST_WORKER_STATE"
    """State directory of the worker: progress, errors, world."""
    RENDEZVOUS = "OUTLAST_RENDEZVOUS"
    """Endpoint of the coordinator, as given to `--rdzv-endpoint`."""
    RENDEZVOUS_KEY = "OUTLAST_RENDEZVOUS_KEY"
    """Shared key with which the workers of a run authenticate; default: a digest of OUTLAST_JOB_FILE if they meet at worker 0,
    else of the run's name."""
    ETCD_PREFIX = "OUTLAST_ETCD_PREFIX"
    """Prefix of all keys in the etcd of OUTLAST_RENDEZVOUS; default: the path of that endpoint, else `/outlast`."""
    ETCD_CACERT = "OUTLAST_ETCD_CACERT"
    """PEM file of the certificate authorities that verify etcd's certificate; turns TLS on."""
    ETCD_CERT = "OUTLAST_ETCD_CERT"
    ETCD_KEY = "OUTLAST_ETCD_KEY"
    """PEM files of the client certificate and its key."""
    ETCD_USER = "OUTLAST_ETCD_USER"
    ETCD_PASSWORD = "OUTLAST_ETCD_PASSWORD"
    CHECKPOINT_EVERY = "OUTLAST_CHECKPOINT_EVERY"
    """Interval between checkpoints: `300s` or `200 steps`."""
    CHECKPOINT_KEEP = "OUTLAST_CHECKPOINT_KEEP"
    CHECKPOINT_BEST = "OUTLAST_CHECKPOINT_BEST"
    """Number of best checkpoints to keep, `min` or `max` for the best value, and the metric: `2 min val_loss`. Absent if none are
    kept."""
    MEMORY = "OUTLAST_CHECKPOINT_MEMORY"
    """A worker's memory for snapshots: `auto`, `off`, or bytes; absent if an earlier version started the worker."""
    REPLICAS = "OUTLAST_CHECKPOINT_REPLICAS"
    """Number of other workers that hold a replica of state that only one rank has."""
    GO_BACK = "OUTLAST_CHECKPOINT_GO_BACK"
    """`1`: the run goes back if a rank has other bits than most others."""
    TENSORBOARD = "OUTLAST_TENSORBOARD"
    """`1`: also write metrics to TensorBoard event files in the output."""
    MLFLOW = "OUTLAST_MLFLOW"
    """URI of an MLflow server, or the path of its directory; `none` disables MLflow even if MLFLOW_TRACKING_URI is set."""
    EXPERIMENT = "OUTLAST_EXPERIMENT"
    """Name of the experiment in MLflow, and of the project in Weights & Biases."""

    # For the agent only
    JOB_FILE = "OUTLAST_JOB_FILE"
    """The job as submitted, with absolute paths."""
    CODE = "OUTLAST_CODE"
    """Working directory of the command, where code from an archive or a store is unpacked."""
    SHARED = "OUTLAST_SHARED"
    """Directory shared by the workers of one run on one machine, which records their code and data. Default: STATE."""
    CACHE = "OUTLAST_CACHE"
    """Directory shared by all jobs of a machine: data, models, environments. Default: `outlast` in $XDG_CACHE_HOME,
    else in ~/.cache."""
    NETRC = "OUTLAST_NETRC"
    """Logins to web servers, in the format of ~/.netrc. Set in the shell or by a Secret."""
    CACHE_SIZE = "OUTLAST_CACHE_SIZE"
    """Size limit of the data, models and shards in CACHE, e.g. `200GiB`; see `prepare.cache_eviction`."""
    PROBE_PORT = "OUTLAST_PROBE_PORT"
    """Port for `/healthz`, `/readyz`, `/metrics`; 0 or unset: any free one. On one machine, worker i serves on this port plus
    i."""
    PYTHON = "OUTLAST_PYTHON"
    """Path of the Python in which training runs, unless it is the agent's."""
    STORE = "OUTLAST_STORE"
    """URL of the job's output in a store; unset when the output is a directory."""
    STAY = "OUTLAST_STAY"
    """`1`: after the end of its run, this worker idles and never trains that run again (StatefulSets restart containers that
    exit)."""
    ADDRESS = "OUTLAST_ADDRESS"
    """Address at which other workers reach this one; default: 127.0.0.1, for workers on one machine."""
    NAMESPACE = "OUTLAST_NAMESPACE"
    """Namespace of the pod, and part of pod 0's host name in OUTLAST_RENDEZVOUS."""
    FRESH = "OUTLAST_FRESH"
    """`1`: start the run from the beginning, although another run of its output has not ended."""
    POD = "OUTLAST_POD"
    """Name of the pod."""
    NODE = "OUTLAST_NODE"
    """Name of the worker's node; if unset, machines are distinguished by their boot id. Replicas of snapshots go to other
    nodes."""
    ZONE = "OUTLAST_ZONE"
    """Failure domain of that node; empty if unknown. Replicas go to another zone if possible."""
    MEMBER = "OUTLAST_MEMBER"
    """Uid of the pod, which distinguishes its reports on the Lease from those of an earlier pod with the same name. Only the
    operator sets this variable."""
    OWNER = "OUTLAST_OWNER"
    """Fencing token of this machine in the run's store. A process that finds another token there is a zombie."""
    REVIVE = "OUTLAST_REVIVE"
    """JSON list: the command that restarts the launcher when it cannot be reached."""


RESERVED_ENV = re.compile(
    r"^(OUTLAST_(?!ETCD_|CACHE_SIZE$)|PET_|TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$)"
)
"""Names that a job file's `env` may not set: those of torchrun and of Outlast, except credentials for etcd and the size limit
of the cache."""


_S3_KEYS = "--from-literal=AWS_ACCESS_KEY_ID=... --from-literal=AWS_SECRET_ACCESS_KEY=..."
S3_SECRET = f"kubectl create secret generic s3 {_S3_KEYS}, and secrets: [{{name: s3}}] in the job file"
"""Commands that give pods credentials for S3 if their nodes have no role."""


class Pod:
    """Paths and ports in a worker's pod."""

    TRAINER = "trainer"
    """Container that runs the agent."""
    CONTAINER = "worker"
    """Container of other pods: datasets, Spark, checks. Also runs the agent in pods of earlier versions."""
    AGENT = (TRAINER, CONTAINER)
    USER = 1000
    """User and group id of the pod's processes."""
    CODE = "/workspace"
    DATA = "/data"
    MODELS = "/models"
    OUTPUT = "/out"
    """Parent directory of all jobs' outputs: a job's output is `/out/<job>`."""
    STATE = "/run/outlast"
    CACHE = "/var/cache/outlast"
    HOME = "/home/outlast"
    CONFIG = "/etc/outlast"
    """Directory of the job file, and of local files of the submitter that the job refers to."""
    JOB_FILE = "/etc/outlast/job.yaml"
    INJECTED = "/opt/outlast-agent"
    """Directory of the agent that an init container has copied, in images without Outlast."""
    SHIPPED = "/etc/outlast-code"
    """Directory of a code archive that is mounted from a ConfigMap."""
    PROBE_PORT = 8080
    RENDEZVOUS_PORT = 29400
    LAST_PUSH_S = 30
    """Seconds added to a pod's grace period: up to 10 s to finish the upload in progress, 10 s for the rest and the log,
    10 s to stop an upload that hangs."""


class Label:
    """Labels on a job's Kubernetes objects."""

    JOB = f"{GROUP}/job"
    WORKER = f"{GROUP}/worker"
    """Index of the worker, on pods that are created one by one."""
    GENERATION = f"{GROUP}/generation"
    RUN = f"{GROUP}/run"
    DATASET = f"{GROUP}/dataset"
    """Label of a Job that downloads a dataset instead of training."""
    SETTING = f"args.{GROUP}/"
    """Prefix of the names of arguments: `args.outlast.dev/batch: "128"`."""


class Annotation:
    """Annotations by which agents, pods and the operator communicate."""

    REPORT = f"{GROUP}/report"
    """On a member's Lease: a `rendezvous.messages.Report` as JSON."""
    FRESH = f"{GROUP}/fresh"
    """On an ElasticJob that was submitted with --fresh: `true`."""
    PROGRESS = f"{GROUP}/progress"
    """On a member's Lease: `{generation, step, steps, committed, snapshot, every, time}` as JSON; `steps` may be null,
    `snapshot` and `every` are absent while there is no snapshot. The member of rank 0 adds `{goodput, lost, lostSteps}`."""
    JOB_FILE = f"{GROUP}/job-file"
    """On a pod that the operator creates: the job file as pods read it."""
    LEAVING_AT = f"{GROUP}/leaving-at"
    """On a node that is about to go away, or on a worker's pod that must leave: the deadline, RFC 3339 in UTC."""
    LEAVING_REASON = f"{GROUP}/leaving-reason"
    """The reason as one sentence, together with LEAVING_AT."""
    CORDONED = f"{GROUP}/cordoned"
    """On a node that the node watcher has cordoned: `true`. A node that was already cordoned does not get this annotation, and
    stays cordoned."""


class LeavingKind(enum.StrEnum):
    """Values of the taint LEAVING: the reason why a node is about to go away."""

    SPOT = "spot"
    REBALANCE = "rebalance"
    MAINTENANCE = "maintenance"
    UNKNOWN = ""
    """Not given, or given by another version of Outlast with an unknown kind."""

    @classmethod
    def _missing_(cls, value: object) -> LeavingKind:
        return cls.UNKNOWN


LEAVING = f"{GROUP}/leaving"
"""Key of the taint on a node that is about to go away, effect NoSchedule. Its value is a `LeavingKind`."""


LEASE_S = 30.0
"""Seconds without a renewal of its Lease after which a member is considered dead."""
RENEW_S = 10.0
"""Seconds between two renewals of a member's Lease."""
MESH_LEASE_S = 100.0
MESH_RENEW_S = 30.0
"""The same two durations in worlds whose members watch each other: peers report a lost member at once."""
RENEWALS_PER_S = 200
"""Maximum number of one job's Lease renewals per second: with many workers, Leases are renewed less often and last longer.
Kubernetes is tested with 500 per second for its nodes."""
OPERATOR = "outlast-operator"
"""Name of the operator's Deployment, account, roles and leader lease."""
MANAGED_BY = f"{GROUP}/operator"
"""Value of a job's `managedBy` if the operator manages the job."""
KUBERNETES = "kubernetes://"
"""Scheme of the rendezvous endpoint if the operator coordinates, followed by the name of the ElasticJob."""
ETCD = ("etcd://", "etcds://")
"""Schemes of the endpoint if agents elect a coordinator through etcd: without and with TLS."""
Backend = Literal["auto", "etcd", "c10d"]
"""Values of `rendezvous.backend` in a job file."""
SCHEMES = {
    "c10d": {"": "c10d", "c10d": "c10d", "tcp": "c10d"},
    "etcd": {"": "etcd", "etcd": "etcd", "http": "etcd", "etcds": "etcds", "https": "etcds"},
}
"""Schemes of `rendezvous.endpoint` by backend, each with its replacement in Env.RENDEZVOUS (see `rendezvous.transport`)."""
OPERATOR_NAMESPACE = "outlast-system"
CLUSTER_DOMAIN = "cluster.local"
"""DNS domain of a cluster."""

LONGEST_HOST = 63
"""Maximum length of a host name, a label value and a Service name (RFC 1123)."""
MOST_WORKERS = 10_000
"""Maximum number of workers of one job."""


def worker_name(job: str, index: int) -> str:
    """Return the name of a worker's pod, and of its Lease."""
    return f"{job}-worker-{index}"


LONGEST_NAME = LONGEST_HOST - len(worker_name("", MOST_WORKERS - 1))
"""Maximum length of a job's name, since the names of its pods are host names."""

EVALUATE = "--evaluate"
"""Argument that makes a job's module evaluate its model instead of training it."""
EVALUATED = "--checkpoint="
"""Argument for the checkpoint to evaluate: `--checkpoint=best` or `--checkpoint=1200`. By default, the module decides."""

# Below the output of a job
CHECKPOINTS = "checkpoints"
LOGS = "logs"
LEDGER = "ledger"
METRICS = "metrics.jsonl"
JOB_FILE = "job.yaml"
"""The job file, without secrets."""
PARAMETERS = "parameters.json"
"""Settings of the run, see `training.parameters`."""
TENSORBOARD = "tensorboard"
"""Directory of TensorBoard event files: Outlast's are in `metrics/`, a script's are beside that directory."""
TRACKING = ".tracking"
"""Directory of the process that forwards metrics, see `tracking.follower_handle`."""
WORK = "work"
"""The working directory of training processes, see `prepare.workdir`."""
WORKED = ".outlast-generation"
"""File in WORK with the generation whose rank 0 ran there last; written by `launch.training_process`."""
OWNER = ".owner"
"""Lock file of the launcher that uses this output. It contains the path of that launcher's state directory."""
COMMIT = "COMMIT"
"""File written last into a checkpoint's directory: a checkpoint exists once this file does."""

# Below a worker's state directory
PROGRESS = "progress-{local_rank}.json"
"""See `workerfiles.progress_file`."""
PULSE = "pulse-{local_rank}.json"
"""See `workerfiles.progress_file.Pulse`."""
NEXT = "next-{local_rank}.json"
"""See `workerfiles.next_world`."""
ERROR = "error-{local_rank}.json"
"""The error of a failed training process: `{rank, generation, type, message, traceback, time}`; written by
`launch.training_process`."""
WORKER = "worker.json"
"""The agent's report: `{pid, state, reason, code, ranks, probes, still}`."""
WORLD = "world.json"
"""File with the current world of this worker, written by its membership in the rendezvous."""
NOTICE = "notice.json"
"""`{kind: leave|call, reason, generation, deadline}`: the agent asks this worker to leave, or the coordinator requests a new
rendezvous for `generation`. Training saves at the next step boundary and exits with 75."""

SNAPSHOTS = "snapshots.sock"
"""Socket at which the agent serves memory for snapshots, see `snapshots.server`; absent if the agent serves none."""


def worker_log(index: int) -> str:
    """Return the file name of a worker's log."""
    return f"worker-{index}.log"


def ledger_source(env: Mapping[str, str]) -> str:
    """Return the name of a training process in the ledger, by worker: a rank may move to another worker, and its files do not."""
    if Env.WORKER not in env:
        return f"rank-{env.get('RANK', 0)}"
    return f"worker-{env[Env.WORKER]}-process-{env.get('LOCAL_RANK', 0)}"


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of `step`. Names sort by step."""
    return f"step-{step:08d}"


STAYS = "stays up and does nothing more"
"""Suffix of the last log line of a worker that has ended and waits to be deleted."""
_END_LINE = re.compile(r"outlast \| worker (\S+): (?P<reason>.*) \(exit (?P<code>\d+|None)\)$")
_START_LINE = re.compile(r"outlast \| (attempt \d+ of )?generation \d+: ")


ECHO = "outlast echo | "
"""Prefix of log lines that only echo another rank's end; log readers skip these lines."""


def start_line(generation: int, attempt: int, reason: str) -> str:
    """Return the log line with which a worker's training processes start again: in a new world, or as another attempt of it."""
    return f"outlast | {f'attempt {attempt} of ' if attempt else ''}generation {generation}: {reason}"


def is_start_line(line: str) -> bool:
    """Return whether a log line is a `start_line`."""
    return _START_LINE.match(line) is not None


def end_line(worker: int | str, reason: str, code: int | None) -> str:
    """Return the log line about a worker's end."""
    return f"outlast | worker {worker}: {reason} (exit {code})"


def parse_end_line(line: str) -> tuple[str, int | None] | None:
    """Return the reason and exit code in an `end_line`; None for any other line."""
    match = _END_LINE.search(line)
    return match and (match["reason"], None if match["code"] == "None" else int(match["code"]))
