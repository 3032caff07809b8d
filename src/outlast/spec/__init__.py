"""The job file: one frozen model that reads it, checks it, describes it to editors and in the reference.

    load(path)   the job in a file, its relative paths made absolute
    parse(text)  the job in a text
    of(document) the job in a document of an API server
    dump(job)    YAML that parses back to an equal job
    schema()     JSON schema, for editors

Whoever reads gets a whole and consistent job, or `InvalidJob` with every mistake and its line. Attributes are snake_case, names
in the file camelCase. The text below a field is what users read about it. Rules between fields stand below the fields.
Imports nothing heavier than pydantic.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from outlast import contract, units
from outlast.errors import InvalidJob, NotFound, OutlastError
from outlast.spec import document, validation
from outlast.spec.document import Place
from outlast.spec.validation import Checked

STORES = ("s3", "gs", "az", "file", "memory")
"""URL schemes of places where data, code and outputs may live, besides plain paths."""
ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")
"""How the names of archives of code end."""
_OTHER_ARCHIVES = (".tbz", ".tbz2", ".txz", ".bz2", ".xz", ".zst", ".gz", ".rar", ".7z")

OWN = "/(etc|opt|run|var|usr|bin|sbin|lib|lib64)|/(proc|sys|dev|opt/outlast|etc/outlast|etc/outlast-code|run/outlast)(/.*)?"
"""Places in a pod (a pattern of RE2, too) that nothing may be mounted over: what runs there would miss its files."""
MANY_CORES = ("neuron", "aws.amazon.com/neuron", "aws.amazon.com/neurondevice")
"""Accelerators of which each has cores for several processes."""

# ---------------------------------------------------------------------------------------------------------------------- types


def _above_zero(value: Any) -> timedelta:
    found = units.duration(value)
    if not found:
        raise ValueError("must be more than 0")
    return found


def _enough_memory(value: Any) -> int:
    found = units.memory(value)
    if found < 2**20:
        raise ValueError(f"means {found} bytes, less than any process needs; write 16Gi")
    return found


@dataclass(frozen=True)
class _Pattern:
    """Text of a pattern (RE2's, too); `sentence` says it to users, the schema to editors and API servers."""

    pattern: str
    sentence: str
    longest: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, inner: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        longest = {"maxLength": self.longest} if self.longest else {}
        return {**handler(inner), "pattern": f"^({self.pattern})$", **longest}

    def _check(self, value: str) -> str:
        if not re.fullmatch(self.pattern, value, re.ASCII) or len(value) > (self.longest or len(value)):
            raise ValueError(self.sentence)
        return value


def _label(longest: int) -> _Pattern:
    sentence = f"must be lower-case letters, digits and dashes, from a letter on, at most {longest} characters"
    return _Pattern(r"[a-z]([-a-z0-9]*[a-z0-9])?", sentence, longest)


def _name(longest: int) -> _Pattern:
    """The name of something in a cluster (a subdomain of RFC 1123), or nothing."""
    part = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    sentence = f"must be a name in the cluster: lower-case letters, digits, dashes and dots, at most {longest} characters"
    return _Pattern(rf"{part}(\.{part})*|", sentence, longest)


def _location(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    if separator and scheme not in STORES:
        raise ValueError(f"is in no store known here; use a path, or one of {', '.join(f'{s}://' for s in STORES)}")
    if not separator and (almost := re.match(rf"({'|'.join(STORES)}):/?([^/].*)", value)):
        raise ValueError(f"is no URL of a store; write {almost[1]}://{almost[2]}, or ./{value} for a path")
    if not (rest if separator else value):
        raise ValueError("must be a path or the URL of a store")
    return value


def _code(value: str) -> str:
    place, checksum = pinned(_location(value))
    if checksum and not re.fullmatch(r"[0-9a-fA-F]{64}", checksum):
        raise ValueError("must end with #sha256= and 64 hexadecimal digits, as sha256sum prints them")
    if checksum and not archive(place):
        raise ValueError(f"is no archive ({', '.join(ARCHIVES)}), and only those have a checksum; remove #sha256=...")
    if local(place) is None and not archive(place) and place.lower().endswith(_OTHER_ARCHIVES):
        raise ValueError("is an archive of a kind not known here; make it a .tar.gz or .zip")
    return value


def _inside(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute():
        raise ValueError(f"is an absolute path; write it relative to code, e.g. {path.name or 'train.py'}")
    if not path.name or ".." in path.parts:
        raise ValueError("must be a file in code, e.g. train.py")
    return value


def _auto_or_count(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("must be auto or a number from 1 on")


def _free_names(value: dict[str, str]) -> dict[str, str]:
    broken: list[tuple[Place, str]] = []
    for name in value:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            broken.append(((name,), f"env.{name} is not a name for an environment variable; use letters, digits and _"))
        elif contract.RESERVED_ENV.search(name):
            broken.append(((name,), f"env.{name} is set by Outlast itself; remove it"))
    if broken:
        raise validation.Broken(broken)
    return value


def _text_schema(pattern: str, *others: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*({"type": other} for other in others), {"type": "string", "pattern": pattern}]})


Count = Annotated[int, Field(strict=True, ge=1, le=contract.MOST_WORKERS)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]
ManagedBy = Annotated[
    str,
    _Pattern(
        r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
        "must be a domain and a name with a slash between them: outlast.dev/operator",
        63,
    ),
]
Text = Annotated[str, Field(min_length=1)]
Duration = Annotated[
    timedelta,
    BeforeValidator(_above_zero),
    PlainSerializer(units.duration_text, when_used="json"),
    _text_schema(units.DURATION_PATTERN, "number"),
]
Every = Annotated[
    units.Every,
    PlainValidator(units.Every.parse),
    PlainSerializer(str, when_used="json"),
    _text_schema(units.EVERY_PATTERN, "number"),
]
Memory = Annotated[
    int,
    BeforeValidator(_enough_memory),
    PlainSerializer(units.memory_text, when_used="json"),
    _text_schema(units.QUANTITY_PATTERN, "integer"),
]
Cores = Annotated[
    float,
    BeforeValidator(units.cores),
    PlainSerializer(units.cores_text, when_used="json"),
    _text_schema(units.QUANTITY_PATTERN, "number"),
]
Location = Annotated[str, AfterValidator(_location)]
Code = Annotated[str, AfterValidator(_code)]
Script = Annotated[str, AfterValidator(_inside)]
Module = Annotated[str, _Pattern(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "must be a Python module, e.g. outlast.recipes.cifar10")]
Mount = Annotated[
    str,
    _Pattern(
        r"(/([^/:.][^/:]*|\.[^/:.][^/:]*|\.\.[^/:]+))+",
        "must be an absolute path in the worker, e.g. /data, without : and parts that are . or ..",
    ),
]
Directory = Annotated[str, _Pattern(r"[\w.-]*[\w-]", "must be a directory's name: letters, digits, dashes and dots")]
Accelerator = Annotated[
    str,
    _Pattern(r"nvidia|amd|neuron|[\w.-]+/[\w.-]+", "must be nvidia, amd, neuron or a resource such as nvidia.com/gpu"),
]
_LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_TAINT = _Pattern(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?|",
    "must be the key of a taint, e.g. nvidia.com/gpu: letters, digits, -, _ and .",
    317,
)
Endpoint = Annotated[str, _Pattern(r"(\w+://)?[^ /]+:[0-9]+(/[^ ]*)?", "must be an address with a port, e.g. etcd:2379")]


# ---------------------------------------------------------------------------------------------------------------------- model


class Metadata(Checked):
    """Names of the job."""

    name: Annotated[str, _label(contract.LONGEST_NAME)]
    """Name of the job: lower-case letters, digits and dashes, from a letter on, at most 51 characters."""
    namespace: Annotated[str, _label(63)] | None = None
    """Namespace on Kubernetes. Default: the one of the current context."""
    labels: dict[str, str] = Field({})
    """Labels for the job and everything made for it on Kubernetes."""
    annotations: dict[str, str] = Field({})
    """Annotations of the job."""


class Data(Checked):
    """A dataset that every worker can read."""

    from_: Location
    """Directory on this machine, or URL of a store: a prefix (`s3://bucket/prefix`) with everything below it, or one object. What
    is in a store is fetched once for all workers and jobs of a machine, and again only when it has changed. Read only."""
    to: Mount = "/data"
    """Where a pod finds it. On this machine `OUTLAST_DATA` says where it is."""


class Weights(Checked):
    """Weights that every worker can read."""

    from_: Location
    """Directory on this machine, or URL of a store, as for data."""
    name: Directory
    """Training finds the weights in `$OUTLAST_MODELS/<name>`; a pod in `/models/<name>`."""


def _sizes(given: dict[str, Any]) -> list[int]:
    """Numbers of workers that are given. Before pydantic 2.12 this is asked of wrong ones, too, which are missing then."""
    return list(given.get("sizes") or [given.get("replicas", 1) or 1])


class Workers(Checked):
    """How many workers train together. `outlast scale` changes `replicas` while the job runs."""

    replicas: Annotated[int, Field(strict=True, ge=0, le=contract.MOST_WORKERS)] = 1
    """Workers wanted. 0 suspends the job, on Kubernetes, until more are wanted."""
    step: Count = 1
    """Allowed numbers of workers are `min`, `min` + `step`, ... up to `max`."""
    sizes: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Allowed numbers of workers, one by one, instead of `step`: `[1, 2, 4]`."""
    min: int = Field(strict=True, ge=1, le=contract.MOST_WORKERS, default_factory=lambda given: min(_sizes(given)))
    """Training goes on with no fewer. Default: the smallest of `sizes`, else `replicas`."""
    max: int = Field(
        strict=True, ge=1, le=contract.MOST_WORKERS, default_factory=lambda given: max(*_sizes(given), given.get("min", 1))
    )
    """Training takes no more. Default: the largest of `sizes`, else `replicas`."""

    def allowed(self) -> tuple[int, ...]:
        """The numbers of workers that a world may have, ascending."""
        return tuple(
            size for size in sorted(set(self.sizes or range(self.min, self.max + 1, self.step))) if self.min <= size <= self.max
        )

    def rules(self) -> Iterator[tuple[Place, str]]:
        replicas = f"workers.replicas ({self.replicas}{'' if 'replicas' in self.model_fields_set else ', the default'})"
        if self.sizes and self.step != 1:
            yield ("step",), "workers.step and workers.sizes are both given; keep one"
        elif self.min > self.max and {"min", "max"} <= self.model_fields_set:
            yield ("min",), f"workers.min ({self.min}) is above workers.max ({self.max}); swap them or raise max"
        elif self.sizes and min(self.sizes) > self.max:
            sizes = ", ".join(map(str, sorted(self.sizes)))
            yield ("max",), f"workers.max ({self.max}) is below all of workers.sizes ({sizes}); raise max or add a size"
        elif 0 < self.replicas < self.min:
            yield ("replicas",), f"{replicas} is below workers.min ({self.min}); raise replicas or lower min"
        elif self.replicas > self.max:
            yield ("replicas",), f"{replicas} is above workers.max ({self.max}); lower replicas or raise max"
        else:
            allowed = self.allowed()
            if self.min not in allowed:
                sizes = ", ".join(map(str, sorted(self.sizes or ())))
                yield ("min",), f"workers.min ({self.min}) is not one of workers.sizes ({sizes}); add it or raise min"
            elif self.replicas and self.replicas not in allowed:
                yield (
                    ("replicas",),
                    f"{replicas} is not an allowed number of workers ({', '.join(map(str, allowed))}); choose one",
                )


class Resources(Checked):
    """What each worker is given. On this machine workers share what is there."""

    cpu: Cores | None = None
    """Cores: `4`, `500m`. With `kubectl apply` a fraction is a text, `500m` or `"0.5"`: API servers take no other."""
    cpu_limit: Cores | None = None
    """The most cores, `8`, for namespaces that ask for a limit. Kubernetes only. Default: no limit, so that data loaders may use
    what is idle."""
    memory: Memory | None = None
    """Memory: `16Gi`."""
    gpu: Whole = 0
    """Number of GPUs. A worker sees only its own, and with 0 none. On a machine without GPUs `outlast run` trains on the CPU."""
    accelerator: Accelerator = "nvidia"
    """Kind of GPU: `nvidia`, `amd`, `neuron` (AWS Trainium and Inferentia), or the full name of a Kubernetes resource."""
    shared_memory: Memory | None = None
    """Size of `/dev/shm`, which data loaders and NCCL use: `4Gi`. It counts as memory."""


class Rendezvous(Checked):
    """How the workers find each other and agree on a world."""

    backend: Literal["auto", "etcd", "c10d"] = "auto"
    """Who decides which workers train together. `auto`: the launcher on this machine, and in a cluster the operator, or worker 0
    where there is none. `etcd`: a worker that is elected in an etcd v3, also where an operator makes the pods. `c10d`: worker 0,
    also where `endpoint` says that it is."""
    endpoint: Endpoint | None = None
    """Address of etcd: `etcd:2379`, `https://etcd:2379/prefix`, several with commas. Who asks is said by the variables
    `OUTLAST_ETCD_USER`, `_PASSWORD`, `_CACERT`, `_CERT` and `_KEY`, in `env` or from `secrets`. Of c10d: `host:29400`."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if self.backend == "etcd" and not self.endpoint:
            yield ("backend",), "rendezvous.backend is etcd, which needs rendezvous.endpoint, e.g. etcd:2379"
        if self.backend == "auto" and self.endpoint:
            yield ("endpoint",), f"rendezvous.endpoint ({self.endpoint}) has no use with backend auto; say backend: etcd or c10d"


class Checkpoint(Checked):
    """Saving, by scripts that use `outlast.training`."""

    every: Every = units.Every(duration=timedelta(minutes=5))
    """How often to save: a duration (`5m`) or a number of steps (`200 steps`)."""
    keep: Annotated[int, Field(strict=True, ge=2)] = 3
    """How many of the newest checkpoints to keep, at least 2."""


class Sync(Checked):
    """Pushing outputs to the store."""

    every: Duration = timedelta(minutes=10)
    """How often new outputs are pushed while training runs. At the end, however it ends, the rest is pushed."""


class Restarts(Checked):
    """What happens after failures. Interruptions (told to leave: scale-down, drain, spot) never count."""

    limit: Whole = 10
    """The job fails after more failures than this within `window`. Progress refunds them: a failure counts no longer once a
    newer step was saved."""
    window: Duration = timedelta(hours=1)
    """Failures older than this no longer count."""


class Interruption(Checked):
    """What happens when a worker is told to leave."""

    grace: Duration = timedelta(seconds=75)
    """Time to save and leave before training is ended. In pods 30 s more follow for the last push: with the default that fits
    into the 120 s after the notice of a spot machine of AWS. Azure and Google give 30 s: 10s or less there."""


class Scheduling(Checked):
    """Where and when pods may run. Kubernetes only."""

    queue: Annotated[str, _name(63)] = ""
    """Queue of Kueue or Volcano. Where the cluster has Kueue it is one of Kueue's, unless `gang` is `volcano`."""
    gang: Literal["auto", "none", "coscheduling", "volcano"] = "auto"
    """Who starts the workers all or none. `auto`: Volcano or the coscheduling plugin, if the operator finds one of them when it
    takes up the job, `workers.min` is above 1 and no queue of Kueue admits the job; else nobody."""
    priority_class_name: Annotated[str, _name(253)] = ""
    """PriorityClass of the pods."""
    spot: Literal["prefer", "require", "avoid", "any"] = "prefer"
    """Whether to run on spot machines."""


class Environment(Checked):
    """Packages to install before training starts, once for all workers and jobs of a machine. Give one of the two."""

    requirements: Text | None = None
    """A file for pip. Its packages come on top of the Python that Outlast runs in: what is there, PyTorch above all, is not
    installed again. With `code` from an archive or a store it may be a file in the code."""
    conda: Text | None = None
    """An environment file for micromamba, mamba or conda, one of which must be installed. It must bring Python 3.11 or newer and
    PyTorch."""

    @classmethod
    def choices(cls, given: Collection[str]) -> Iterator[tuple[Place, str]]:
        if "requirements" in given and "conda" in given:
            yield ("conda",), "environment.requirements and environment.conda are both given; keep one"


class Hang(Checked):
    """What counts as a hang. The stacks of a process that hangs are written to `logs/`, and the training restarts."""

    limit: Duration = timedelta(minutes=10)
    """A process that does nothing for this long hangs: no step, its main thread does not move, no CPU time, and no output of a
    plain script. At least 10 minutes before the first step of a session."""


class Volume(Checked):
    """A volume for the pods. Kubernetes only."""

    claim: Annotated[Text, _name(253)]
    """Name of the PersistentVolumeClaim. One that is there is used as it is."""
    to: Mount
    """Where a pod finds it. Data of this machine (`data: [{from: ./cifar, to: /data}]`) is in pods what a volume has there."""
    size: Memory | None = None
    """Size of a claim that is to be made if it is not there, `100Gi`. Default: it exists."""
    storage_class: Annotated[str, _name(253)] = ""
    """With `size`: the StorageClass. Default: the cluster's."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"] | None = None
    """With `size`: who may use the claim at once, the pods of one node, all pods, or one pod. Disks refuse `ReadWriteMany`,
    shared file systems do not. Default: `ReadWriteOnce` for a job of one pod (topology job), else `ReadWriteMany`."""
    sub_path: str = ""
    """Directory in the volume. Default: all of it."""
    read_only: Flag = False
    """Whether pods may only read."""


class Toleration(Checked):
    """A taint of nodes that the pods tolerate, as in a pod's specification. Kubernetes only."""

    key: Annotated[str, _TAINT] = ""
    """Key of the taint. Default: any."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """`Equal` compares `value`, `Exists` does not."""
    value: Annotated[str, _Pattern(_LABEL_VALUE, "must be at most 63 letters, digits, -, _ and .", 63)] = ""
    """Value of the taint."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint. Default: any."""
    toleration_seconds: Whole | None = None
    """With `NoExecute`: how long the pods stay. Default: for ever."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if self.operator == "Exists" and self.value:
            yield ("value",), f"the toleration's value ({self.value}) has no use with operator Exists; remove one of them"
        if self.operator == "Equal" and not self.key:
            yield ("key",), "the toleration has no key, which means any; say operator: Exists, or give the key"
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            yield ("tolerationSeconds",), "tolerationSeconds has a use with effect: NoExecute only; add or remove it"


class Secret(Checked):
    """A Secret for the workers. Kubernetes only."""

    name: Annotated[Text, _name(253)]
    """Name of the Secret."""
    to: Mount | None = None
    """Directory for its keys as files. Default: its keys become environment variables."""


class Tracking(Checked):
    """Where metrics go, besides `metrics.jsonl`."""

    tensorboard: Flag = False
    """Whether to write TensorBoard files into the output."""
    mlflow: Text | None = None
    """Address of an MLflow server."""
    experiment: Text | None = None
    """Experiment there. Default: the name of the job."""


class Spec(Checked):
    """What to run, on what, and how it is kept alive. Give `module` or `script`."""

    instead: ClassVar = {
        "pip": "environment: {requirements: requirements.txt}, with the packages in that file",
        "packages": "environment: {requirements: requirements.txt}, with the packages in that file",
        "dependencies": "environment: {requirements: requirements.txt}, with the packages in that file",
        "python": "environment: {conda: environment.yml}, with the version of Python in that file",
        "command": "script (a file in code) or module, and args",
    }

    image: Text | None = None
    """Image of the pods. `outlast run` has no use for it."""
    module: Module | None = None
    """Python module to run, as with `python -m`."""
    script: Script | None = None
    """Python file to run, relative to `code`. A torchrun script runs unchanged."""
    args: tuple[str, ...] = ()
    """Arguments of the module or script. `$(NAME)` becomes the value of the environment variable, as in a pod."""
    code: Code | None = None
    """The code; every worker gets it. A directory, an archive (`.tar.gz`, `.tgz`, `.tar`, `.zip`), or the URL of a store: of an
    archive, or of a prefix with everything below it. `#sha256=<64 digits>` behind an archive checks it before it is unpacked.
    Default: with `script` the directory of the job file, with `module` none."""
    data: tuple[Data, ...] = ()
    """Datasets. `OUTLAST_DATA` is where the only one is; of several, the directory that holds them all."""
    models: tuple[Weights, ...] = ()
    """Weights to start from, below `OUTLAST_MODELS`. Hugging Face's libraries are told to stay offline (`HF_HUB_OFFLINE=1`,
    `TRANSFORMERS_OFFLINE=1`) unless `env` says otherwise."""
    output: Location | None = None
    """Directory or URL of a store; the job writes to `<output>/<name>/`. Default: `.outlast/runs` in the current directory."""
    workers: Workers = Workers()
    """How many workers."""
    processes_per_worker: Annotated[int | Literal["auto"], BeforeValidator(_auto_or_count)] = "auto"
    """Training processes of a worker. `auto`: one per GPU, else one."""
    resources: Resources = Resources()
    """What each worker is given."""
    rendezvous: Rendezvous = Rendezvous()
    """How workers find each other. `outlast run` has no use for it: the launcher decides."""
    checkpoint: Checkpoint = Checkpoint()
    """How often to save, and how much to keep."""
    sync: Sync = Sync()
    """How often outputs are pushed to the store."""
    restarts: Restarts = Restarts()
    """How many failures are too many."""
    interruption: Interruption = Interruption()
    """How long a worker may take to leave."""
    hang: Hang = Hang()
    """What counts as a hang."""
    scheduling: Scheduling = Scheduling()
    """Where and when pods may run."""
    environment: Environment = Environment()
    """Packages to install."""
    env: Annotated[dict[str, str], AfterValidator(_free_names)] = Field({})
    """Environment variables for training: `NCCL_DEBUG: INFO`. `$(NAME)` becomes the value of another variable, of `env`
    or of the worker; `$$(NAME)` is `$(NAME)` itself. Those that Outlast and torchrun set (`OUTLAST_*`, `PET_*`, `RANK` and
    so on) may not be given."""
    suspend: Flag = False
    """Whether to save, stop and hold the job until this is false again."""
    active_deadline_seconds: Seconds | None = None
    """The job fails when it has run for longer. Default: no limit."""
    startup_deadline_seconds: Seconds | None = None
    """The job fails when it has not begun to train within this time. Default: no limit."""
    ttl_seconds_after_finished: Whole | None = None
    """A finished job is deleted after this time. Default: it is kept. Kubernetes only."""
    clean_pod_policy: Literal["All", "Running", "None"] = "Running"
    """Which pods are deleted when the job ends. Kubernetes only."""
    managed_by: ManagedBy | None = None
    """Who makes the pods. Default: the operator, `outlast.dev/operator`. It leaves jobs of anybody else alone, those of
    `kueue.x-k8s.io/multikueue` for example. Kubernetes only."""
    volumes: tuple[Volume, ...] = ()
    """Volumes for the pods."""
    node_selector: dict[str, str] = Field({})
    """Labels that nodes must have: `node.kubernetes.io/instance-type: p3.2xlarge`; several values with commas between them mean
    any of these. Kubernetes only."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the pods tolerate."""
    secrets: tuple[Secret, ...] = ()
    """Secrets for the workers."""
    tracking: Tracking = Tracking()
    """Where metrics go. Without effect yet: they are in `metrics.jsonl`."""
    template: dict[str, Any] = Field({})
    """Laid over the pods as they would be made: anything that a PodTemplateSpec has. Kubernetes only."""

    @classmethod
    def choices(cls, given: Collection[str]) -> Iterator[tuple[Place, str]]:
        if "script" in given and "module" in given:
            yield ("module",), "script and module are both given; keep one"
        if "script" not in given and "module" not in given:
            yield (), "there is nothing to run; give script (a file in code) or module"

    def processes(self) -> int:
        """How many training processes each worker has: with `auto` one for each accelerator, else one."""
        count = self.processes_per_worker
        return max(1, self.resources.gpu) if count == "auto" else int(count)

    def rules(self) -> Iterator[tuple[Place, str]]:
        own = self.resources.accelerator not in MANY_CORES
        if self.processes_per_worker != "auto" and own and 0 < self.resources.gpu < self.processes_per_worker:
            yield (
                ("processesPerWorker",),
                f"processesPerWorker ({self.processes_per_worker}) is above resources.gpu ({self.resources.gpu}); "
                "each process needs a GPU of its own",
            )
        if self.active_deadline_seconds and (self.startup_deadline_seconds or 0) > self.active_deadline_seconds:
            yield (
                ("startupDeadlineSeconds",),
                f"startupDeadlineSeconds ({self.startup_deadline_seconds}) is above activeDeadlineSeconds "
                f"({self.active_deadline_seconds}); lower it or raise the other",
            )
        mounts: list[tuple[Place, str]] = [(("data", i, "to"), data.to) for i, data in enumerate(self.data)]
        mounts += [(("volumes", i, "to"), volume.to) for i, volume in enumerate(self.volumes)]
        mounts += [(("secrets", i, "to"), secret.to) for i, secret in enumerate(self.secrets) if secret.to]
        mounts += [(("models", i, "name"), f"/models/{model.name}") for i, model in enumerate(self.models)]
        for place, to in mounts:
            if re.fullmatch(OWN, to):
                yield (
                    place,
                    f"{validation.name(place)} ({to}) is a place of Outlast or of the system; choose another, e.g. /mnt/data",
                )
        brought = {data.to for data in self.data if local(data.from_)}
        brought |= {f"/models/{model.name}" for model in self.models if local(model.from_)}
        first: dict[str, Place] = {}
        for place, to in mounts:
            # What is a directory here may be a volume in pods.
            key = f"volume {to}" if place[0] == "volumes" and to in brought else to
            if first.setdefault(key, place) != place:
                yield (
                    place,
                    f"{validation.name(place)} is {to}, as {validation.name(first[key])} is; "
                    "choose another place for one of them",
                )
        for i, data in enumerate(self.data):
            for j, other in enumerate(self.data):
                if other.to.startswith(f"{data.to}/"):
                    yield (
                        ("data", j, "to"),
                        f"data[{j}].to ({other.to}) is inside data[{i}].to ({data.to}); choose places beside each other",
                    )


class Job(Checked):
    """A training job: one document, the same for this machine and for Kubernetes."""

    api_version: Literal["outlast.dev/v1alpha1"]
    """Always `outlast.dev/v1alpha1`."""
    kind: Literal["ElasticJob"]
    """Always `ElasticJob`."""
    metadata: Metadata
    """Its name, and what Kubernetes may want to know of it."""
    spec: Spec
    """What to run, on what, and how it is kept alive."""


# -------------------------------------------------------------------------------------------------------- reading and writing


def load(path: Path | str, *, code: bool = False, data: bool = False) -> Job:
    """The job in a file. Its relative paths are relative to that file, and absolute in the job that is returned.

    With `code` the code and requirements that it names must be there, with `data` the data and models. Raises InvalidJob with
    every mistake, and NotFound or another OutlastError for a job file that is not there or cannot be read.
    """
    path = Path(path)
    read = _document(_text(path), str(path))
    job = anchor(validation.validated(Job, read, source=str(path)), path.parent)
    absent = [*(_absent_code(job.spec) if code else ()), *(_absent_data(job.spec) if data else ())]
    if absent:
        raise InvalidJob([(read.line(place), sentence) for place, sentence in absent], source=str(path))
    return job


def parse(text: str, *, source: str = "job.yaml") -> Job:
    """The job in a text; raises InvalidJob with every mistake in it. Relative paths stay as they are."""
    return validation.validated(Job, _document(text, source), source=source)


def of(fields: dict[str, Any], *, source: str = "job") -> Job:
    """The job in a document as an API server has it; raises InvalidJob with every mistake in it."""
    return validation.validated(Job, document.Document(fields, {}), source=source)


def dump(job: Job) -> str:
    """The job as YAML that `parse` reads as an equal job; what is as by default is left out."""
    document = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return yaml.safe_dump(document, sort_keys=False, width=120)  # not allow_unicode: PyYAML 6.0.3 cannot read its own U+0085


def anchor(job: Job, directory: Path) -> Job:
    """The job with its relative paths taken from `directory` and made absolute, and `code` filled in for a `script`."""

    def absolute(place: str | None) -> str | None:
        path = place and local(place)
        return str((directory / path).resolve()) if path else place

    def file(name: str | None) -> str | None:
        path = name and (directory / Path(name).expanduser()).resolve()
        in_code = path and code and not (local(code) and not archive(code)) and not Path(str(name)).is_absolute()
        return name if in_code and not Path(str(path)).exists() else str(path) if path else None

    spec = job.spec
    code, checksum = pinned(spec.code or ("." if spec.script else ""))
    environment = {name: file(value) for name, value in spec.environment}
    changed = {
        "code": f"{absolute(code)}#sha256={checksum}" if checksum else absolute(code) or None,
        "output": absolute(spec.output),
        "data": tuple(data.model_copy(update={"from_": absolute(data.from_)}) for data in spec.data),
        "models": tuple(model.model_copy(update={"from_": absolute(model.from_)}) for model in spec.models),
        "environment": spec.environment.model_copy(update=environment),
    }
    return job.model_copy(update={"spec": spec.model_copy(update=changed)})


def pinned(code: str) -> tuple[str, str]:
    """The place of code without its checksum, and the checksum; empty for none."""
    place, _, checksum = code.partition("#sha256=")
    return place, checksum.lower()


def archive(place: str) -> bool:
    """Whether a place is called like an archive."""
    return place.lower().endswith(ARCHIVES)


def absent(spec: Spec) -> Iterator[str]:
    """What should be on this machine and is not, or is not what it should be; of a job that `load` has read."""
    for _, sentence in (*_absent_code(spec), *_absent_data(spec)):
        yield sentence


def local(place: str) -> Path | None:
    """The path of a place on this machine (`data/`, `~/data`, `file:///data`); None when it is in a store elsewhere."""
    path = place.removeprefix("file://")
    return None if "://" in path else Path(path).expanduser()


def no_such_file(path: Path, pattern: str, wanted: str) -> NotFound:
    """The error for a missing file; names the file of this pattern that may have been meant."""
    near = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob(pattern)], 1)
    remedy = f"did you mean {path.with_name(near[0])}?" if near else f"give the path of {wanted}"
    return NotFound(f"{path}: there is no such file; {remedy}")


