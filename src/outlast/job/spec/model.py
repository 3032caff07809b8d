"""The model of a job file: its fields, with their defaults and documentation, and the rules between fields. The docstring of a
field is its public documentation, shown in the reference, in editors and by `kubectl explain`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from outlast.base import units
from outlast.job import accelerators, contract, differing_ranks
from outlast.job.spec import field_types, validation
from outlast.job.spec.locations import local
from outlast.job.spec.validation import Checked
from outlast.job.spec.yaml_document import Place

OWN = "/(etc|opt|run|var|usr|bin|sbin|lib|lib64)|/(proc|sys|dev|opt/outlast|etc/outlast|etc/outlast-code|run/outlast)(/.*)?"
"""Pattern of the directories in a pod that must not be mount points, because programs need their files. It is valid RE2."""

MLFLOW = "none|databricks|[A-Za-z][A-Za-z0-9+.-]*:.+|/.*"
"""Pattern of the values of `tracking.mlflow`: a URI, the name of a Databricks profile, or an absolute path. It is valid RE2."""

MOST_REPLICAS = 3


class Metadata(Checked):
    """The job's name, namespace, labels and annotations."""

    name: Annotated[str, field_types.label(contract.LONGEST_NAME)]
    """Name of the job: lower-case letters, digits and dashes, beginning with a letter, at most 51 characters."""
    namespace: Annotated[str, field_types.label(63)] | None = None
    """Namespace on Kubernetes. Default: that of the current context."""
    labels: dict[str, str] = Field({})
    """Labels for the job and for every object created for it on Kubernetes."""
    annotations: dict[str, str] = Field({})
    """Annotations of the job."""


class Data(Checked):
    """A dataset that every worker can read."""

    from_: field_types.Source
    """Directory on this machine, URL of a store, or URL of a file on the web with its checksum
    (`https://host/set.tar.gz#sha256=...`). The URL of a store names one object, or a prefix (`s3://bucket/prefix`) and everything
    below it. A file from the web is unpacked if it is an archive. The data is read-only. It is downloaded once per machine, for
    all workers and jobs, and again only when it has changed."""
    to: field_types.Mount = "/data"
    """Mount point in a pod. On this machine, `OUTLAST_DATA` holds the path."""


class Weights(Checked):
    """Weights that every worker can read."""

    from_: field_types.Source
    """Directory on this machine, or URL of a store or file, as for data."""
    name: field_types.Directory
    """Name of the directory with the weights. Its path is `$OUTLAST_MODELS/<name>`, which in a pod is `/models/<name>`."""


def _sizes(given: dict[str, Any]) -> list[int]:
    """Return the given numbers of workers. Before pydantic 2.12, this also runs if a value is invalid; that value is then missing
    from `given`."""
    return list(given.get("sizes") or [given.get("replicas", 1) or 1])


class Workers(Checked):
    """How many workers train together. `outlast scale` changes `replicas` while the job runs."""

    replicas: Annotated[int, Field(strict=True, ge=0, le=contract.MOST_WORKERS)] = 1
    """Number of workers to run. On Kubernetes, 0 suspends the job until the number is raised."""
    step: field_types.Count = 1
    """Allowed numbers of workers are `min`, `min` + `step`, and so on up to `max`."""
    sizes: Annotated[tuple[field_types.Count, ...], Field(min_length=1)] | None = None
    """List of the allowed numbers of workers, instead of `step`: `[1, 2, 4]`."""
    min: int = Field(strict=True, ge=1, le=contract.MOST_WORKERS, default_factory=lambda given: min(_sizes(given)))
    """Smallest number of workers to train with. Default: the smallest of `sizes`, else `replicas`."""
    max: int = Field(
        strict=True, ge=1, le=contract.MOST_WORKERS, default_factory=lambda given: max(*_sizes(given), given.get("min", 1))
    )
    """Largest number of workers to train with. Default: the largest of `sizes`, else `replicas`."""

    def allowed(self) -> tuple[int, ...]:
        """Return the allowed numbers of workers in a world, in ascending order."""
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
    """Resources of each worker. On this machine all workers share CPU and memory."""

    cpu: field_types.Cores | None = None
    """CPU cores: `4`, `500m`. With `kubectl apply`, write fractions as text, since API servers reject them as numbers."""
    cpu_limit: field_types.Cores | None = None
    """CPU limit, such as `8`, where a namespace requires one. Kubernetes only. There is none by default, so data loaders can use
    idle cores."""
    memory: field_types.Memory | None = None
    """Memory: `16Gi`."""
    gpu: field_types.Whole = 0
    """Number of GPUs. Each worker sees only its own GPUs. Without GPUs on this machine, `outlast run` trains on the CPU."""
    accelerator: field_types.Accelerator = Field(
        default="nvidia", description=f"Kind of GPU: {accelerators.described()}, or the full name of a Kubernetes resource."
    )
    efa: field_types.Whole = 0
    """Number of Elastic Fabric Adapters (AWS), with their huge pages and `FI_PROVIDER=efa`. Kubernetes only."""
    shared_memory: field_types.Memory | None = None
    """Size of `/dev/shm`, which data loaders and NCCL use: `4Gi`. It counts toward `memory`."""


