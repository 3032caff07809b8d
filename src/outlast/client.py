"""Outlast from Python: a `Job`, and a `Run` of that job on this machine or in a cluster.

    import outlast

    job = outlast.Job(script="train.py", args=["--steps=2000"], workers=(2, 1, 4))
    run = job.run()                      # on this machine, in the background
    run = job.submit(namespace="ml")     # in a cluster, with the same methods
    run.wait(step=500)
    run.scale(4)
    for line in run.logs(follow=True):
        print(line)
    print(run.wait().state, run.goodput)

Runs outlive this process: `outlast.find(name)` finds a run again. Errors have the same messages as on the command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shlex
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.base import units
from outlast.base.errors import NotFound, OutlastError
from outlast.job import contract

if TYPE_CHECKING:
    import types

    from outlast.job.backend import Backend
    from outlast.job.logs import LogLine
    from outlast.job.report import page
    from outlast.job.report.goodput import Goodput
    from outlast.job.report.incidents import Incident
    from outlast.job.spec import Job as JobFile
    from outlast.job.status import JobStatus
    from outlast.kubernetes.api import Cluster
    from outlast.kubernetes.diagnosis import Finding
    from outlast.kubernetes.jobs.backend import KubernetesBackend
    from outlast.local.backend import LocalBackend
    from outlast.storage.checkpoints.both_places import Saved

__all__ = ["Failed", "Job", "Report", "Run", "find", "runs"]

_ENSURE_INTERVAL_S = 5.0
"""Seconds between checks that a job on this machine still has a launcher."""
_CANCEL_TIMEOUT_S = 180.0
"""Seconds to wait for a cancelled run to end; must be longer than a worker's grace period."""
_BEFORE = (None, "Pending", "Queued", "Running")
"""States that every successful run passes through."""
_TAKEN_UP_S = 30.0
"""An operator may need this many seconds to act on a request; until then, the status is outdated."""


class Late(OutlastError, TimeoutError):
    """Raised if `wait` times out."""

    exit_code = 124


class Failed(OutlastError):
    """Raised if a run ends unsuccessfully. The message contains the first error, and `status` is the final status."""

    exit_code = 1

    def __init__(self, status: JobStatus) -> None:
        failure = status.failure
        because = status.reason
        if failure is not None and status.state == "Failed":
            because = f"{failure.reason}\n{failure.traceback}".rstrip()
        super().__init__(f"{status.name} has ended: {status.state}: {because}")
        self.status = status


