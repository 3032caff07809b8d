"""The contract between Outlast's processes, which may be of different versions: exit codes, environment variables, paths and file
formats. This module imports only the standard library."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Mapping
from typing import Literal, Self

API_VERSION = "outlast.dev/v1alpha1"
KIND = "ElasticJob"
GROUP = "outlast.dev"
"""API group, and prefix of Outlast's labels, annotations and finalizers."""


class Exit(enum.IntEnum):
    """Exit codes for a worker, and for a training process that uses Outlast."""

    DONE = 0
    FAILED = 1
    INTERRUPTED = 75
    """The worker saved its state, left on request, and is to be restarted. This code never counts as a failure (EX_TEMPFAIL)."""
    MISCONFIGURED = 78
    """The configuration is wrong, so a restart cannot help (EX_CONFIG)."""
    GIVEN_UP = 79
    """The job has used up its restarts. A controller that counts failed pods must not restart it."""


def exit_code(status: int) -> int:
    """Convert a process's exit status in Python to a shell's exit code: `-9`, for signal 9, becomes 137."""
    return 128 - status if status < 0 else status


def job_name(text: str) -> str:
    """Derive a job's name from the name of a script, module or function."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (words if words[:1].isalpha() else f"job-{words}")[:LONGEST_NAME].strip("-")


def killed(code: int) -> bool:
    """Return whether an exit code means that the process was killed by SIGHUP, SIGINT, SIGKILL, SIGUSR1 or SIGTERM."""
    return code in (129, 130, 137, 138, 143)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`, or `signal 40` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_ended(status: int) -> str:
    """Describe how a process ended, given its exit code or negative signal number."""
    return f"was killed by {signal_name(-status)}" if status < 0 else f"exited with code {status}"


class OpenWords(enum.StrEnum):
    """An enum to which newer versions may add words: an unknown word is read as UNKNOWN, the empty string."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls("")


class FailureCause(OpenWords):
    """Machine-readable cause of a worker's failure."""

    UNKNOWN = ""
    """No cause was reported, or this version does not know the reported cause."""
    OUT_OF_MEMORY = "oom"
    DISK_FULL = "disk"
    """The script ran out of disk space. An immediate retry would fail as well, but a later one may find space."""
    HANG = "hang"
    BITS = "bits"
    """The rank's state differed from most other ranks' state. The run goes back to an earlier step without this worker."""


class End(OpenWords):
    """Why a job has ended for good. The values are also the reasons in the job's Kubernetes condition, hence the CamelCase."""

    UNKNOWN = ""
    SUCCEEDED = "JobSucceeded"
    NO_PROGRESS = "NoProgress"
    """The job failed at the same step too often."""
    MISCONFIGURED = "WrongConfiguration"
    LIMIT = "BackoffLimitExceeded"
    POLICY = "PodFailurePolicy"
    """The job's restartPolicy does not allow a restart after this failure. Kubernetes Jobs use the same reason."""
    DEADLINE = "DeadlineExceeded"
    STARTUP_DEADLINE = "StartupDeadlineExceeded"
    INVALID = "InvalidJob"