class Rendezvous(Checked):
    """How the workers find each other and agree on a world."""

    backend: contract.Backend = "auto"
    """The coordinator of the rendezvous. `auto`: the launcher on this machine; in a cluster, the operator, or worker 0 if there
    is no operator. `etcd`: a worker elected through etcd v3, if there is no operator. `c10d`: worker 0."""
    endpoint: field_types.Endpoint | None = None
    """Address of etcd: `etcd:2379`, `https://etcd:2379/prefix`, or several addresses separated by commas. Credentials come from
    the variables `OUTLAST_ETCD_USER`, `_PASSWORD`, `_CACERT`, `_CERT` and `_KEY`, set in `env` or by `secrets`. With backend
    `c10d`, the address of worker 0: `host:29400`."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if self.backend == "etcd" and not self.endpoint:
            yield ("backend",), "rendezvous.backend is etcd, which needs rendezvous.endpoint, e.g. etcd:2379"
        if self.backend == "auto" and self.endpoint:
            yield (
                ("endpoint",),
                f"rendezvous.endpoint ({self.endpoint}) has no effect with backend auto; set backend: etcd or c10d",
            )


class Checkpoint(Checked):
    """When to save checkpoints, and the memory for snapshots, from which training continues after a failure. For scripts that use
    `outlast.training`."""

    every: field_types.Every = units.Every(duration=timedelta(minutes=5))
    """How often to save: a duration (`5m`) or a number of steps (`200 steps`)."""
    keep: Annotated[int, Field(strict=True, ge=2)] = 3
    """How many of the newest checkpoints to keep, at least 2."""
    best: field_types.Whole = 0
    """How many of the best checkpoints to keep, besides the newest."""
    by: Annotated[str, field_types.Pattern(r"\S.*\S|\S?", "must be the name of a value that the script logs", 200)] = ""
    """The metric by which checkpoints are compared: a value that the script logs, such as `val_loss`. The last value logged
    before the save counts, unless the script passes one to `run.save(step, metric=...)`."""
    mode: Literal["min", "max"] = "min"
    """Which value is best: the lowest or the highest."""
    memory: field_types.SnapshotMemory = "auto"
    """A worker's memory for snapshots of the training state: `auto`, `off` or a quantity such as `8Gi`, which is added to the
    memory of the worker's pod. `auto` uses up to a quarter of the memory that a worker may use, and leaves a tenth free. With
    `kubectl apply`, quote `"off"`."""
    replicas: Annotated[int, Field(strict=True, ge=0, le=MOST_REPLICAS)] = 1
    """Number of other workers that hold a replica of state that only one rank has, such as shards of FSDP, from 0 to 3. That many
    workers may be lost at once without reading a checkpoint. State that every rank has, as with DDP, needs no memory for
    replicas."""
    go_back: field_types.Flag = False
    """If true, and under DDP one rank's weights or optimizer state differ from most other ranks' state, training goes back to the
    last state in which all ranks were equal, and a new worker replaces that rank's worker. Checkpoints saved since then are
    renamed and not used. Needs at least three workers. By default, the rank is only reported, and training continues."""

    @property
    def reserved(self) -> int:
        """Number of bytes added to the memory of a worker's pod."""
        return self.memory if isinstance(self.memory, int) else 0

    def variables(self) -> dict[str, str]:
        """Return the fields as environment variables for workers. `checkpoints.Retention.parse` reads the retention."""
        best = f"{self.best} {self.mode} {self.by}".strip()
        return {
            contract.Env.CHECKPOINT_EVERY: str(self.every),
            contract.Env.CHECKPOINT_KEEP: str(self.keep),
            **({contract.Env.CHECKPOINT_BEST: best} if best != "0 min" else {}),
            contract.Env.MEMORY: str(self.memory),
            contract.Env.REPLICAS: str(self.replicas),
            **({contract.Env.GO_BACK: "1"} if self.go_back else {}),
        }

    def rules(self) -> Iterator[tuple[Place, str]]:
        if self.go_back and self.memory == "off":
            yield ("goBack",), "checkpoint.goBack compares snapshots, and checkpoint.memory is off; remove one of them"


