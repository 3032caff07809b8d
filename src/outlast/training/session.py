"""A session: one training process as a rank of the world, from joining the process group to leaving it.

    with session.open(seed=0) as run:
        net = run.ddp(model.to(run.device))
        step = run.resume({"model": net, "optimizer": optimizer, "stream": stream})
        for batch in stream:
            ...
            step += 1
            run.log(step, loss=loss)
            leaving = run.interrupted()
            if leaving or run.due(step):
                run.save(step)

This works under Outlast, under torchrun, and as a plain `python train.py` (a world of one). A run that is killed and resumed with
the same number of ranks computes the same bits as an uninterrupted run. All ranks agree at every step whether to save or leave.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outlast.base.errors import NotRestored, NotSaved, OutlastError
from outlast.base.units import Every
from outlast.job import contract
from outlast.job.contract import Env, Exit
from outlast.job.ledger import Ledger
from outlast.job.workerfiles import notice_file
from outlast.job.workerfiles.progress_file import Progress, Writer
from outlast.rendezvous import sentences
from outlast.storage import checkpoints
from outlast.storage.snapshots import client
from outlast.training import collective_calls, data_waits, ddp, device, kept_process, metrics, mistakes, own_time
from outlast.training.collective_calls import Calls
from outlast.training.samples import seeded
from outlast.training.state import (
    background_save,
    checkpoint,
    exchanged,
    newest_on_disks,
    parameters,
    resuming,
    save_bookkeeping,
    snapshot_taking,
    weights,
)
from outlast.training.state.shared_disks import Disks
from outlast.worker import tracking
from outlast.worker.hangs import deadlocks
from outlast.worker.launch import training_process

log = logging.getLogger("outlast")
T = TypeVar("T")

_OPENED = ("device", "_group", "_calls", "_disks", "_saver", "_saves", "_ledger", "_copy", "_own")
_LAST_SAVE_S = 10.0
"""Seconds to wait for the save in progress if a process ends with an exception (an arbitrary value)."""


def open(seed: int = 0, *, quiet: bool = False) -> Session:
    """Open this process's session: `with session.open(seed=0) as run:`. All ranks must call this.

    Joins the process group that the environment describes (Outlast's or torchrun's; otherwise the world has one rank), with gloo
    on the CPU and NCCL on GPUs. `seed` seeds Python, numpy and torch identically on every rank, so that all ranks create the same
    model; from `Session.resume` on, each rank has its own random numbers. With `quiet`, `Session.log` prints nothing.

    A session that ends without an exception saves the last step if the script has not. Raises OutlastError if a process group
    exists already, if `outlast evaluate` started the script or, outside a job, if rank 0's output directory cannot be written.
    Raises Superseded if a later generation of the run has begun.
    """
    return Session(seed, quiet)


def run(train: Callable[[], T]) -> T:
    """Call `train`, which opens a session, and return its result. Call it again in each later world, in the same process.

    Without this, each new world starts new processes. With it, processes continue if their worker stays: after a planned change
    of the world, and if the loss of another one has broken a collective. What the script has set up outside of `train`
    (imports, the device's context, data) remains; what depends on the rank or the world's size belongs inside. `train` begins
    like in a new process, and its session resumes from the newest state. An exception of the script's own passes, and a process
    that cannot be kept is replaced.
    """
    return kept_process.run(train)


def attach(seed: int = 0, *, output: Path | None = None, quiet: bool = False, batch: int = 0) -> Session:
    """Open the session of a process in which a library has already joined a process group and seeded the generators.

    The process group stays open at the end; if there is none, the world has one rank. Outside a job, `output` is the output
    directory. `batch` is the number of samples per step; later worlds of a job only have numbers of ranks that divide it.
    Otherwise like `open`. All ranks must call this.
    """
    return Session(seed, quiet, attached=True, output=output, batch=batch)


class Session:
    """One rank of the world, as returned by `session.open`; called `run` below."""

    rank: int
    """This process's rank in the world, from 0 to world_size - 1."""
    local_rank: int
    """This process's rank within its worker, counted from 0."""
    world_size: int
    """Number of processes in the world; changes when a worker is lost or added."""
    device: torch.device
    """This rank's accelerator, or the CPU."""
    generation: int
    """Number of this world in the run, counting from 1. A new world forms each time the run starts or its set of workers changes,
    but not when the same workers restart their processes after a crash."""
    output: Path
    """Directory of the run's checkpoints, metrics and results. If workers have separate disks, every disk has the checkpoints and
    metrics, and rank 0's disk has the results."""
    data: Path | None
    """Directory of the job's data; None if the job has none."""
    seconds_left: float
    """Seconds left to save and leave, as of the last call of `interrupted`; infinity while no worker is interrupted. All ranks
    have the same value, the minimum over all workers. Use it to skip optional work: `if run.seconds_left > 60: evaluate()`."""

    def __init__(self, seed: int, quiet: bool, *, attached: bool = False, output: Path | None = None, batch: int = 0) -> None:
        self.seed, self._attached, self._quiet, self._batch = seed, attached, quiet, batch if isinstance(batch, int) else 0
        self.output = Path(os.environ.get(Env.OUTPUT, output or "out"))
        self._parameters: dict[str, Any] = {}
        env = os.environ
        self._joined = False
        """True if this session has joined the process group itself, and so leaves it at the end."""
        self.rank, self.world_size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
        self.local_rank = int(env.get("LOCAL_RANK", 0))
        self.data = Path(env[Env.DATA]) if Env.DATA in env else None
        self.generation = int(env.get(Env.GENERATION, 0))
        self._run = env.get(Env.RUN, "")
        self._notice = Path(env[Env.NOTICE]) if Env.NOTICE in env else None
        self._every = Every.parse(env.get(Env.CHECKPOINT_EVERY, "300s"))
        self._retention = checkpoints.Retention.parse(env)
        self._directory = self.output / contract.CHECKPOINTS
        self._state: Mapping[str, Any] = {}
        self._waits = data_waits.Stalls(time.monotonic())
        self._screen = metrics.Screen(self._quiet or self.rank > 0)
        self._trackers = tracking.Trackers(self.output, self.rank)
        self._leaving = self._closed = False
        self._search: newest_on_disks.Search | None = None
        self._peeked: int | None = None
        self.seconds_left = math.inf
        self._votes: tuple[bool, bool] | None = None
        self._pace = collective_calls.Pace()
        self._lock = threading.Lock()
        self._record = Progress(self.generation, self.rank, "started", batch=self._batch, keeps=kept_process.keeps())
        self._progress = Writer(Path(env[Env.STATE]), self.local_rank) if Env.STATE in env else None
        self._report()

    def __getattr__(self, name: str) -> Any:
        if name in _OPENED and not self.__dict__.get("_closed", True):
            raise OutlastError("the session is not open yet; write `with session.open(...) as run:` and use run inside")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __enter__(self) -> Self:
        env = os.environ
        if Env.EVALUATION in env:
            raise OutlastError(
                "`outlast evaluate` started this script, and a session would train; let the script handle --evaluate and read a "
                "checkpoint without a session (docs/guide/checkpoints.md)"
            )
        if dist.is_initialized() and not self._attached:
            raise OutlastError("a process group exists already; session.open() joins it itself: remove init_process_group()")
        exchanged.keep_names()
        deadlocks.watch().start()
        self._report(phase="open")
        accelerator = device.find()
        self.device = accelerator.bind(self.local_rank)
        with contextlib.suppress(OSError):  # `Disks.fence` reports the error
            self._directory.mkdir(parents=True, exist_ok=True)
        self._ledger = Ledger(Path(env.get(Env.LEDGER, self.output / contract.LEDGER)), contract.ledger_source(env))
        self._joined = device.join(accelerator.backend)
        self._group: dist.ProcessGroup | None = deadlocks.watch().own(dist.new_group(backend="gloo"))
        self._calls = Calls(self._group)
        self._disks = Disks.find(self._directory, self._group)
        try:
            numbered = self.generation if Env.GENERATION in env else None
            self.generation, self._unwritten = self._disks.fence(self.output, self._directory, self._run, numbered)
            self._report(generation=self.generation)
        except OutlastError:  # a notebook may try again
            if self._joined:
                dist.destroy_process_group()
            raise
        self._copy = metrics.Copy(self.output / contract.METRICS)
        place = self._directory, self._run, self.generation
        self._saver = background_save.Saver(
            *place, self._retention, lambda *args, **kwargs: self._saves.saved(*args, **kwargs), self._disks, self._copy
        )
        self._saver.fenced = self._disks.certain and not self._unwritten
        self._client = client.connect(env)
        at = snapshot_taking.Place.of(env, self._run, self.generation, self.world_size, self.rank)
        self._snapshots = snapshot_taking.open_(self._client, at, self._directory, self._disks, self._ledger, self._report)
        self._own = own_time.OwnTimes(self._calls, self._disks.gather, self._ledger, self._report, gpu=self.device.type != "cpu")
        self._saves = save_bookkeeping.Saves(self._saver, self._disks, self._ledger, self._screen, self._meet, self._report)
        deadlocks.watch().last = lambda: self._saver.wait(_LAST_SAVE_S)
        about = {"generation": self.generation, "rank": self.rank, "world_size": self.world_size}
        self._ledger.write("session", **about, **({} if self.rank else {"versions": device.versions()}))
        if not self._attached:
            seeded.seed_all(self.seed)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._saves.store_last("the exit of `with session.open()`")
            self._saves.finish("the exit of `with session.open()`")
            self._calls.leave()
            if (lost := self._saves.lost()) and self._snapshots.newest > self._saves.committed:
                unsaved = NotSaved(f"{lost}; the next start tries again from memory")
                self._report(**self._trackers.end(unsaved, leaving=self._leaving))
                raise unsaved
            self._saves.say_end()
            self._report(phase="done", **self._trackers.end(None, leaving=self._leaving))
        else:
            if error is not None and (hint := mistakes.hint(error, self._state)):
                error.add_note(hint)
            self._saver.wait(_LAST_SAVE_S)  # the save may still succeed: other ranks' threads continue it
            self._report(**self._trackers.end(error, leaving=self._leaving))
        stays = error is not None and kept_process.stays(error)
        if kind is None or self._leaving or stays:
            self._close()
        if stays:
            self._snapshots.close()
        if not self._saver.busy:
            self._ledger.close()
            if self._progress:
                self._progress.close()
        self._closed = True
        self._saves.close()

    def _close(self) -> None:
        # A process group joins its threads once nothing refers to it. Otherwise a thread could release a tensor while the
        # interpreter shuts down, which needs the GIL, and the process would end in SIGABRT. For the same reason the session
        # never uses the default group: every DDP module refers to it.
        deadlocks.watch().last = lambda: None
        self._saver.close()
        self._disks.close()
        self._calls.close()
        self._group, joined, self._joined = None, self._joined, False
        if joined:
            dist.destroy_process_group()

    def _meet(self, call: str, *numbers: float) -> list[float]:
        """Return the sums of `numbers` over all ranks, which must all call this. Raises OutlastError if their calls differ."""
        if self._closed:
            raise OutlastError(f"{call} comes after the end of the session; move it into its `with` block")
        return self._calls.meet(call, self._saves.position(), numbers)

    @mistakes.public("net = run.ddp(model)")
    def ddp(self, model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        """Wrap `model` in DDP on this rank's device, so that gradients are added in the same order after every restart.

        Plain DDP rebuilds its gradient buckets after the first backward pass. With three or more ranks, this changes the bits of
        the gradients' sums, so a resumed run would differ from an uninterrupted one. This method makes DDP rebuild the buckets
        before the first step (docs/decisions/0003). Raises OutlastError for `static_graph`. All ranks must call this.
        """
        if options.get("static_graph"):
            raise OutlastError(
                "ddp(static_graph=True) lays out gradients after the first step and cannot resume exactly; leave it out"
            )
        self._meet("run.ddp()")
        return ddp.wrap(model, self.device, **options)

    @mistakes.public('run.resume({"model": net, "optimizer": optimizer, "stream": stream})')
    def resume(self, state: Mapping[str, Any]) -> int:
        """Load this run's newest state into `state` and return its step, or 0 if there is none.

        The newest state is a snapshot in the workers' memory or the newest valid checkpoint, whichever is later. `state` maps
        names to modules, optimizers and anything else with `state_dict` and `load_state_dict`; `save` saves these objects. Random
        number generators are restored, too. Damaged checkpoints are reported and skipped. If workers have separate disks, one
        valid copy of a checkpoint is enough, and is sent to the other disks. If `output` is not writable, a resumed run only
        warns, and its saves fail until `output` is writable.

        Raises OutlastError if the saved state does not fit `state`, or if there is no saved state and `output` is not writable.
        Raises NoRoom if a disk is too full for a copy of a checkpoint, and NotRestored if a store or a worker's memory cannot be
        read. All ranks must call this.
        """
        mistakes.check_mapping(state)
        checkpoint.check(state)
        self._meet(f"run.resume({', '.join(mistakes.described(state))})")
        self._state = dict(state)
        self._saves.begin(self._state)
        mistakes.check_sharding(state)
        made = mistakes.lengths(state)
        self._report(phase="restore", steps=self._steps())
        if self.rank == 0:
            self._ledger.write("restoring", generation=self.generation)
        restored = self._newest(state)
        step = restored.step
        if self._peeked not in (None, step):
            raise NotRestored(f"peek() found step {self._peeked} and resume() step {step}; the next start tries again")
        if training_process.kept:
            kept_process.check(state, restored.source)
        if self._unwritten:
            if not restored.source and self.rank == 0:  # rank 0 could commit no checkpoint, and no progress is lost
                raise OutlastError(f"{self._unwritten}; make room or name another directory")
            log.warning("outlast: %s; training goes on, and each save tries again", self._unwritten)
            self._report(warning=self._unwritten)
        if not restored.random:
            seeded.seed_all(self.seed, self.rank, step)
        if (change := mistakes.changed(state, made)) and self.rank == 0:
            log.warning("outlast: %s", change)
        lost: dict[str, Any] = {}
        if self.rank == 0 and step < (newest_held := min(int(os.environ.get(Env.HELD, "0")), restored.most)):
            lost = {"warning": sentences.began_again(step, newest_held)}
            log.warning("outlast: %s", lost["warning"])
        if self.rank == 0:
            self._ledger.write("restored", generation=self.generation, step=step, **restored.event(), **lost)
        logged = step if restored.source else -1  # without a checkpoint, step 0 is logged again, too
        self._copy.resumed(logged, self._disks, restored.extra.get("lines", ""))
        self._trackers.follow()
        self._saves.resumed(step, restored.committed, restored.extra.get("unsaved_s", 0.0))
        self._snapshots.begin(self._state, restored.at, self._extra, step)
        self._waits.since(time.monotonic(), mistakes.streams_of(state))
        self._own.begin(state)
        if restored.path and self.rank == 0 and not self._run:  # otherwise the launcher or the agent prints it
            total = f" of {steps}" if (steps := self._steps()) else ""
            self._screen.say(f"goes on from step {step}{total} ({restored}); without {self._directory} it begins anew")
        self._report(
            phase="first step", step=step, committed=restored.committed, snapshot=restored.at[1], steps=self._steps(), **lost
        )
        return step

    @mistakes.public('step = run.peek({"position": position})')
    def peek(self, state: Mapping[str, Any]) -> int:
        """Load a part of this run's newest state and return its step, or 0 if there is none.

        Libraries call this to learn the training position before modules and optimizers exist, so `state` contains none of these.
        The call of `resume` that must follow loads the whole state of the same step and restores random numbers. Raises the same
        errors as `resume`. All ranks must call this.
        """
        mistakes.check_mapping(state)
        checkpoint.check(state)
        self._meet(f"run.peek({', '.join(state)})")
        self._peeked = self._newest(state, peek=True).step
        return self._peeked

    def _newest(self, state: Mapping[str, Any], *, peek: bool = False) -> resuming.Restored:
        """Load the newest state. A checkpoint that `peek` has verified is not removed before `resume` has loaded it."""
        if self._search is None:
            share = self.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            held = contextlib.ExitStack()
            self._search = newest_on_disks.Search(self._directory, self._run, self._disks, share, held, self._note)
        try:
            return resuming.restore(state, self._search, self._client, self.generation, peek=peek)
        finally:
            if not peek:
                self._search.held.close()
                self._search = None

    def _extra(self) -> dict[str, Any]:
        lines = {"lines": self._copy.recent()} if self._disks.several else {}
        return {"unsaved_s": self._saves.unsaved_s, **lines}

    def _steps(self) -> int | None:
        """Return the run's total number of steps, or None if no object in the state has it."""
        return next((int(thing.total_steps) for thing in self._state.values() if hasattr(thing, "total_steps")), None)

    def _note(self, kind: str, **fields: Any) -> None:
        """Record that a checkpoint is `damaged` or was `copied` to other disks. Only rank 0 calls this."""
        self._ledger.write(kind, **fields)
        if kind == "damaged":
            log.warning("outlast: %s is damaged and skipped: %s", fields["path"], fields["reason"])

    @mistakes.public("values = run.gather(value)")
    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. `value` must be picklable. All ranks must call this."""
        self._meet("run.gather()")
        return self._disks.gather(value)

    @mistakes.public("path = run.export(net)")
    def export(self, model: torch.nn.Module, name: str | Path = "model.pt") -> Path:
        """Write `model`'s weights to the file `run.output / name`, for use without Outlast, and return the file's path.

        Read the file with `torch.load(path, weights_only=True)`. If its name ends in `.safetensors`, it is written and read with
        the package safetensors (`pip install safetensors`). Keys are those of the plain module, without DDP's prefix. FSDP2's
        shards are gathered, tensor by tensor. Rank 0 writes the file and needs CPU memory for the whole model. All ranks must
        call this, which returns once the file is complete. Raises OutlastError on all ranks if the file cannot be written.
        """
        path = self.output / name
        weights.check(path, model)
        self._meet(f"run.export(..., {str(name)!r})")
        weights.export(model, path, self._disks.gather)
        return path

    @mistakes.public("run.log(step, loss=loss)")
    def log(self, step: int, *, reduce: bool = False, **values: Any) -> dict[str, float]:
        """Report that `step` has ended, log `values`, and return them as floats.

        Each value is a number or a one-element tensor; the call waits for tensors on a GPU. Rank 0 appends the values to
        `metrics.jsonl`, and prints them to stderr: the first and the last, and others at most every 10 seconds. With `reduce`,
        the call is a collective, and values are averaged over the ranks. If each rank passes the sum of `loss * share` over its
        micro-batches, the average is the global batch's mean loss. Raises OutlastError for a value that is not a single number.
        """
        step = mistakes.whole(step)
        self._saves.logged(step)
        numbers = {name: mistakes.number(name, value) for name, value in values.items()}
        if reduce and numbers:
            total = self._meet(f"run.log({step}, reduce=True, {', '.join(numbers)})", *numbers.values())
            numbers = {name: each / self.world_size for name, each in zip(numbers, total, strict=True)}
        self._saves.logged(step, numbers)
        problem: dict[str, str] = {}
        waited_s, sentence = self._waits.since(time.monotonic(), mistakes.streams_of(self._state))
        if sentence and self.local_rank == 0:
            log.warning("outlast: %s", sentence)
        if self.rank == 0:
            self._trackers.follow()
            if self._saves.stepped():  # an earlier call only logs measurements
                self._ledger.step(self.generation, step, waited_s, self._snapshots.spent_s())
            if numbers:
                line = {"step": step, "time": round(time.time(), 3), "generation": self.generation, **numbers}
                try:
                    metrics.append(self._copy.path, line)
                except OSError as error:  # a full disk is no reason to stop
                    problem = {"warning": f"{contract.METRICS} cannot be written: {error.strerror}"}
                self._screen.show(step, numbers, self._steps)
        self._report(phase="train", step=step, waited_s=round(self._record.waited_s + waited_s, 6), **problem)
        return numbers

    @mistakes.public('run.parameters({"lr": lr})')
    def parameters(self, values: Mapping[str, Any]) -> None:
        """Record this run's settings: rank 0 writes them to `parameters.json`, and trackers show them.

        `values` maps names to numbers, strings, booleans, None or lists of these; nested mappings become `outer.inner`. Call this
        once, after `resume`; a second call adds to the first. If a resumed run has other values, a warning lists the changes. Not
        a collective: all ranks or only rank 0 may call it. Raises OutlastError for values of other types.
        """
        self._parameters |= parameters.plain(values)
        if self.rank > 0:
            return
        self._trackers.follow()
        try:
            changed = parameters.write(self.output / contract.PARAMETERS, self._parameters)
        except OSError as error:  # a full disk is no reason to stop
            self._report(warning=f"{contract.PARAMETERS} cannot be written: {error.strerror}")
            return
        if changed:
            log.warning("outlast: the run goes on with other parameters than before: %s", changed)

    def alive(self) -> contextlib.AbstractContextManager[None]:
        """Signal that this rank is alive although it may seem to hang. This is cheap and not a collective.

        `run.alive()` is a single signal. `with run.alive():` covers the whole block: use it while the script waits for something
        that Outlast cannot observe, e.g. a service that evaluates the model. Hangs in the block are not detected.
        """
        return deadlocks.watch().alive()

    @mistakes.public("leaving = run.interrupted()")
    def interrupted(self) -> bool:
        """Return whether to save and leave: True on all ranks once any rank is interrupted. Call this once per step.

        Ctrl-C, a change of size and a reclaimed machine interrupt a run. `run.seconds_left` is then the time left. Each call
        costs one small all-reduce. All ranks must call this.
        """
        notified = self._notice is not None and self._notice.exists()
        late = self.rank == 0 and self._saves.late(self._every)
        proposed = self._pace.interval(self._snapshots.step_s()) if self.rank == 0 else 0
        own = notified, late, self._saver.busy, *self._snapshots.votes()
        with self._pace.voting():
            *votes, measured, interval, new = self._meet("run.interrupted()", *own, self._own.due(), proposed, 1)
        notified, late, busy = (vote > 0 for vote in votes[:3])
        alike = new == self.world_size  # ranks of an earlier version vote in each step, and take part in no comparison
        self._pace.agreed = int(interval) if alike else 1
        self._snapshots.count(votes[3:], compare=alike)
        self._own.step(self._record, compare=alike and measured > 0)
        self._leaving = self._leaving or notified
        if self._leaving:
            self.seconds_left = min(self._disks.gather(notice_file.left_s(self._notice)))
        self._votes = late, busy
        if not busy:
            self._saves.settle(self._saver.wait())
        return self._leaving

    @mistakes.public("run.due(step)")
    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due (see the job's `checkpoint.every`), and take a snapshot in memory if one is due.

        `step` is the number of optimizer steps done. The result is the same on all ranks, and False while a save is in progress.
        Calls `interrupted` if the script has not called it in this step. Raises OutlastError if `step` does not advance with the
        stream. All ranks must call this.
        """
        step = mistakes.whole(step)
        self._saves.advanced(f"run.due({step})", step)
        self._report(phase="train", step=step)
        if self._votes is None:
            self.interrupted()
        assert self._votes is not None
        (late, busy), self._votes = self._votes, None
        if not self._leaving:
            self._snapshots.boundary(step)
        if self._every.steps is not None:
            late = self._saves.due(step, self._every)
        if late and busy:  # the throttled save in progress must not delay the next checkpoint
            self._saver.hurry()
        return late and not busy

    @mistakes.public("run.boundary(step)")
    def boundary(self, step: int) -> None:
        """Take a snapshot after `step`, save if a checkpoint is due, and leave if any rank is interrupted (see `save`).

        Libraries and plain loops call this on all ranks after each step, instead of `interrupted`, `due` and `save`. If steps are
        short, the ranks do not vote on saving and leaving in each of them, but at least four times a second.
        """
        if step < self._pace.next and not self._saves.due(step, self._every):
            self._saves.advanced(f"run.boundary({step})", step)
            self._report(phase="train", step=step)
            self._snapshots.boundary(step)
            self._own.step(self._record, compare=False)
            return
        leaving = self.interrupted()
        due = self.due(step)
        self._pace.next = step + self._pace.agreed
        if due or leaving:
            self.save(step)

    @mistakes.public("run.save(step, metric=loss); it saves what resume() was given")
    def save(self, step: int, *, metric: float | torch.Tensor | None = None) -> None:
        """Save the state passed to `resume` as the checkpoint of `step`.

        `metric` is the quality of the checkpoint: a number or a tensor of one element. Only rank 0's metric counts, so average it
        first, e.g. with `run.log(step, reduce=True, val_loss=...)`. The default is the last value logged up to this step under
        the name in the job's `checkpoint.by`. The job's `checkpoint.best` is the number of best checkpoints that are kept besides
        the newest; a value that is not finite is never best. A saved step is not saved again, even with another metric.

        The call returns once the state is copied, and a thread writes the copy. After `interrupted` has returned True, the call
        waits until the checkpoint is committed and raises SystemExit(75). If the last saves took longer than the time left, the
        call only waits for the save in progress, and training later continues from the newest checkpoint. If a save fails, e.g.
        because the disk is full, this is reported, and training continues. Raises OutlastError before `resume`, if `step` does
        not advance with the stream, or if a Stream that is being read is not in the state. All ranks must call this.
        """
        step = mistakes.whole(step)
        value = None if metric is None else mistakes.number("metric", metric)
        if not self._state:
            raise OutlastError("save() does not know what to save; call resume() with the state first")
        self._saves.advanced(f"run.save({step})", step)
        self._meet(f"run.save({step})")
        self.seconds_left, late = self._saves.too_late(step, self._notice) if self._leaving else (self.seconds_left, "")
        if late:
            self._saves.finish(f"run.save({step})")
        else:
            self._saves.store(step, value, wait=self._leaving)
        if self._leaving:
            self._saves.left(step, late, self.generation)
            raise kept_process.Left(Exit.INTERRUPTED)

    def _report(self, **changes: Any) -> None:
        """Rewrite this process's progress record. Two threads call this."""
        if "warning" in changes:
            changes["warning"] = changes["warning"] or self._trackers.problem
        with self._lock:
            if "committed" in changes:  # a script that never logs reports no steps
                changes.setdefault("step", max(self._record.step, changes["committed"]))
            self._record = dataclasses.replace(self._record, **changes)
            if self._progress:
                self._progress.write(self._record)
