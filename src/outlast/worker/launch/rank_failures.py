"""Determines why training processes have failed, from their exit codes, records and verdicts, and finds the root failure."""

from __future__ import annotations

import dataclasses
import errno
import math
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.base import files
from outlast.base.errors import WrongBits
from outlast.job import accelerators, contract
from outlast.job.contract import FailureCause
from outlast.job.workerfiles import progress_file
from outlast.rendezvous.root_cause import left_early

EARLY_S = 30.0
"""Seconds for which a script that reports no steps is taken to be before its first step. Arbitrary."""
_SCRIPT_ERRORS = (
    *("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"),
    *("TypeError", "NameError", "UnboundLocalError", "AttributeError", "SystemExit"),
)
"""Errors of a script that has a bug, does not match the installed packages, or rejects its arguments."""
_MEMORY = ("OutOfMemoryError", "MemoryError")
_LOADER = "killed by signal: Killed"
"""torch's message after the kernel has killed a data loader process."""
_STEPS = ("first step", "train")
"""Phases in which a hang is blamed on the current step. In other phases, a process may be waiting for a store or a disk. A plain
script that reports no steps is taken to be at step 0 if it was silent for longer than it was active."""
_COLLECTIVE = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "CheckpointException")
_SECONDARY = re.compile(
    r"connection .{0,20}(closed|reset|refused)|broken pipe|by peer|pair closure|socket (closed|timeout)|timed out|gloo|"
    r"no route to host|unreachable|" + "|".join(accelerators.LIBRARIES),
    re.IGNORECASE,
)
"""Messages from collectives after another process has died."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a fork of the warm process ended."""

    rank: int | None
    """Rank of a training process; None for the process that hosts the world's store."""
    local_rank: int
    code: int
    """Exit code, or the negative number of the signal that ended the process."""
    time: float
    why: str = ""
    """Why the process could not be started or was lost."""
    asked: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The hang for which the agent killed a training process."""

    reason: str
    stuck: bool
    """False if the process was stopped from outside."""
    early: bool
    """True if the process had hung for longer than it had run."""


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a worker's training processes. `state` is the worker's directory that holds their records."""

    worker: int
    state: Path
    processes: int
    generation: int
    attempt: int

    def all_of(self, holds: Callable[[progress_file.Progress], bool]) -> bool:
        """Return whether a condition holds for the records of all processes."""
        records = (progress_file.read(self.state, local_rank) for local_rank in range(self.processes))
        start = self.generation, self.attempt
        return all(each and (each.generation, each.attempt) == start and holds(each) for each in records)

    def failure(self, ended: Ended, verdict: Verdict | None = None, *, oom: bool = False) -> dict[str, Any]:
        """Return a process's failure for the rendezvous. `oom` is True if the OOM killer has killed a process of this worker."""
        record = files.mapping(self.state / contract.ERROR.format(local_rank=ended.local_rank))
        # The error record wins: torch's threads may end the process with SIGABRT while it exits.
        code = record.get("code") or contract.exit_code(ended.code)
        what = (verdict.reason if verdict else "") or record.get("message") or ended.why or contract.how_ended(ended.code)
        if oom := oom and (what == contract.how_ended(-signal.SIGKILL) or _LOADER in what):
            what = "was killed: out of memory; raise resources.memory, or lower the batch"
        # OutlastError messages are whole sentences.
        sentence = bool(record) and not record.get("traceback") and not verdict and record["type"] != "SystemExit"
        who = "the store of the world" if ended.rank is None else f"rank {ended.rank}"
        reached = progress_file.read(self.state, ended.local_rank)
        if reached and (reached.generation, reached.attempt) != (self.generation, self.attempt):
            reached = None
        reported = 0
        if reached and reached.phase == "started":  # a plain script, which reports at most its steps
            reported, reached = reached.step, None
        echo = is_secondary(record)
        young = (verdict is not None and verdict.early) or (echo and record.get("age_s", math.inf) < EARLY_S)
        plain = reached is None and bool(reported or young)
        # With a record, the process was exiting already.
        stopped_by_us = ended.asked and ended.code in (-signal.SIGTERM, -signal.SIGKILL) and not record
        stuck = verdict is not None and verdict.stuck
        return {
            "rank": ended.rank,
            "code": code,
            "reason": f"{who} on worker {self.worker}{':' if sentence else ''} {what}",
            "cause": FailureCause.HANG if verdict else FailureCause.OUT_OF_MEMORY if oom else cause(record),
            "traceback": record.get("traceback", ""),
            "time": record.get("time", ended.time),
            "echo": not verdict and (stopped_by_us or echo),
            "hung": stuck and (plain if reached is None else reached.phase in _STEPS),
            "early": record["type"] if _early(record, reached) else "",
            "step": reached.step if reached else reported if plain else None,
            "committed": reached.committed if reached else None,
        }

    def first(self, failures: Sequence[dict[str, Any]], rank: int | None) -> dict[str, Any]:
        """Return the root failure. If all failures are secondary, blame `rank`, the rank on this worker that exited with code 0,
        if there is one."""
        first = min(failures, key=lambda failure: (not is_cause(failure), failure["time"]))
        if {failure["early"] for failure in failures if is_cause(failure)} != {first["early"]}:
            first = {**first, "early": ""}
        if rank is None or not first["echo"]:
            return first
        reason = left_early(f"rank {rank} on worker {self.worker}", first["rank"], first["step"])
        return {**first, "rank": rank, "reason": reason, "echo": False, "left": True, "traceback": ""}

    def errors(self) -> dict[int, dict[str, Any]]:
        """Return the processes' error records, keyed by local rank."""
        records = {each: files.mapping(self.state / contract.ERROR.format(local_rank=each)) for each in range(self.processes)}
        return {each: record for each, record in records.items() if "code" in record}

    def causes(self) -> dict[int, dict[str, Any]]:
        """Return the error records without those of secondary failures."""
        return {each: record for each, record in self.errors().items() if not is_secondary(record)}