class Env:
    """Environment variables that a training process may read. A job file may not set them."""

    JOB = "OUTLAST_JOB"
    RUN = "OUTLAST_RUN"
    """Unique id of this run. Two runs with the same job name never share a world."""
    WORKER = "OUTLAST_WORKER"
    """Index of the worker, from 0 to `workers.max` - 1. It is not a rank."""
    GENERATION = "OUTLAST_GENERATION"
    """Generation of the current world. For the agent, it is the run's newest generation at the time this worker was started."""
    HELD = "OUTLAST_HELD"
    """The newest step that any worker of the previous world is known to have completed; 0 if unknown."""
    ATTEMPT = "OUTLAST_ATTEMPT"
    """Number of times that the members have restarted the world's processes without the coordinator."""
    DATA = "OUTLAST_DATA"
    """Directory of the job's dataset, or the parent directory of several datasets."""
    MODELS = "OUTLAST_MODELS"
    """Parent directory of the job's models. Each model's subdirectory has the model's name."""
    OUTPUT = "OUTLAST_OUTPUT"
    """The job's output directory, with `checkpoints/`, `logs/` and `ledger/`."""
    EVALUATION = "OUTLAST_EVALUATION"
    """Set to `1` by `outlast evaluate`. No session opens then, since it would take the run from its workers."""
    LEDGER = "OUTLAST_LEDGER"
    NOTICE = "OUTLAST_NOTICE"
    """Path of the notice file, which exists while this worker is asked to save and leave."""
    STATE = "OUTLAST_WORKER_STATE"
    RENDEZVOUS = "OUTLAST_RENDEZVOUS"
    RENDEZVOUS_KEY = "OUTLAST_RENDEZVOUS_KEY"
    """Shared key of a run's workers. Default: a digest of OUTLAST_JOB_FILE if the workers meet at worker 0, otherwise a digest of
    the run's name."""
    ETCD_PREFIX = "OUTLAST_ETCD_PREFIX"
    """Prefix of all keys in etcd. Default: the path in OUTLAST_RENDEZVOUS, or `/outlast` if there is none."""
    ETCD_CACERT = "OUTLAST_ETCD_CACERT"
    """PEM file of the certificate authorities for etcd's certificate. Setting it turns on TLS."""
    ETCD_CERT = "OUTLAST_ETCD_CERT"
    ETCD_KEY = "OUTLAST_ETCD_KEY"
    ETCD_USER = "OUTLAST_ETCD_USER"
    ETCD_PASSWORD = "OUTLAST_ETCD_PASSWORD"
    CHECKPOINT_EVERY = "OUTLAST_CHECKPOINT_EVERY"
    CHECKPOINT_KEEP = "OUTLAST_CHECKPOINT_KEEP"
    CHECKPOINT_BEST = "OUTLAST_CHECKPOINT_BEST"
    """Which best checkpoints to keep: number, `min` or `max`, and metric, as in `2 min val_loss`. Unset if none are kept."""
    MEMORY = "OUTLAST_CHECKPOINT_MEMORY"
    """A worker's memory for snapshots: `auto`, `off`, or a number of bytes. Unset if an earlier version started the worker."""
    REPLICAS = "OUTLAST_CHECKPOINT_REPLICAS"
    """Number of other workers that hold a replica of state that only one rank has."""
    GO_BACK = "OUTLAST_CHECKPOINT_GO_BACK"
    """If `1`, the run goes back to an earlier step when one rank's state differs from most other ranks' state."""
    TENSORBOARD = "OUTLAST_TENSORBOARD"
    """If `1`, metrics are also written to TensorBoard event files in the job's output."""
    MLFLOW = "OUTLAST_MLFLOW"
    """URI of an MLflow server, or path of a directory for MLflow's files. `none` disables MLflow even if MLFLOW_TRACKING_URI is
    set."""
    EXPERIMENT = "OUTLAST_EXPERIMENT"
    """Name of the experiment in MLflow and of the project in Weights & Biases."""

    # For the agent only
    JOB_FILE = "OUTLAST_JOB_FILE"
    """The job as submitted, with absolute paths."""
    CODE = "OUTLAST_CODE"
    """The command's working directory, where code from an archive or a store is unpacked."""
    SHARED = "OUTLAST_SHARED"
    """Directory that the workers of one run share on one machine, with records of their code and data. Default: STATE."""
    CACHE = "OUTLAST_CACHE"
    """Directory of data, models and environments for all jobs on a machine. Default: `outlast` in $XDG_CACHE_HOME or ~/.cache."""
    NETRC = "OUTLAST_NETRC"
    """Logins to web servers, in the format of ~/.netrc. The user sets it in the shell or with a Secret."""
    CACHE_SIZE = "OUTLAST_CACHE_SIZE"
    """Size limit for the data, models and shards in CACHE, such as `200GiB` (see `prepare.data_cache_eviction`)."""
    PROBE_PORT = "OUTLAST_PROBE_PORT"
    """Port for `/healthz`, `/readyz` and `/metrics`; 0 or unset means any free port. On one machine, worker i adds i to it."""
    PYTHON = "OUTLAST_PYTHON"
    """Path of the Python interpreter for training. Default: the agent's interpreter."""
    STORE = "OUTLAST_STORE"
    """URL of the job's output in a store. Unset if the output is a directory."""
    STAY = "OUTLAST_STAY"
    """If `1`, this worker idles after its run has ended, because a StatefulSet would restart a container that exits."""
    ADDRESS = "OUTLAST_ADDRESS"
    """Address at which other workers reach this worker. Default: 127.0.0.1, for workers on one machine."""
    NAMESPACE = "OUTLAST_NAMESPACE"
    """The pod's namespace, which is also part of pod 0's host name in OUTLAST_RENDEZVOUS."""
    OPERATOR_IMAGE = "OUTLAST_OPERATOR_IMAGE"
    """The operator's image, from which pods also get the agent. The user sets it in the shell. Default: this release's image."""
    FRESH = "OUTLAST_FRESH"
    """If `1`, the run starts from the beginning, even if another run with the same output has not ended."""
    POD = "OUTLAST_POD"
    NODE = "OUTLAST_NODE"
    """Name of the worker's node. If unset, boot ids tell machines apart. Replicas go to other nodes."""
    ZONE = "OUTLAST_ZONE"
    """The node's failure domain; empty if unknown. Replicas go to another zone if possible."""
    MEMBER = "OUTLAST_MEMBER"
    """The pod's uid, which distinguishes its reports on the Lease from those of an earlier pod with the same name. Set only by
    the operator."""
    OWNER = "OUTLAST_OWNER"
    """This machine's fencing token in the run's store. A process that finds another token there has been superseded."""
    REVIVE = "OUTLAST_REVIVE"
    """Command, as a JSON list, that restarts the launcher when the launcher cannot be reached."""


