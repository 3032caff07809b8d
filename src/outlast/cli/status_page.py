"""How a job's status is shown: as the page of `outlast status`, and as a row of `outlast list`. `live_panel` has the live
view."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outlast.base import units
from outlast.cli import tables, terminal
from outlast.cli.tables import ListOutput
from outlast.job.workerfiles import guessed_progress

if TYPE_CHECKING:
    from outlast.job.failure import Failure
    from outlast.job.status import JobStatus, LostStatus, RankStatus, StoreStatus


_WIDEST = 300
_FIRST_STEP_S = 20.0
"""Seconds during which a run without a reported step is shown at step 0. The value is arbitrary."""


def goodput(status: JobStatus) -> str | None:
    """Format the goodput as `94.1 %`, or as `at most 94.1 %` for a script whose repeated steps cannot be recognised."""
    if status.goodput is None:
        return None
    exact = status.told not in ("", "log") or status.checkpoint is not None or (not status.told and status.step)
    return f"{'' if exact or not status.goodput else 'at most '}{units.percent(status.goodput)}"


def lasted(status: JobStatus, now: float) -> float:
    """Return the seconds from a run's submission to its end, or to now."""
    return max(0.0, (status.finished or now) - status.submitted)


def world(status: JobStatus) -> str:
    """Format the numbers of workers in the world, requested and allowed: `2/2 (1–4)`."""
    allowed = str(status.min) if status.min == status.max else f"{status.min}–{status.max}"
    return f"{len(status.world)}/{status.replicas} ({allowed})"


def steps(status: JobStatus) -> str:
    """Format the step as `812/1560`, as `812` if the total is unknown, or as `epoch 3, 20/32` if the log counts by epoch."""
    of = status.steps if status.epoch is None else status.epoch_steps
    count = str(status.step) if of is None else f"{status.step}/{of}"
    return count if status.epoch is None else f"{f'epoch {status.epoch}' if status.epoch >= 0 else 'in an epoch'}, {count}"


_NO_STEP = "none reported; a line such as `step 120/2000` on rank 0 is read, outlast.training.progress(120, 2000) is exact"


def _steps_known(status: JobStatus) -> bool:
    """Return whether the step is known. A run that has just started is at step 0."""
    begins = not status.started or (not status.finished and time.time() - status.started < _FIRST_STEP_S)
    return bool(status.step or status.told or begins)


def session(status: JobStatus) -> bool:
    """Return whether the training has a session, as shown by reported steps or by a committed checkpoint."""
    return status.told == "session" or status.checkpoint is not None


def no_checkpoint(status: JobStatus) -> str:
    """Return the word that follows `none`: `yet` if there is a session, which would report a checkpoint, or else `seen`."""
    return "yet" if session(status) or not status.started else "seen"


def metrics(status: JobStatus) -> str | None:
    """Format the last logged values: `loss 0.3162, accuracy 0.91 (step 40)`."""
    values = ", ".join(f"{terminal.one_line(name)} {value:.4g}" for name, value in status.metrics.items() if name != "step")
    return f"{values} (step {status.metrics['step']:.0f})" if values and "step" in status.metrics else None


def state(status: JobStatus) -> str:
    """Format the state and its reason: `Running: world of 2: everybody is here`."""
    reason = f", but {status.unsaved}" if status.unsaved else f": {status.reason}" if status.reason else ""
    return terminal.one_line(f"{status.state}{reason}")


def newest_checkpoint(status: JobStatus, now: float) -> str | None:
    """Format the newest checkpoint: `step 800, 12s ago, 36 MiB; best: step 600, loss 1.47`. For a plain script, it is a guess."""
    if status.checkpoint is None:
        return guessed_progress.sentence(status.saved, now) if status.saved else None
    newest = status.checkpoint
    if not newest.time:
        return f"step {newest.step}"
    best = newest.best
    quality = f"; best: step {best.step}, {terminal.one_line(best.by) or 'metric'} {best.value:.4g}" if best else ""
    # the size of a checkpoint from an earlier start is unknown
    size = f", {units.human_bytes(newest.bytes)}" if newest.bytes else ""
    return f"step {newest.step}, {units.human_seconds(now - newest.time)} ago{size}{quality}"