def _text(path: Path) -> str:
    if path.suffix == ".py":
        ways = f"`outlast run {path}` trains with it, `outlast init {path}` writes its job file"
        raise OutlastError(f"{path} is a Python script, not a job file; {ways}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise no_such_file(path, "*.y*ml", "a job file") from error
    except IsADirectoryError as error:
        raise OutlastError(f"{path} is a directory; give the path of a job file, e.g. {path / 'job.yaml'}") from error
    except UnicodeDecodeError as error:
        raise InvalidJob([(None, "this is not text in UTF-8; save it as that")], source=str(path)) from error
    except OSError as error:
        raise OutlastError(f"{path} cannot be read: {error.strerror}") from error


def _document(text: str, source: str) -> document.Document:
    return document.read(text, source=source, verbatim=_verbatim)


def _verbatim(place: Place) -> bool:
    """Arguments, environment variables and labels are what is written: `3e-3` and `yes` are no numbers and truths there."""
    return place[:-1] in (
        ("spec", "args"),
        ("spec", "env"),
        ("spec", "nodeSelector"),
        ("metadata", "labels"),
        ("metadata", "annotations"),
    )


def _absent_code(spec: Spec) -> Iterator[tuple[Place, str]]:
    """Code and requirements that should be on this machine and are not."""
    place, checksum = pinned(spec.code or "")
    code = local(place) if place else None
    if code and not code.exists():
        yield ("spec", "code"), f"code ({code}) does not exist; correct the path"
    elif code and code.is_dir() and checksum:
        yield ("spec", "code"), f"code ({code}) is a directory, and only archives have a checksum; remove #sha256=..."
    elif code and code.is_dir() and spec.script and not (code / spec.script).is_file():
        yield ("spec", "script"), f"script ({spec.script}) is not in {code}; correct it, or say with code: where it is"
    elif code and not code.is_dir() and not archive(place):
        kinds = ", ".join(ARCHIVES)
        yield ("spec", "code"), f"code ({code}) is neither a directory nor an archive ({kinds}); give one of them"
    for field, file in spec.environment:
        if file and Path(file).is_absolute() and not Path(file).is_file():  # others are in the code
            yield ("spec", "environment", field), f"environment.{field} ({file}) does not exist; correct the path"


def _absent_data(spec: Spec) -> Iterator[tuple[Place, str]]:
    """Data and models that should be on this machine and are not."""
    sources = [(("data", i, "from"), data.from_) for i, data in enumerate(spec.data)]
    sources += [(("models", i, "from"), model.from_) for i, model in enumerate(spec.models)]
    for place, source in sources:
        path = local(source)
        if path and not path.exists():
            yield ("spec", *place), f"{validation.name(place)} ({path}) does not exist; get the data, or correct the path"


# ---------------------------------------------------------------------------------------------------------------- description


def schema() -> dict[str, Any]:
    """The JSON schema of job files, for editors."""
    described = Job.model_json_schema(schema_generator=_Schema)
    for model in (described, *described["$defs"].values()):
        for field in model["properties"].values():
            field.pop("title", None)  # the name again, with capitals
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


class _Schema(GenerateJsonSchema):
    """Writes defaults as they would stand in a file."""

    def encode_default(self, dft: Any) -> Any:
        match dft:
            case timedelta():
                return units.duration_text(dft)
            case units.Every():
                return str(dft) if dft.steps else units.duration_text(dft.duration or timedelta())
            case BaseModel():
                return {}
        return super().encode_default(dft)