RESERVED_ENV = re.compile(
    r"^(OUTLAST_(?!ETCD_|CACHE_SIZE$)|PET_|TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$)"
)
"""Names that `env` in a job file may not set: torchrun's and Outlast's own, except for etcd credentials and the cache size."""


_S3_KEYS = "--from-literal=AWS_ACCESS_KEY_ID=... --from-literal=AWS_SECRET_ACCESS_KEY=..."
S3_SECRET = f"kubectl create secret generic s3 {_S3_KEYS}, and secrets: [{{name: s3}}] in the job file"
"""How to give S3 credentials to pods whose nodes have no IAM role. Used in error messages."""


class Pod:
    """Paths and ports in a worker's pod."""

    TRAINER = "trainer"
    CONTAINER = "worker"
    """Container of pods for dataset downloads, Spark and checks. In pods of earlier versions, it also runs the agent."""
    AGENT = (TRAINER, CONTAINER)
    USER = 1000
    CODE = "/workspace"
    DATA = "/data"
    MODELS = "/models"
    OUTPUT = "/out"
    """Parent directory of all job outputs. Each job writes to `/out/<job>`."""
    STATE = "/run/outlast"
    CACHE = "/var/cache/outlast"
    HOME = "/home/outlast"
    CONFIG = "/etc/outlast"
    """Directory with the job file and the submitter's local files that the job file refers to."""
    JOB_FILE = "/etc/outlast/job.yaml"
    INJECTED = "/opt/outlast-agent"
    """Directory to which an init container copies the agent if the image lacks Outlast."""
    SHIPPED = "/etc/outlast-code"
    PROBE_PORT = 8080
    RENDEZVOUS_PORT = 29400
    LAST_PUSH_S = 30
    """Seconds added to a pod's grace period: 10 s each to finish the current upload, upload the rest, and stop a hung upload."""


class Label:
    """Labels on a job's Kubernetes objects."""

    JOB = f"{GROUP}/job"
    WORKER = f"{GROUP}/worker"
    """Index of the worker, on pods that are created one by one."""
    GENERATION = f"{GROUP}/generation"
    RUN = f"{GROUP}/run"
    DATASET = f"{GROUP}/dataset"
    """Label of a Kubernetes Job that downloads a dataset instead of training."""
    SETTING = f"args.{GROUP}/"
    """Prefix of labels named after arguments, such as `args.outlast.dev/batch: "128"`."""


class Annotation:
    """Annotations through which agents, pods and the operator communicate."""

    REPORT = f"{GROUP}/report"
    """A `rendezvous.messages.Report` as JSON, on a member's Lease."""
    FRESH = f"{GROUP}/fresh"
    KEY = f"{GROUP}/key"
    """On an ElasticJob whose workers have their key from a Secret: the ElasticJob's uid, so that it is not valid on a copy."""
    PROGRESS = f"{GROUP}/progress"
    """`{generation, step, steps, committed, snapshot, every, time}` as JSON, on a member's Lease. `steps` may be null; `snapshot`
    and `every` are missing while there is no snapshot. The member of rank 0 adds `{goodput, lost, lostSteps}`."""
    JOB_FILE = f"{GROUP}/job-file"
    LEAVING_AT = f"{GROUP}/leaving-at"
    """Deadline (RFC 3339 in UTC) on a node that is about to go away, or on a worker's pod that must leave."""
    LEAVING_REASON = f"{GROUP}/leaving-reason"
    CORDONED = f"{GROUP}/cordoned"
    """`true` on a node that the node watcher has cordoned and may therefore uncordon."""


class LeavingKind(OpenWords):
    """Why a node is about to go away: the values of the taint LEAVING."""

    SPOT = "spot"
    REBALANCE = "rebalance"
    MAINTENANCE = "maintenance"
    UNKNOWN = ""
    """No kind was given, or this version does not know the given kind."""


LEAVING = f"{GROUP}/leaving"
"""Key of the NoSchedule taint on a node that is about to go away. Its value is a `LeavingKind`."""