class Sync(Checked):
    """Uploading outputs to the store."""

    every: field_types.Duration = timedelta(minutes=10)
    """Interval between uploads while training runs. The rest is uploaded when the job ends, however it ends."""


class Restarts(Checked):
    """How many failures a job survives. Interruptions, in which a worker is asked to leave (scale-down, drain, spot), never
    count."""

    limit: field_types.Whole = 10
    """The job fails after more failures than this within `window`. Progress refunds them: a failure stops counting once a newer
    step has been saved."""
    window: field_types.Duration = timedelta(hours=1)
    """Failures older than this do not count."""


class Interruption(Checked):
    """How much time a worker has when it is asked to leave."""

    grace: field_types.Duration = timedelta(seconds=75)
    """Time to save and exit before training is killed. Pods get 30 s more for the last upload, so the default fits into the 120 s
    between an AWS spot notice and the end of the machine. Azure and Google give 30 s: use 10s or less there."""


class Scheduling(Checked):
    """Where and when pods may run. Kubernetes only."""

    queue: Annotated[str, field_types.object_name(63)] = ""
    """Queue of Kueue or Volcano. In a cluster with Kueue, it is a Kueue queue unless `gang` is `volcano`."""
    gang: Literal["auto", "none", "coscheduling", "volcano"] = "auto"
    """Gang scheduler, which starts all workers or none. `auto`: Volcano or the coscheduling plugin, if the operator finds one of
    them when it first sees the job, and if `workers.min` is above 1 and no Kueue queue admits the job; otherwise none."""
    priority_class_name: Annotated[str, field_types.object_name(253)] = ""
    """PriorityClass of the pods."""
    spot: Literal["prefer", "require", "avoid", "any"] = "prefer"
    """Use of spot machines: `prefer` or `require` them, `avoid` them, or run on `any` machine."""
    worker0: Literal["any", "on-demand"] = "any"
    """With `on-demand`, worker 0 does not run on a spot machine, whatever `spot` says about the other workers. Not for Indexed
    Jobs and StatefulSets, whose pods are all alike."""


class Environment(Checked):
    """Packages to install before training starts, once per machine for all workers and jobs. Set one of the two fields."""

    requirements: field_types.Text | None = None
    """Requirements file for pip. Its packages are added to the Python that Outlast runs in. Packages that this Python already
    has, above all PyTorch, are not installed again. With `code` from an archive or a store, the file may be in the code."""
    conda: field_types.Text | None = None
    """Environment file for micromamba, mamba or conda, one of which must be installed. The environment must include Python 3.11
    or newer and PyTorch."""

    @classmethod
    def choices(cls, given: Collection[str]) -> Iterator[tuple[Place, str]]:
        if "requirements" in given and "conda" in given:
            yield ("conda",), "environment.requirements and environment.conda are both given; keep one"