class Job:
    """A job file as an object. Keyword arguments are the fields of the job file's `spec`, in snake_case.

        Job(script="train.py", args=["--lr=0.1"], workers=2)
        Job(module="package.train", workers=(2, 1, 4), checkpoint={"every": "1m"})
        Job(train, 0.1, steps=100, workers=2)      # a function, its arguments, and fields

    `workers` is a number, (replicas, min, max), or a mapping. `name` defaults to the name of the script, module or function.
    Relative paths are resolved against the working directory, which is also the default `code` of a script below it. Keyword
    arguments that are not fields are passed to the function. Raises InvalidJob, which lists every mistake, and OutlastError if a
    function cannot be sent to workers.
    """

    def __init__(self, function: Callable[..., object] | None = None, *args: object, **fields: Any) -> None:
        from outlast.job import spec

        here, name = Path.cwd(), fields.pop("name", "")
        metadata: dict[str, Any] = {key: fields.pop(key) for key in ("namespace", "labels") if key in fields}
        if function is not None:
            name = name or contract.job_name(getattr(function, "__name__", "job"))
            fields = _function(function, args, fields)
        elif args:
            raise OutlastError(f"Job: {args[0]!r} is not a function; a script is Job(script=...), its arguments args=[...]")
        elif "script" in fields and "code" not in fields:
            path = Path(fields["script"]).expanduser().absolute()
            if not path.is_file():
                raise spec.no_such_file(path, "*.py", "a script")
            top = spec.code_of(path)
            fields |= {"script": str(path.relative_to(top)), "code": str(top)}
        program = Path(fields.get("script", "")).stem or str(fields.get("module", "")).rpartition(".")[2]
        metadata["name"] = name or contract.job_name(program)
        if isinstance(sizes := fields.get("workers"), tuple):
            if len(sizes) != 3:
                raise OutlastError(f"Job: workers={sizes}: expected a number, or (replicas, min, max)")
            fields["workers"] = dict(zip(("replicas", "min", "max"), sizes, strict=True))
        elif isinstance(sizes, int):
            fields["workers"] = {"replicas": sizes}
        given = {key: str(value) if isinstance(value, Path) else value for key, value in fields.items()}
        document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": metadata, "spec": given}
        self.file: JobFile = spec.anchor(spec.of(document, source="Job"), here)

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Return the job in a file. Raises NotFound, or InvalidJob, which lists every mistake with its line."""
        from outlast.job import spec

        return cls._of(spec.load(path))

    @classmethod
    def _of(cls, file: JobFile) -> Job:
        job = cls.__new__(cls)
        job.file = file
        return job

    @property
    def name(self) -> str:
        return self.file.metadata.name

    def to_yaml(self) -> str:
        """Return the job as the text of a job file."""
        from outlast.job import spec

        return spec.dump(self.file)

    def run(
        self, *, fresh: bool = False, take_over: bool = False, chaos: str | Path | None = None, say: Callable[[str], None] = print
    ) -> Run:
        """Start training in the background on this machine, or continue the run of this name unless it has succeeded.

        With `fresh`, an unfinished run is cancelled and training starts from the beginning. With `take_over`, this machine takes
        over a run that another machine is training and saving to a store. `chaos` is a file with a fault schedule. `say` receives
        messages. Raises AlreadyRunning.
        """
        from outlast.job import faults

        place, job = _here(), self._with_gpus()
        again = shlex.join(["outlast", "run", str(place.state_dir(self.name).job)])
        schedule = None if chaos is None else Path(chaos)
        if schedule is not None:
            faults.load(schedule)
        if fresh:
            end(place, self.name, say)
        source = Path.cwd() / "job.yaml"
        place.submit(job, source=source, chaos=schedule, fresh=fresh, take_over=take_over, command=again, say=say)
        for notice in place.notices:
            say(notice)
        return Run(self.name, place)

    def _with_gpus(self) -> JobFile:
        """Divide this machine's GPUs among the workers unless the job has `resources`."""
        from outlast.local import worker_processes

        file = self.file
        gpus = 0 if "resources" in file.spec.model_fields_set else worker_processes.gpu_count()
        if not gpus:
            return file
        resources = file.spec.resources.model_copy(update={"gpu": max(1, gpus // max(1, file.spec.workers.replicas))})
        return file.model_copy(update={"spec": file.spec.model_copy(update={"resources": resources})})

    def submit(
        self,
        *,
        namespace: str | None = None,
        context: str | None = None,
        topology: str = "elasticjob",
        fresh: bool = False,
        take_over: bool = False,
        say: Callable[[str], None] = print,
    ) -> Run:
        """Start training in a cluster, with the options of `outlast submit`. Submitting the same job again changes nothing.

        Raises NoCluster if there is no kubeconfig, and AlreadyRunning if the job runs with other fields.
        """
        from outlast.kubernetes.jobs.backend import KubernetesBackend

        cluster = _connected(namespace or self.file.metadata.namespace, context)
        place = _closing(KubernetesBackend(cluster, topology=topology, say=say))
        if not place.cluster.has_namespace():
            raise place.workloads.no_namespace()
        place.submit(self.file, source=Path(f"{self.name}.yaml"), fresh=fresh, take_over=take_over, say=say)
        return Run(self.name, place)

    def __repr__(self) -> str:
        program = self.file.spec.script or self.file.spec.module
        return f"<Job {self.name}: {program}, workers: {self.file.spec.workers.replicas}>"


class Run:
    """A run of a job, on this machine or in a cluster, which outlives this process.

    Used as a context manager, it is cancelled if the block raises an exception.
    """

    def __init__(self, name: str, place: Backend) -> None:
        self.name = name
        self.place = place
        self._begun = time.monotonic()

    @property
    def status(self) -> JobStatus:
        """The current status: `state`, `step`, `workers`, `restarts`, `failure` and more."""
        return self.place.status(self.name)

    def wait(
        self,
        *,
        step: int | None = None,
        until: str | Callable[[JobStatus], bool] | None = None,
        timeout: str | float | None = None,
    ) -> JobStatus:
        """Wait until training reaches a step, a state, a condition or, by default, its end, and return the status.

        `until` is a state (`"Running"`) or a condition (`lambda status: len(status.world) == 1`). `timeout` is a duration (`20m`)
        or a number of seconds; by default, there is no timeout. Raises Failed if the run fails, is cancelled or stops first, and
        TimeoutError after the timeout. Neither exception affects the run.
        """
        from outlast.job.status import State

        if isinstance(until, str) and until not in list(State):
            raise OutlastError(f"wait(until={until!r}): expected one of {', '.join(State)}")
        limit_s = units.duration(timeout).total_seconds() if isinstance(timeout, str) else timeout
        began = ensured = time.monotonic()
        while True:
            status, now = self.status, time.monotonic()
            reached = until(status) if callable(until) else status.state == until
            if reached or (step is not None and status.step >= step):
                return status
            if status.state is State.SUCCEEDED and until in _BEFORE:
                return status
            if status.state.active and now - ensured > _ENSURE_INTERVAL_S:
                ensured = now
                self.place.ensure(self.name)
            if status.state.final or not (status.state.active or now - self._begun < _TAKEN_UP_S):
                raise Failed(status)
            if limit_s is not None and now - began > limit_s:
                raise Late(f"{self.name} is {status.state} at step {status.step} after {limit_s:g} s; it goes on")
            time.sleep(self.place.poll_s)

    def logs(
        self,
        *,
        worker: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        previous: bool = False,
        since: str | float | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Iterator[LogLine]:
        """Return log lines from one worker or all workers, across restarts.

        With `follow`, continues until the job ends, and passes messages about waits to `say`. `previous` selects the attempt
        before the last one. `since` is a line's maximum age (`10m`, or seconds), and works only in a cluster.
        """
        from outlast.job import logs

        since_s = units.duration(since).total_seconds() if isinstance(since, str) else since
        read = None if previous else tail
        lines = self.place.logs(self.name, worker=worker, follow=follow, tail=read, since_s=since_s, say=say)
        return iter(logs.previous_attempt(lines, tail=tail)) if previous else lines

    def scale(self, workers: int) -> None:
        """Change the number of workers. Training saves its state first, so no step is lost."""
        self.place.scale(self.name, workers)

    def suspend(self) -> None:
        """Save the state, and release the workers until `resume`."""
        self.place.steer(self.name, "suspend")

    def resume(self, *, say: Callable[[str], None] = print) -> None:
        """Continue a suspended run or, on this machine, an interrupted, failed or cancelled one. `say` receives messages."""
        self.place.steer(self.name, "resume")
        self._begun = time.monotonic()
        for notice in self.place.notices:
            say(notice)

    def cancel(self) -> None:
        """End the run for good. Its checkpoints stay."""
        self.place.steer(self.name, "cancel")

    def forget(self, *, output: bool = False) -> None:
        """Remove a run that has ended and, with `output`, its output on this machine. Output in a store or a persistent volume
        claim stays."""
        self.place.forget(self.name, output=output)

    def chaos(self, action: str, worker: int | None = None, *, seed: int | None = None) -> str:
        """Inject a fault, such as `kill-process`, and describe it. If `worker` is None, `seed` selects one."""
        return self.place.chaos(self.name, action, worker=worker, rng=random.Random(seed))

    def evaluate(self, *args: str, best: bool = False, step: int | None = None, show: Callable[[LogLine], None] = print) -> int:
        """Run the script or module with `--evaluate` and `args` in one process (a pod in a cluster), and return its exit code.

        If `best` or `step` is given, the program also receives `--checkpoint=`. `show` receives the pod's log lines.
        """
        if best and step is not None:
            raise OutlastError(f"the best checkpoint and that of step {step} are two; name one of them")
        chosen = "best" if best else step
        checkpoint = [] if chosen is None else [f"{contract.EVALUATED}{chosen}"]
        return self.place.evaluate(self.name, [*checkpoint, *args], show=show)

    def why(self) -> Why:
        """Return the reasons that keep the run from training, with remedies, as `outlast why` does."""
        from outlast.kubernetes import diagnosis
        from outlast.kubernetes.diagnosis import gather_evidence, local_job
        from outlast.kubernetes.jobs.backend import KubernetesBackend

        now = time.time()
        if not isinstance(self.place, KubernetesBackend):
            return Why(local_job.causes(self.status, self.place.events(self.name), now), {})
        seen = gather_evidence.job(self.place.cluster, self.name)
        causes = diagnosis.causes(seen, now)
        if not any(each.failed for each in causes):
            with contextlib.suppress(OutlastError):  # no permission to query agents; the other causes remain
                suspicious = list(local_job.suspicious_ranks(self.status))
                causes = suspicious + [each for each in causes if not suspicious or each.name != "training"]
        return Why(causes, dict(seen.forbidden))

    def report(self) -> Report:
        """Return where the run's time went. In a cluster, the output must be in a store."""
        from outlast.job.report import page

        shown = page.of(self.place, self.status)
        return Report(self.name, shown.account(shown.events), shown)

    @property
    def goodput(self) -> float | None:
        """Share of the wall time spent on steps whose results were kept, from 0 to 1; None before the first step."""
        return self.report().account.goodput

    @property
    def lost(self) -> Sequence[Incident]:
        """The failures, each with the training time that it cost (`incident.lost.seconds`)."""
        return self.report().failures

    @property
    def output(self) -> Path | str:
        """Location of the checkpoints, logs and ledger: a directory on this machine, or the URL of a store, for example."""
        return self.place.output(self.name)

    @property
    def checkpoints(self) -> Sequence[Saved]:
        """The committed checkpoints on this machine and in the store, in order of their steps. Raises NotFound if a run in a
        cluster has no store."""
        from outlast.storage.checkpoints import both_places

        return both_places.of(self.place, self.name).list_(_warn)

    def weights(self, step: int | None = None, *, best: bool = False, key: str = "") -> dict[str, Any]:
        """Return the weights in the newest checkpoint, the best one, or the one of `step`: CPU tensors, keyed by name. Requires
        torch.

        `key` is the module's name in the state, and is needed if there are several modules. A checkpoint that is only in a store
        is downloaded. Raises NotFound, and OutlastError if the key is unknown.
        """
        from outlast.storage.checkpoints import both_places
        from outlast.training.state import weights

        places = both_places.of(self.place, self.name)
        with places.undamaged(both_places.chosen(places.list_(_warn), step, best=best), _warn) as found:
            return weights.saved(found.path, key)

    def __repr__(self) -> str:
        from outlast.job.report import panel

        try:
            return f"<Run {panel.text(self.status)}>"
        except OutlastError as error:
            return f"<Run {self.name}: {error}>"

    def _repr_html_(self) -> str:
        from outlast.local import notebook_panel

        return notebook_panel.Panel(self.place, self.name, "loss")._repr_html_()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: types.TracebackType | None) -> None:
        if kind is not None and self.status.state.active:
            self.cancel()


@dataclasses.dataclass(frozen=True)
class Why:
    """The reasons that keep a run from training. As text, they read as in `outlast why`."""

    causes: Sequence[Finding]
    """The causes, with the most important one first. If the run trains, a single finding says so."""
    unseen: Mapping[str, str]
    """Kinds of cluster objects that could not be read, each with the reason."""

    def __str__(self) -> str:
        from outlast.kubernetes import diagnosis

        return diagnosis.text(self.causes, forbidden=self.unseen)


@dataclasses.dataclass(frozen=True)
class Report:
    """An account of where a run's time went. As text, it reads as in `outlast report`."""

    name: str
    account: Goodput
    _shown: page.Run = dataclasses.field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Write the report as a page with plots, like `outlast report -o html`, and return its path. Requires bokeh."""
        from outlast.job.report import page

        path = Path(path)
        path.write_text(page.run(self._shown), encoding="utf-8")
        return path

    @property
    def failures(self) -> Sequence[Incident]:
        from outlast.job.report.incidents import FAILURES

        return [each for each in self.account.incidents if each.kind in FAILURES]

    def as_json(self) -> dict[str, Any]:
        """Return the account as in `outlast report -o json`, with durations in seconds."""
        from outlast.job.report import printed

        return printed.as_json(self.account)

    def __repr__(self) -> str:
        from outlast.job.report import printed

        return printed.plain(self.account, self.name)


def _function(function: Callable[..., object], args: Sequence[object], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job that calls `function`. Keywords that are not fields are the function's arguments."""
    from outlast import function_call
    from outlast.job import spec

    if not callable(function):
        raise OutlastError(f"Job: {function!r} is not a function; a script is Job(script=...)")
    if mistaken := [field for field in ("script", "module", "args") if field in fields]:
        raise OutlastError(f"Job: a function and {mistaken[0]} are two programs; keep one")
    kwargs = {key: value for key, value in fields.items() if key not in spec.Spec.model_fields}
    call = function_call.encoded(function, args, kwargs)
    rest = {key: value for key, value in fields.items() if key not in kwargs}
    return {"code": "."} | rest | {"module": "outlast.function_call", "args": [call]}


def find(name: str, *, namespace: str | None = None, context: str | None = None) -> Run:
    """Return the run of the job `name` on this machine or, if `namespace` or `context` is given, in a cluster. Raises
    NotFound."""
    run = Run(name, _place(namespace, context))
    run.status  # noqa: B018  raises NotFound
    return run


def runs(
    *, namespace: str | None = None, context: str | None = None, all_namespaces: bool = False, selector: str = ""
) -> list[Run]:
    """Return all runs on this machine or in a cluster, newest last. `selector` filters by labels, such as `team=a,tier!=test`."""
    place = _place(namespace, context, everywhere=all_namespaces, selector=selector)
    statuses = place.list()
    places = {each: _place(each, context) for each in {status.namespace for status in statuses}} if all_namespaces else {}
    return [Run(status.name, places.get(status.namespace, place)) for status in statuses]


def end(place: Backend, name: str, say: Callable[[str], None]) -> None:
    """Cancel the run if it is unfinished, and wait until it has ended. Raises OutlastError after three minutes."""
    try:
        if (status := place.status(name)).state.final:
            return
    except NotFound:
        return
    if status.state.active:
        say(f"{name}: its present run ({status.state}) is ended, since the next one is to start from the beginning")
    place.steer(name, "cancel")
    deadline = time.monotonic() + _CANCEL_TIMEOUT_S
    while not place.status(name).state.final:
        if time.monotonic() > deadline:
            raise OutlastError(
                f"{name} has not ended {_CANCEL_TIMEOUT_S:.0f} s after being cancelled; see `outlast status {name}`"
            )
        time.sleep(0.1)


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=3)


def _place(namespace: str | None, context: str | None, *, everywhere: bool = False, selector: str = "") -> Backend:
    if not (namespace or context or everywhere or selector):
        return _here()
    from outlast.kubernetes.jobs.backend import KubernetesBackend

    return _closing(KubernetesBackend(_connected(namespace, context), everywhere=everywhere, selector=selector))


def _connected(namespace: str | None, context: str | None) -> Cluster:
    from outlast.kubernetes import api

    return api.connect(context, namespace)


def _closing(place: KubernetesBackend) -> KubernetesBackend:
    weakref.finalize(place, place.cluster.close)
    return place


def _here() -> LocalBackend:
    from outlast.local import state_dir
    from outlast.local.backend import LocalBackend

    return LocalBackend(state_dir.root())