def newest_snapshot(status: JobStatus) -> str | None:
    """Format the newest snapshot in memory: `step 812, every 4 steps`."""
    if status.snapshot is None or not status.state.active:
        return None
    every = status.snapshot.every
    return f"step {status.snapshot.step}" + (f", every {'step' if every == 1 else f'{every} steps'}" if every else "")


def in_store(store: StoreStatus, now: float) -> str:
    """Format the state of uploads: `s3://bucket/runs/digits: step 800, all uploaded 12s ago`, or why and since when they fail."""
    parts = [f"step {store.step}"] if store.step else []
    uploaded = "uploaded" if store.backlog else "all uploaded"
    if store.pushed or not parts:
        parts += [f"{uploaded} {units.human_seconds(now - store.pushed)} ago"] if store.pushed else ["nothing uploaded yet"]
    parts += [f"now {store.doing}"] if store.doing else []
    parts += [f"{units.human_bytes(store.backlog)} of checkpoints to upload"] if store.backlog else []
    if store.since:
        parts.append(f"fails since {tables.moment(store.since)} ({units.human_seconds(now - store.since)}): {store.error}")
    return f"{store.url}: {', '.join(parts)}"


def lost(total: LostStatus) -> str:
    """Format the lost time: `4.1s of training by 3 failures, 1.4s each`."""
    each = f", {units.human_seconds(total.seconds / total.failures)} each" if total.failures > 1 else ""
    return f"{_most(total)}{units.human_seconds(total.seconds)} of training by {units.count(total.failures, 'failure')}{each}"


def _most(total: LostStatus) -> str:
    return "up to " if total.up_to else ""


def failure(failed: Failure) -> str:
    """Describe a failure: the first rank that failed, how it ended, and the end of its traceback or else of its log."""
    where = [f"generation {failed.generation}"] if failed.generation else []
    where += [f"step {failed.step}"] if failed.step is not None else []
    where += [f"exit code {failed.code}"] if failed.code >= 0 and "exit code" not in failed.reason else []
    head = f"{failed.reason} ({', '.join(where)})" if where else failed.reason
    tail = [line if len(line) <= _WIDEST else f"{line[: _WIDEST - 1]}…" for line in failed.log_tail.rstrip().splitlines()]
    words = failed.traceback.rstrip().splitlines() or (["its log ends with:", *tail] if tail else [])
    return "\n".join([head, *(f"    {line}" for line in words)])


def progress(status: JobStatus) -> str:
    """Format the step with the rate and the time left: `812/1560, 10 steps/s, 1m15s left`."""
    rate = f", {status.rate:.3g} steps/s" if status.rate and status.state.trains else ""
    left = f", {units.human_seconds(status.eta_s)} left" if status.eta_s else ""
    return f"{steps(status)}{rate}{left}{' (read from the log)' if status.told == 'log' else ''}"


def _training(status: JobStatus, now: float) -> dict[str, str | None]:
    return {
        "world": f"{world(status)} workers, generation {status.generation}, {status.processes} per worker",
        "step": progress(status) if _steps_known(status) else _NO_STEP,
        "metrics": metrics(status),
        "snapshot": newest_snapshot(status),
        "checkpoint": newest_checkpoint(status, now) or f"none {no_checkpoint(status)}",
    }