class Compile(Checked):
    """Programs that compilers make from the model: `torch.compile`, Triton, and compilers for Trainium."""

    cache: field_types.Flag = False
    """If true, keep compiled programs in `<output>/.compiled/` for all jobs of that output. Each worker fetches them before
    training and uploads new ones with its output. The programs are run as they are: share an output only with people whose code
    you would run."""
    warm_up: tuple[str, ...] = ()
    """Command that fills the cache, such as two steps of the training itself. A worker runs it before training, once in a run, in
    the directory of the code with the job's environment and data. Anything that it writes to `OUTLAST_OUTPUT` is thrown away.
    Needs `cache`."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if self.warm_up and not self.cache:
            yield ("warmUp",), "compile.warmUp fills a cache that is not kept; set compile.cache: true, or remove it"
        if self.warm_up and not self.warm_up[0].strip():
            yield ("warmUp", 0), "compile.warmUp begins with an empty word; begin with a program, such as python"


class Hang(Checked):
    """When a process counts as hung. Its stacks are written to `logs/`, and training restarts."""

    limit: field_types.Duration = timedelta(minutes=10)
    """A process counts as hung when it does nothing for this long: no step, no movement of its main thread, no CPU time and, for
    a plain script, no output. Before the first step of a session, the limit is at least 10 minutes."""


class Volume(Checked):
    """A volume for the pods. Kubernetes only."""

    claim: Annotated[field_types.Text, field_types.object_name(253)]
    """Name of the PersistentVolumeClaim. An existing claim is used unchanged."""
    to: field_types.Mount
    """Mount point in a pod. Where `data` names a directory of this machine (`{from: ./cifar, to: /data}`), pods use a volume
    mounted at the same place instead."""
    size: field_types.Memory | None = None
    """Size of the claim to create if it does not exist: `100Gi`. Default: the claim must exist."""
    storage_class: Annotated[str, field_types.object_name(253)] = ""
    """With `size`: the StorageClass. Default: the cluster's default class."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"] | None = None
    """With `size`: which pods may mount the claim at the same time: the pods of one node, all pods, or one pod. Shared file
    systems support `ReadWriteMany`, but disks do not. Default: `ReadWriteOnce` for a job of one pod (topology job), otherwise
    `ReadWriteMany`."""
    sub_path: str = ""
    """Directory in the volume to mount. Default: the whole volume."""
    read_only: field_types.Flag = False
    """If true, pods mount the volume read-only."""


class Toleration(Checked):
    """A node taint that the pods tolerate, as in a pod's specification. Kubernetes only."""

    key: Annotated[str, field_types.TAINT_KEY] = ""
    """Key of the taint. Default: any."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """`Equal` compares `value`, and `Exists` ignores it."""
    value: Annotated[str, field_types.Pattern(field_types.LABEL_VALUE, "must be at most 63 letters, digits, -, _ and .", 63)] = ""
    """Value of the taint."""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    """Effect of the taint. Default: any."""
    toleration_seconds: field_types.Whole | None = None
    """With `NoExecute`: how long the pods stay on the node. Default: forever."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if self.operator == "Exists" and self.value:
            yield ("value",), f"the toleration's value ({self.value}) has no effect with operator Exists; remove one of them"
        if self.operator == "Equal" and not self.key:
            yield ("key",), "the toleration has no key, which means any; set operator: Exists, or give the key"
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            yield ("tolerationSeconds",), "tolerationSeconds needs effect: NoExecute; add that, or remove tolerationSeconds"


class Secret(Checked):
    """A Secret for the workers. Kubernetes only."""

    name: Annotated[field_types.Text, field_types.object_name(253)]
    """Name of the Secret."""
    to: field_types.Mount | None = None
    """Directory in which the Secret's keys appear as files. Default: the keys become environment variables."""


class Tracking(Checked):
    """Where scripts that use `run.log` send metrics, parameters and checkpoint locations, besides the output. Weights and Biases
    needs no field: it is on when `WANDB_API_KEY` or `WANDB_MODE` is set, in `env` or by `secrets`."""

    tensorboard: field_types.Flag = False
    """If true, write TensorBoard's event files into `tensorboard/` in the output. `outlast tensorboard` does not need them,
    because it makes event files from any job's metrics."""
    mlflow: (
        Annotated[str, field_types.Pattern(MLFLOW, "must be a URI, such as http://mlflow:5000, or an absolute path")] | None
    ) = None
    """URI of an MLflow server, such as `http://mlflow:5000`, or an absolute path that all workers can reach. Default: the
    variable `MLFLOW_TRACKING_URI`, if it is set. `none` disables MLflow even then. Credentials come from MLflow's own
    variables."""
    experiment: field_types.Text | None = None
    """Name of the experiment in MLflow, and of the project in Weights & Biases. Default: the variables `MLFLOW_EXPERIMENT_NAME`
    and `WANDB_PROJECT`, else the name of the job."""

    def rules(self) -> Iterator[tuple[Place, str]]:
        if self.mlflow and re.search("//[^/@]*:[^/@]+@", self.mlflow):
            yield (
                ("mlflow",),
                "tracking.mlflow holds a password, and job files are copied into the output; leave it out here and set "
                "MLFLOW_TRACKING_PASSWORD, or the whole MLFLOW_TRACKING_URI, by secrets or in the shell",
            )

    def variables(self) -> dict[str, str]:
        """Return the fields as environment variables for workers (see `tracking.tracker_interface.settings`)."""
        return {
            **({contract.Env.TENSORBOARD: "1"} if self.tensorboard else {}),
            **({contract.Env.MLFLOW: self.mlflow} if self.mlflow else {}),
            **({contract.Env.EXPERIMENT: self.experiment} if self.experiment else {}),
        }


