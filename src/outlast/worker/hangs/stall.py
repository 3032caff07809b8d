"""Deadlocks between ranks, detected in seconds; and the heartbeat of each rank, from which hangs are judged.

A thread of every training process samples its main thread about once a second (`hangs.motion`) and writes to a small file
whether it moves: the heartbeat for the agent (`progress.Pulse`). If it has not moved for a while, the thread writes to the store
of the process group which call of the session it is in, where in the script, and how many collectives of each group it has begun.
While another rank moves, those that wait for it count as moving. If none moves, each knows where the others are. If one waits in
a call that another has not begun, and that one in a collective that the first has not begun, neither can ever continue: that is a
mistake in the script, which ends with an error message. A slow rank, network or disk looks different: there the others have begun
what one waits for. Everything else is a hang after `hang.limit` (`hangs.rule`).

Works with sessions and with plain scripts. While all ranks move, nothing is sent.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import gc
import itertools
import json
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from outlast.job import contract
from outlast.job.workerfiles import progress
from outlast.worker.hangs import motion

LOOK_S = 1.0
STILL_S = 3.0
"""Time without motion of the main thread after which the other ranks are asked."""
_STDLIB = os.path.dirname(os.__file__) + os.sep
_STILL = "outlast/still"
"""Key of the number of ranks that stand still; below it is the state of each."""
PATIENCE = 3.0
"""Longest interval between two comparisons with the others, for long waits."""
_ANSWER_S = 10.0
"""Timeout of requests to the store."""
_WHERE_LIMIT = 600
"""Limit of characters for the places of all ranks."""
_COUNTED = frozenset(
    [
        *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
        *("gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    ]
)
"""Functions of torch.distributed that every rank calls, and that are counted before they wait."""


@dataclasses.dataclass(frozen=True)
class Standing:
    """The state of a rank whose main thread does not move."""

    calls: int = 0
    """Calls of the session that it has begun."""
    call: str = ""
    """The one it is in, with its place: `run.save(20) (train.py:20)`; empty outside of them."""
    waits: str = ""
    """The collective it is in otherwise: `all_reduce`; empty when it does something else."""
    at: str = ""
    """The script's line that it is in: `loss.backward() (train.py:12)`."""
    begun: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Collectives begun of each group that the script has made; empty when they are not counted."""
    looks: int = 0
    """Number of its reports: a state that is not reported again may be over."""
    blocks: bool = True
    """Whether being in `waits` means to wait for what was begun last. Not so in the backward pass of a GPU, which the main thread
    leaves to others."""


def deadlock(standings: Sequence[Standing]) -> str:
    """The error message if no rank moves and they wait for each other by mistake; empty if that is not certain."""
    calling = [each for each in standings if each.call]
    others = [each for each in standings if not each.call]
    if not others or not all(each.waits for each in others):
        return ""
    if calling:
        certain = all(
            any(one.calls > other.calls and _ahead(other, one) for one in calling) for other in others
        )  # the one waits in a call, the other in a collective, and neither has begun what the other waits in
    else:
        names = {each.waits for each in others}
        same = all(each.blocks and each.begun and each.begun == others[0].begun for each in others)  # else some are only late
        certain = same and len(names) > 1
    if not certain:
        return ""
    said = [each.call or each.at for each in standings]
    if len(set(said)) == 1:  # one line with several collectives
        said = [f"{each.waits}() of {each.at}" for each in standings]
    return f"{listed(said, 'in')}, and wait for each other; every rank must make the same calls in the same order"


def _ahead(one: Standing, other: Standing) -> bool:
    """Whether `one` has begun a collective that `other` has not."""
    return any(count > other.begun[group] for group, count in one.begun.items() if group in other.begun)


def listed(said: Sequence[str], word: str, *, first: int = 0) -> str:
    """`rank 0 is in this, ranks 1 and 2 are in that`."""
    ranks: dict[str, list[int]] = {}
    for rank, what in enumerate(said, first):
        ranks.setdefault(what, []).append(rank)
    return ", ".join(f"{_named(those)} {word} {what}" for what, those in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    if len(ranks) > 4:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ...) are"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} are"


def _frame(thread: int) -> FrameType | None:
    """Where a thread is. Nothing is collected meanwhile: in older Pythons a finalizer that runs then may wait for ever for the
    lock that this call holds, and the process with it (https://github.com/python/cpython/issues/106883)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


class Watch:
    """Watches the main thread of this process. There is one, see `watch`."""

    def __init__(self) -> None:
        self.call = ""
        """The call of the session that the main thread is in, with its place."""
        self.calls = 0
        """Calls of the session that it has begun."""
        self.signs = 0
        """Number of its signs of life (`alive`)."""
        self.held = 0
        """Number of open `alive` contexts: while there is one, it counts as moving."""
        self.broken = False
        """Whether a collective has broken, and with it perhaps the store."""
        self.record: Callable[[str], object] = lambda _: None
        """Called with the error message before a deadlocked process ends."""
        self.last: Callable[[], object] = lambda: None
        """Called then: waits for the save in progress."""
        self._ours: set[str] = set()
        self._store: Any = None
        self._rank, self._ranks, self._group = 0, 1, 0
        """Of the process group that the store belongs to; the last one is its identity."""
        self._published = False
        """Whether the other ranks count this one among those that do not move."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._looks = 0
        self._suspected: list[tuple[Standing, int]] = []
        """The reports of all ranks when they may be in a deadlock, and the number of reports of each by then."""

    def own(self, group: Any) -> Any:
        """Mark a group as Outlast's own, whose collectives are not counted. Returns it."""
        self._ours.add(sys.modules["torch.distributed"].distributed_c10d._world.pg_names.get(group, ""))
        return group

    def start(self) -> None:
        """Start watching, unless it is started, or this is the only rank and has no agent."""
        state = os.environ.get(contract.Env.STATE)
        if self._thread is None and (state or int(os.environ.get("WORLD_SIZE", "1")) > 1):
            self._rank = int(os.environ.get("RANK", "0"))
            atexit.register(self._leave)
            self._thread = threading.Thread(target=self._look, args=(state,), name="outlast-stall", daemon=True)
            self._thread.start()

    def alive(self) -> contextlib.AbstractContextManager[None]:
        """Count as moving now, and until the returned context is closed."""
        self.signs += 1
        return self._hold()

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1
            self.signs += 1

    def _look(self, state: str | None) -> None:
        main = threading.main_thread().ident
        assert main is not None
        pulse = progress.Beat(Path(state), int(os.environ.get("LOCAL_RANK", "0"))) if state else None
        motions = motion.Motion()
        before = since = time.monotonic()
        pause, at = LOOK_S, ""
        while True:
            with self._lock:
                frame = _frame(main)
                if frame is None:
                    return
                now = time.monotonic()
                self._connect()
                sight = self._sight(frame)
                moves = motions.moves(sight, now - before, motion.work) or self.held > 0
                before, waits = now, False
                if moves:
                    since, pause, at = now, LOOK_S, ""
                    self._suspected = []
                    self._move()
                elif now - since >= STILL_S:
                    waits, at = self._stands(main, frame, sight)
                    pause = min(PATIENCE, pause * 1.5) if now - since > 10 * STILL_S else LOOK_S
                if pulse:
                    pulse.write(moves or waits, at, 0 if self._group else int(os.environ.get("WORLD_SIZE", "1")))
                del frame
            time.sleep(pause)

    def _stands(self, main: int, frame: FrameType, sight: motion.Sight) -> tuple[bool, str]:
        """Report a main thread that does not move. Returns whether it waits for a rank that moves, and where it or all ranks are.

        Ends this process when the ranks wait for each other.
        """
        standing = self._standing(frame)
        at = listed([standing.call or standing.at], "in", first=self._rank)
        if _joins(frame):
            return True, at  # torch's own time-out ends that
        try:
            found = self._compared(standing)
            if found and self._still(main, sight) and (sentence := self._deadlock(found)) and self._still(main, sight):
                end(sentence)
        except Exception:  # torch raises what it likes when a store is gone; then others have ended
            return False, at
        return found is None, listed([each.call or each.at for each in found], "in")[:_WHERE_LIMIT] if found else at

    def _sight(self, frame: FrameType) -> motion.Sight:
        """Take a sample. Cheap, since it is done once a second while training runs."""
        spins = motion.accelerator() is not None or where(frame)[0] in _COUNTED
        return motion.Sight(motion.place(frame), self._counts(), motion.cpu_s(), spins)

    def _counts(self) -> tuple[Any, ...]:
        return self.calls, self.signs, *self._begun().items()

    def _still(self, main: int, sight: motion.Sight) -> bool:
        """Whether the main thread has not moved since the sample, so that all that was read of it is consistent."""
        return motion.place(_frame(main)) == sight.place and self._counts() == sight.counts

    def _connect(self) -> None:
        """Open an own connection to the store of the process group as soon as there is one; later it may be gone."""
        dist: Any = sys.modules.get("torch.distributed")
        with contextlib.suppress(Exception):  # it is made or destroyed this very moment
            if dist is None or not dist.is_initialized() or dist.get_world_size() == 1:
                return
            if self._group != (group := id(dist.distributed_c10d._get_default_group())):
                self._rank, self._ranks, self._group, self._published = dist.get_rank(), dist.get_world_size(), group, False
                self._store = store()
                self._store.set_timeout(datetime.timedelta(seconds=_ANSWER_S))

    def _move(self) -> None:
        """Withdraw this rank's report."""
        if self._published:
            with contextlib.suppress(Exception):  # the store is gone
                self._store.add(_STILL, -1)
                self._published = False

    def _leave(self) -> None:
        """Report the end of the script: ranks that wait for this one wait for ever. If the store is gone, they notice that."""
        # The lock is kept: a thread that returns from torch while the interpreter shuts down would end the process with SIGABRT.
        if self._lock.acquire(timeout=_ANSWER_S) and self._store is not None and not self.broken:
            with contextlib.suppress(Exception):
                self._publish(Standing(at="its exit, at the end of the script"))

    def _publish(self, standing: Standing) -> None:
        self._store.set(f"{_STILL}/{self._rank}", json.dumps(dataclasses.asdict(standing)))
        if not self._published:
            self._store.add(_STILL, 1)
            self._published = True

    def _standing(self, frame: FrameType) -> Standing:
        waits, at = where(frame)
        blocks = waits not in ("backward", "forward") or motion.accelerator() is None
        self._looks += 1
        return Standing(self.calls, self.call, waits, at, self._begun(), self._looks, blocks)

    def _compared(self, ours: Standing) -> list[Standing] | None:
        """Report our state. Returns the states of all ranks if none moves, None if some move, and nothing if there are no others.

        A report stays while its rank is stopped, and for up to PATIENCE after it has moved on.
        """
        if self._store is None:
            return []
        self._publish(ours)
        if self._store.add(_STILL, 0) < self._ranks:
            return None
        texts = self._store.multi_get([f"{_STILL}/{rank}" for rank in range(self._ranks)])
        return [Standing(**json.loads(text)) for text in texts]

    def _deadlock(self, found: Sequence[Standing]) -> str:
        """The error message, once all ranks have repeated the same report: then all were there at one moment."""
        sentence, before = deadlock(found), self._suspected
        if not sentence or [dataclasses.replace(each, looks=0) for each in found] != [standing for standing, _ in before]:
            self._suspected = [(dataclasses.replace(each, looks=0), each.looks) for each in found] if sentence else []
            return ""
        return sentence if all(each.looks > looks for each, (_, looks) in zip(found, before, strict=True)) else ""

    def _begun(self) -> dict[str, int]:
        """Collectives begun, by group; empty when they cannot all be counted."""
        begun: dict[str, int] = {}
        dist: Any = sys.modules.get("torch.distributed")
        try:
            for group, name in list(dist.distributed_c10d._world.pg_names.items()) if dist else []:
                if name not in self._ours:
                    backends = (group._get_backend(device) for device in group._device_types)
                    begun[name] = sum(backend._get_sequence_number_for_group() for backend in backends)
        except (AttributeError, RuntimeError):  # half imported, or a backend that does not count
            return {}
        return begun


_watch = Watch()


def watch() -> Watch:
    """The watch of this process; `start` starts it."""
    return _watch


def store() -> Any:
    """An own connection to the store of the process group, since the script's may be blocked; None if there is none."""
    dist = sys.modules["torch.distributed"]
    try:
        return dist.distributed_c10d._get_default_store().clone()
    except (AttributeError, RuntimeError, NotImplementedError):  # a store that is no server's
        return None


def where(frame: FrameType | None) -> tuple[str, str]:
    """The collective that a thread waits in, if any, and the script's line it is in."""
    waits = ""
    if frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if function == "_engine_run_backward":
            waits = "backward"
        elif module == "torch.nn.parallel.distributed":
            waits = "forward"
        elif module.startswith("torch.distributed.") and function in _COUNTED:
            waits = function
    while frame is not None and frame.f_back is not None and _foreign(frame):
        frame = frame.f_back
    if frame is None:
        return waits, ""
    file, line = frame.f_code.co_filename, _line(frame)
    text = _call(frame) or linecache.getline(file, line).strip()
    return waits, f"{text[:60] or frame.f_code.co_name} ({os.path.basename(file)}:{line})"


def _line(frame: FrameType) -> int:
    """The line that a frame is at. A running frame has none between two lines; then that of its function."""
    return frame.f_lineno or frame.f_code.co_firstlineno  # typed as int, but may be None


def _call(frame: FrameType) -> str:
    """The call that a frame is in, where it stands behind an `if` in one line."""
    at = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    first, last, start, end = at
    text = linecache.getline(frame.f_code.co_filename, _line(frame))
    if first is None or first != last or start is None or not text.lstrip().startswith("if "):
        return ""
    return text.encode()[start:end].decode(errors="replace")


def _foreign(frame: FrameType) -> bool:
    """Whether this is code of a library rather than of the script."""
    name = frame.f_globals.get("__name__", "")
    file = frame.f_code.co_filename
    return name.split(".")[0] in ("torch", "outlast") or "site-packages" in file or file.startswith((_STDLIB, "<frozen"))


def _joins(frame: FrameType | None) -> bool:
    """Whether a thread waits for the other ranks to join a process group."""
    while frame is not None:
        if frame.f_code.co_name in ("init_process_group", "new_group") and frame.f_globals["__name__"].startswith("torch."):
            return True
        frame = frame.f_back
    return False


def end(sentence: str) -> None:
    """End this process with an error message: its main thread waits where no exception reaches it."""
    _watch.record(sentence)
    print(sentence, file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):  # whatever happens, the end comes
        _watch.last()
        sys.stdout.flush()
    os._exit(contract.Exit.MISCONFIGURED)