LEASE_S = 30.0
"""A member counts as dead if it has not renewed its Lease for this many seconds."""
RENEW_S = 10.0
MESH_LEASE_S = 100.0
MESH_RENEW_S = 30.0
"""Lease duration and renewal interval, in seconds, in worlds whose members watch each other and report a lost member."""
RENEWALS_PER_S = 200
"""Maximum Lease renewals per second for one job; larger jobs renew less often. Kubernetes itself is tested with 500 per second
for the Leases of its nodes."""
OPERATOR = "outlast-operator"
MANAGED_BY = f"{GROUP}/operator"
KUBERNETES = "kubernetes://"
"""Scheme of the rendezvous endpoint if the operator coordinates. The ElasticJob's name follows it."""
ETCD = ("etcd://", "etcds://")
"""Schemes of the rendezvous endpoint, without and with TLS, if agents elect a coordinator through etcd."""
Backend = Literal["auto", "etcd", "c10d"]
SCHEMES = {
    "c10d": {"": "c10d", "c10d": "c10d", "tcp": "c10d"},
    "etcd": {"": "etcd", "etcd": "etcd", "http": "etcd", "etcds": "etcds", "https": "etcds"},
}
"""Schemes allowed in `rendezvous.endpoint` for each backend, mapped to the schemes in Env.RENDEZVOUS."""
OPERATOR_NAMESPACE = "outlast-system"
CLUSTER_DOMAIN = "cluster.local"

LONGEST_HOST = 63
"""Maximum length of a host name, a label value and a Service name (RFC 1123)."""
MOST_WORKERS = 10_000


def worker_name(job: str, index: int) -> str:
    """Return the name that a worker's pod and Lease share."""
    return f"{job}-worker-{index}"


LONGEST_NAME = LONGEST_HOST - len(worker_name("", MOST_WORKERS - 1))
"""Maximum length of a job's name, from which its pods' host names are derived."""

EVALUATE = "--evaluate"
"""Argument that makes a job's module evaluate its model instead of training it."""
EVALUATED = "--checkpoint="
"""Argument for the checkpoint to evaluate: `--checkpoint=best` or `--checkpoint=1200`. By default, the job's module decides."""

# In a job's output directory
CHECKPOINTS = "checkpoints"
LOGS = "logs"
LEDGER = "ledger"
METRICS = "metrics.jsonl"
JOB_FILE = "job.yaml"
PARAMETERS = "parameters.json"
TENSORBOARD = "tensorboard"
"""Directory of TensorBoard event files. Outlast's files are in its subdirectory `metrics/`."""
TRACKING = ".tracking"
WORK = "work"
WORKED = ".outlast-generation"
"""File in WORK with the generation of the last rank 0 that ran there. `launch.training_process` writes it."""
OWNER = ".owner"
"""Lock file of the launcher that uses this output. It contains the path of that launcher's state directory."""
COMMIT = "COMMIT"
"""Last file written to a checkpoint's directory. A checkpoint exists once this file does."""

# In a worker's state directory
PROGRESS = "progress-{local_rank}.json"
PULSE = "pulse-{local_rank}.json"
"""Files of a process's progress and heartbeat (see `workerfiles.progress_file`)."""
NEXT = "next-{local_rank}.json"
ERROR = "error-{local_rank}.json"
"""Error of a failed training process: `{rank, generation, type, message, traceback, time}`."""
WORKER = "worker.json"
"""The agent's report: `{pid, state, reason, code, ranks, probes, still}`."""
WORLD = "world.json"
NOTICE = "notice.json"
"""`{kind: leave|call, reason, generation, deadline}` (see `workerfiles.notice_file`). Training saves at the next step boundary
and exits with 75."""

SNAPSHOTS = "snapshots.sock"
"""Socket on which the agent serves memory for snapshots. It is missing if the agent serves no such memory (see
`snapshots.server`)."""


def worker_log(index: int) -> str:
    """Return the file name of a worker's log."""
    return f"worker-{index}.log"


def ledger_source(env: Mapping[str, str]) -> str:
    """Return a training process's name in the ledger. In a worker, the name contains the worker's index instead of the rank,
    because a rank may move to another worker, but its files stay."""
    if Env.WORKER not in env:
        return f"rank-{env.get('RANK', 0)}"
    return f"worker-{env[Env.WORKER]}-process-{env.get('LOCAL_RANK', 0)}"


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint directory for a step. Names sort by step."""
    return f"step-{step:08d}"


STAYS = "stays up and does nothing more"
"""Suffix of the last log line of a worker that has ended and waits to be deleted."""
_END_LINE = re.compile(r"outlast \| worker (\S+): (?P<reason>.*) \(exit (?P<code>\d+|None)\)$")
_START_LINE = re.compile(r"outlast \| (attempt \d+ of )?generation \d+: ")


ECHO = "outlast echo | "
"""Prefix of log lines that only repeat how another rank ended. Log readers skip these lines."""


def start_line(generation: int, attempt: int, reason: str) -> str:
    """Return the log line that marks a new start of a worker's training processes, for a new world or another attempt."""
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
