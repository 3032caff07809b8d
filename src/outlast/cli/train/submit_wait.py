"""Submitting a job and waiting for it to finish: `outlast submit --wait`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outlast.base.errors import OutlastError, Unanswered
from outlast.cli import terminal

if TYPE_CHECKING:
    from outlast.job.spec import Job
    from outlast.kubernetes.jobs.backend import KubernetesBackend

WaitOption = Annotated[
    bool,
    typer.Option("--wait", help="Wait until the job ends. Exit code 0: it has succeeded, 3: failed, 4: cancelled by others."),
]
OutputsOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="With --wait: write outputs there, a file each and outputs.json.")
]
TerminateOption = Annotated[
    Literal["cancel", "leave"],
    typer.Option(
        "--on-terminate",
        help="With --wait: what to do with the job at SIGTERM. cancel: cancel it, unless this pod is evicted.",
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--idempotency-key",
        metavar="KEY",
        help="One job for each KEY, such as the id of a pipeline's run. Its name ends with a digest of KEY and the job.",
    ),
]

INTERRUPTED = 130


class _Terminated(BaseException):
    """The process has received SIGTERM."""


class _Terminable:
    """Within its block, raises _Terminated at the first SIGTERM, either immediately or at the end of a `held` block."""

    def __init__(self) -> None:
        self._held = self._came = False

    def __enter__(self) -> _Terminable:
        self._before = signal.signal(signal.SIGTERM, self._raise)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._came:
            signal.signal(signal.SIGTERM, self._before)

    def _raise(self, number: int, frame: Any) -> None:
        if not self._came:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._came = True
        if not self._held:
            raise _Terminated

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay SIGTERM until the end of the block, which then raises _Terminated."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self._came:
                raise _Terminated


def with_key(job: Job, key: str, *content: object) -> Job:
    """Return the job with a name derived from `key` and `content`, which is all of the job's input."""
    from outlast.job import contract
    from outlast.kubernetes.manifests import names

    digest = names.digest([key, *map(str, content)], digits=12)  # a second run with the same name would find the first one's job
    name = f"{job.metadata.name[: contract.LONGEST_NAME - len(digest) - 1].rstrip('-.')}-{digest}"
    return job.model_copy(update={"metadata": job.metadata.model_copy(update={"name": name})})


def until_end(
    place: KubernetesBackend,
    name: str,
    apply: Callable[[], Iterator[str]],
    *,
    outputs: Path | None,
    on_terminate: str,
    keyed: bool,
) -> int:
    """Submit the job, wait for it to end, and write the outputs. Returns the exit code. `keyed` is True if only this pipeline
    step uses the job's name."""
    from outlast.kubernetes.jobs import outcome, waiting

    with _written():
        if outputs:
            outputs.mkdir(parents=True, exist_ok=True)  # an error appears before training
            if not os.access(outputs, os.W_OK):
                raise PermissionError(f"{outputs} is not writable")
    terminable = _Terminable()
    waiter = waiting.Waiter(place.workloads, name, say=terminal.say, may_cancel=keyed, defer_sigterm=terminable.held)
    before = None
    try:
        with terminable:
            with contextlib.suppress(Unanswered):
                before, _ = waiting.own_pod(place.cluster)
            waiter.submit(apply)
            terminal.say(f"waiting for {name} in namespace {place.cluster.namespace}")
            ended = waiter.wait()
    except _Terminated:
        ended = waiter.on_sigterm(on_terminate, lambda: waiting.own_pod(place.cluster, last=before))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        terminal.say(ended.sentence)
        return ended.code
    except KeyboardInterrupt:
        terminal.say(f"{name} goes on; wait again with the same command, or end it with: outlast cancel {name}")
        return INTERRUPTED
    if outputs:
        result = outcome.outcome(ended.status, place.cluster.namespace, outcome.read(ended.status), time.time())
        with _written():
            result.write(outputs)
        for output, reason in result.missing.items():
            terminal.say(f"output {output} is empty: {reason}")
    terminal.say(ended.sentence)
    return ended.code


@contextlib.contextmanager
def _written() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutlastError(f"the outputs cannot be written: {error}; give another directory") from error