def waits(record: progress_file.Progress) -> bool:
    """Return whether a process waits for its place in the next world."""
    return record.phase == "waiting"


def stays(record: progress_file.Progress) -> bool:
    """Return whether a process will wait for the next world once it notices that its own has ended."""
    return record.keeps and record.phase not in ("started", "open")


def is_cause(failure: Mapping[str, Any]) -> bool:
    return not failure["echo"] and not was_interrupted(failure)


def was_interrupted(failure: Mapping[str, Any]) -> bool:
    return bool(failure["code"] == contract.Exit.INTERRUPTED)


def is_secondary(record: Mapping[str, Any]) -> bool:
    """Return whether an error record comes from a collective that broke because another rank had ended."""
    if record.get("type") not in _COLLECTIVE:
        return False
    # A failed save's message names only the ranks; the reason is in its traceback.
    text = record["traceback"] if record["type"] == "CheckpointException" else record["message"]
    return _SECONDARY.search(text) is not None


def cause(record: Mapping[str, Any]) -> FailureCause:
    """Return a failure's cause: wrong bits, a full disk, out of memory, or unknown. Drivers report a lack of memory as a
    RuntimeError."""
    kind, message = record.get("type"), record.get("message", "")
    if kind == WrongBits.__name__:
        return FailureCause.BITS
    if kind == "OSError" and any(f"[Errno {number}]" in message for number in (errno.ENOSPC, errno.EDQUOT)):
        return FailureCause.DISK_FULL
    starved = kind in _MEMORY or (kind == "RuntimeError" and "error: out of memory" in message)
    return FailureCause.OUT_OF_MEMORY if starved else FailureCause.UNKNOWN


def _early(record: Mapping[str, Any], reached: progress_file.Progress | None) -> bool:
    """Return whether a failure occurred before the first step and was probably caused by the script, not by the machine."""
    began = record.get("age_s", math.inf) < EARLY_S if reached is None else reached.phase in ("open", "restore", "first step")
    return began and record.get("type") in _SCRIPT_ERRORS and not record.get("kept")