def page(status: JobStatus, now: float) -> str:
    """Format a job's page, with everything known about the job."""
    running = units.human_seconds(lasted(status, now))
    parts = [
        f"{status.name}: {state(status)}",
        "",
        tables.fields(
            {
                "run": status.run,
                **({} if status.told == "data" else _training(status, now)),
                "restarts": f"{status.restarts}, and {units.count(status.interruptions, 'interruption')}, not counted",
                "goodput": goodput(status),
                "lost": lost(status.lost) if status.lost else None,
                "submitted": f"{tables.moment(status.submitted)}, {'lasted' if status.finished else 'for'} {running}",
                "exit code": status.exit_code,
                "output": status.output,
                "store": in_store(status.store, now) if status.store and _has_uploads(status.store, status) else None,
            }
        ),
    ]
    if any(worker.pod for worker in status.workers):
        cells = [(w.index, w.state, w.pod, w.node or None, w.step, w.restarts, w.reason or None) for w in status.workers]
        parts += ["", tables.table(("WORKER", "STATE", "POD", "NODE", "STEP", "RESTARTS", "REASON"), cells)]
    elif status.workers:
        rows = [(w.index, w.state, w.pid, " ".join(map(_rank, w.ranks)), w.restarts, w.probes) for w in status.workers]
        known = any(rank.step is not None for worker in status.workers for rank in worker.ranks)
        parts += ["", tables.table(("WORKER", "STATE", "PID", "RANK:STEP" if known else "RANK", "RESTARTS", "PROBES"), rows)]
    if status.warnings:
        parts += ["", "Warnings", *(f"  {terminal.one_line(warning)}" for warning in status.warnings)]
    if status.failure:
        ago = f", {units.human_seconds(now - status.failure.time)} ago" if status.failure.time else ""
        cost = ""
        if status.lost and status.lost.generation == status.failure.generation:
            cost = f", cost {_most(status.lost)}{units.human_seconds(status.lost.last_s)} of training"
        parts += ["", f"Last failure{ago}{cost}", *(f"  {line}" for line in failure(status.failure).splitlines())]
    return "\n".join(parts)


def _has_uploads(store: StoreStatus, status: JobStatus) -> bool:
    """Return whether the store's status says anything about uploads. In a cluster, it has only the URL of the output until an
    agent reports more."""
    return store.url != status.output or bool(store.step or store.pushed or store.since)


def row(status: JobStatus, now: float, output: ListOutput, *, namespaced: bool = False) -> dict[str, object]:
    """Return a job's cells for a list, keyed by heading. With `namespaced`, the cells include the job's namespace."""
    if output is ListOutput.NAME:
        return {"NAME": status.name}
    cells = {
        "NAME": status.name,
        "STATE": status.state,
        "WORKERS": world(status),
        "STEP": steps(status) if _steps_known(status) else None,
        "RESTARTS": status.restarts,
        "GOODPUT": goodput(status),
        "AGE": units.human_seconds(now - status.submitted),
    }
    if output is ListOutput.WIDE:
        nodes = dict.fromkeys(worker.node for worker in status.workers if worker.node)
        cells["CHECKPOINT"] = status.checkpoint.step if status.checkpoint else None
        cells |= {"NODES": ",".join(nodes) or None, "OUTPUT": status.output or None}
    return {**({"NAMESPACE": status.namespace} if namespaced else {}), **cells, "REASON": status.reason or None}


def jobs(statuses: Sequence[JobStatus], now: float, output: ListOutput = ListOutput.TABLE, *, namespaced: bool = False) -> str:
    """Format a table with one line per job. The format `name` has no headings."""
    rows = [row(status, now, output, namespaced=namespaced) for status in statuses]
    lines = tables.table(list(rows[0]), ([*each.values()] for each in rows)).splitlines()
    return "\n".join(lines[1:] if output is ListOutput.NAME else lines)


def _rank(rank: RankStatus) -> str:
    return str(rank.rank) if rank.step is None else f"{rank.rank}:{rank.step}"


def changes(old: JobStatus | None, new: JobStatus) -> list[str]:
    """Return a sentence for each change since the status `old`."""
    same = old is not None and old.state == new.state and (new.waits or new.reason) in ("", old.waits or old.reason)
    sentences = [] if same else [state(new)]
    known = old.warnings if old is not None else []
    return sentences + [f"warning: {warning}" for warning in new.warnings if warning not in known]