class Spec(Checked):
    """The code to run, its resources, and how to keep the job alive. Give `module` or `script`."""

    instead: ClassVar = {
        "pip": "environment: {requirements: requirements.txt}, with the packages in that file",
        "packages": "environment: {requirements: requirements.txt}, with the packages in that file",
        "dependencies": "environment: {requirements: requirements.txt}, with the packages in that file",
        "python": "environment: {conda: environment.yml}, with the version of Python in that file",
        "command": "script (a file in code) or module, and args",
    }

    image: field_types.Text | None = None
    """Container image of the pods, with Python 3.11 and PyTorch 2.11 or newer. `outlast run` ignores it."""
    inject: bool | None = None
    """Whether each pod gets Outlast from an init container. A pod whose image has Outlast uses the image's version, but starts a
    second or two later than with `false`. Default: true unless the image's name contains `outlast`."""
    module: field_types.Module | None = None
    """Python module to run, as with `python -m`."""
    script: field_types.Script | None = None
    """Python file to run, relative to `code`. A torchrun script runs unchanged."""
    args: tuple[str, ...] = ()
    """Arguments of the module or script. `$(NAME)` is replaced by the value of the environment variable `NAME`, as in a pod."""
    code: field_types.Code | None = None
    """The code that every worker gets: a directory, an archive (`.tar.gz`, `.tgz`, `.tar`, `.zip`), or the URL of a store, which
    names an archive, or a prefix and everything below it. A checksum after the name of an archive (`#sha256=<64 digits>`) is
    verified before unpacking. Default: with `script`, the directory of the job file; with `module`, none."""
    data: tuple[Data, ...] = ()
    """Datasets. `OUTLAST_DATA` is the path of the dataset or, if there are several, of the directory that contains them all."""
    models: tuple[Weights, ...] = ()
    """Weights to start from, below `OUTLAST_MODELS`. If there are any, Hugging Face's libraries run offline (`HF_HUB_OFFLINE=1`,
    `TRANSFORMERS_OFFLINE=1`) unless `env` overrides that."""
    output: field_types.Location | None = None
    """Directory or URL of a store; the job writes to `<output>/<name>/`. Default: `.outlast/runs` in the current directory."""
    workers: Workers = Workers()
    """How many workers."""
    processes_per_worker: Annotated[int | Literal["auto"], BeforeValidator(field_types.auto_or_count)] = "auto"
    """Training processes of a worker. `auto`: one per GPU, else one."""
    resources: Resources = Resources()
    """Resources of each worker."""
    rendezvous: Rendezvous = Rendezvous()
    """How workers find each other. `outlast run` ignores it, because its launcher coordinates."""
    checkpoint: Checkpoint = Checkpoint()
    """How often to save, and how many checkpoints to keep."""
    sync: Sync = Sync()
    """How often outputs are uploaded to the store."""
    restarts: Restarts = Restarts()
    """How many failures the job survives."""
    interruption: Interruption = Interruption()
    """How long a worker may take to save and exit."""
    hang: Hang = Hang()
    """When a process counts as hung."""
    scheduling: Scheduling = Scheduling()
    """Where and when pods may run."""
    environment: Environment = Environment()
    """Packages to install."""
    compile: Compile = Compile()
    """Cache of compiled programs."""
    env: Annotated[dict[str, str], AfterValidator(field_types.unreserved)] = Field({})
    """Environment variables for training: `NCCL_DEBUG: INFO`. `$(NAME)` is replaced by the value of another variable, from `env`
    or the worker's environment; `$$(NAME)` stands for `$(NAME)` itself. Variables that Outlast or torchrun set (`OUTLAST_*`,
    `PET_*`, `RANK` and so on) are not allowed."""
    suspend: field_types.Flag = False
    """If true, the job saves, stops, and waits until this is false again."""
    active_deadline_seconds: field_types.Seconds | None = None
    """The job fails when it has run for longer than this. Default: no limit."""
    startup_deadline_seconds: field_types.Seconds | None = None
    """The job fails when training has not started within this time. Default: no limit."""
    ttl_seconds_after_finished: field_types.Whole | None = None
    """A finished job is deleted after this time. Default: never. Kubernetes only."""
    clean_pod_policy: Literal["All", "Running", "None"] = "Running"
    """Which pods are deleted when the job ends. Pods that upload its results have half an hour for that. Kubernetes only."""
    managed_by: field_types.ManagedBy | None = None
    """The controller that creates the pods. Default: the operator, `outlast.dev/operator`, which ignores jobs managed by another
    controller, such as `kueue.x-k8s.io/multikueue`. Kubernetes only."""
    volumes: tuple[Volume, ...] = ()
    """Volumes for the pods."""
    node_selector: dict[str, str] = Field({})
    """Labels that nodes must have: `node.kubernetes.io/instance-type: p3.2xlarge`. Several values separated by commas mean any of
    them. Kubernetes only."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints that the pods tolerate."""
    secrets: tuple[Secret, ...] = ()
    """Secrets for the workers."""
    tracking: Tracking = Tracking()
    """Where metrics go, besides `metrics.jsonl`."""
    template: dict[str, Any] = Field({})
    """Fields of a PodTemplateSpec, which are merged over those of the generated pods. Kubernetes only."""

    @classmethod
    def choices(cls, given: Collection[str]) -> Iterator[tuple[Place, str]]:
        if "script" in given and "module" in given:
            yield ("module",), "script and module are both given; keep one"
        if "script" not in given and "module" not in given:
            yield (), "there is nothing to run; give script (a file in code) or module"

    def injected(self) -> bool:
        """Return whether pods get Outlast from an init container."""
        return "outlast" not in (self.image or "") if self.inject is None else self.inject

    def processes(self) -> int:
        """Return the number of training processes per worker. `auto` means one per accelerator, but at least one."""
        count = self.processes_per_worker
        return max(1, self.resources.gpu) if count == "auto" else int(count)

    def rules(self) -> Iterator[tuple[Place, str]]:
        own = self.resources.accelerator not in accelerators.SHARED
        if self.processes_per_worker != "auto" and own and 0 < self.resources.gpu < self.processes_per_worker:
            yield (
                ("processesPerWorker",),
                f"processesPerWorker ({self.processes_per_worker}) is above resources.gpu ({self.resources.gpu}); "
                "each process needs a GPU of its own",
            )
        if self.checkpoint.go_back and self.workers.max < differing_ranks.FEWEST:
            yield (
                ("checkpoint", "goBack"),
                f"checkpoint.goBack needs {differing_ranks.FEWEST} workers to tell whose bits are wrong, and workers.max is "
                f"{self.workers.max}; raise it, or remove goBack",
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
                    f"{validation.name(place)} ({to}) is reserved for Outlast or the system; choose another, e.g. /mnt/data",
                )
        brought = {data.to for data in self.data if local(data.from_)}
        brought |= {f"/models/{model.name}" for model in self.models if local(model.from_)}
        first: dict[str, Place] = {}
        for place, to in mounts:
            # A directory on this machine may be a volume in pods.
            key = f"volume {to}" if place[0] == "volumes" and to in brought else to
            if first.setdefault(key, place) != place:
                yield (
                    place,
                    f"{validation.name(place)} is {to}, as {validation.name(first[key])} is; "
                    "choose another directory for one of them",
                )
        for i, data in enumerate(self.data):
            for j, other in enumerate(self.data):
                if other.to.startswith(f"{data.to}/"):
                    yield (
                        ("data", j, "to"),
                        f"data[{j}].to ({other.to}) is inside data[{i}].to ({data.to}); choose separate directories",
                    )


class Job(Checked):
    """A training job: one document, the same for this machine and for Kubernetes."""

    api_version: Literal["outlast.dev/v1alpha1"]
    """Always `outlast.dev/v1alpha1`."""
    kind: Literal["ElasticJob"]
    """Always `ElasticJob`."""
    metadata: Metadata
    """Name, namespace, labels and annotations."""
    spec: Spec
    """The code to run, its resources, and how to keep the job alive."""

    def in_namespace(self, namespace: str | None) -> Job:
        """Return the job with another namespace, or the same job if `namespace` is empty."""
        changed = {"metadata": self.metadata.model_copy(update={"namespace": namespace})}
        return self.model_copy(update=changed) if namespace else self
