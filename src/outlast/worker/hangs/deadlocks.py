"""Detects deadlocks between ranks within seconds, and writes each rank's heartbeat (`progress_file.Pulse`).

In every training process, a thread samples the main thread about once a second (`hangs.motion`). If the main thread has not moved
for a while, the sampling thread publishes the rank's state in the process group's store: the current call to the session, the
place in the script, and the number of collectives begun in each group. If no rank moves, each rank compares all states. If rank A
waits in a call that rank B has not begun, and B in a collective that A has not begun, neither can ever continue: the script has a
bug, and ends with an error message. If all ranks have begun the same operation, some are merely slow, or hang
(`hangs.hang_limit`). `training.collective_calls` detects ranks in different calls to a session, without this thread.
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

from outlast.base.typed_json import decode
from outlast.job import contract
from outlast.job.workerfiles import progress_file
from outlast.worker.hangs import motion

LOOK_S = 1.0
STILL_S = 3.0
"""Seconds without motion of the main thread after which the rank publishes its state."""
_STDLIB = os.path.dirname(os.__file__) + os.sep
_STILL = "outlast/still"
"""Key for the number of still ranks, and prefix for the keys with their states."""
PATIENCE = 3.0
"""Maximum interval in seconds between comparisons with the other ranks, reached in long waits."""
_ANSWER_S = 10.0
FORGET_S = 0.5
_WHERE_LIMIT = 600
_COUNTED = frozenset(
    [
        *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
        *("gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    ]
)
"""Collectives in torch.distributed that all ranks must call, and that torch counts before they wait."""


@dataclasses.dataclass(frozen=True)
class RankState:
    """The state of a rank whose main thread is not moving."""

    calls: int = 0
    call: str = ""
    """The current call to the session, with its place, such as `run.save(20) (train.py:20)`; empty outside calls."""
    waits: str = ""
    """The collective in which the rank waits, such as `all_reduce`; empty in a call to the session, or if there is none."""
    at: str = ""
    """The script's current line, such as `loss.backward() (train.py:12)`."""
    begun: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of collectives begun in each of the script's groups; empty if they cannot be counted."""
    looks: int = 0
    """Number of this rank's reports so far, to tell repeated reports apart."""
    blocks: bool = True
    """Whether the main thread waits for the last collective begun. A GPU's backward pass waits in other threads."""


def deadlock(states: Sequence[RankState]) -> str:
    """Return an error message if these ranks, none of which moves, certainly wait for each other by mistake; empty otherwise."""
    calling = [each for each in states if each.call]
    others = [each for each in states if not each.call]
    if not others or not all(each.waits for each in others):
        return ""
    if calling:
        # One rank waits in a call, the other in a collective, and neither has begun the other's operation.
        certain = all(any(one.calls > other.calls and _ahead(other, one) for one in calling) for other in others)
    else:
        names = {each.waits for each in others}
        # Ranks that have begun fewer collectives may only be late.
        same = all(each.blocks and each.begun and each.begun == others[0].begun for each in others)
        certain = same and len(names) > 1
    if not certain:
        return ""
    places = [each.call or each.at for each in states]
    if len(set(places)) == 1:  # a single line with several collectives
        places = [f"{each.waits}() of {each.at}" for each in states]
    return f"{listed(places, 'in')}, and wait for each other; every rank must make the same calls in the same order"


def _ahead(one: RankState, other: RankState) -> bool:
    """Return whether `one` has begun a collective that `other` has not."""
    return any(count > other.begun[group] for group, count in one.begun.items() if group in other.begun)


def listed(places: Sequence[str], word: str, *, first: int = 0) -> str:
    """Return the ranks' places as text, such as `rank 0 is in this, ranks 1 and 2 are in that`."""
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places, first):
        ranks.setdefault(place, []).append(rank)
    return ", ".join(f"{_named(group)} {word} {place}" for place, group in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    if len(ranks) > 4:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ...) are"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} are"


def _frame(thread: int) -> FrameType | None:
    """Return a thread's current frame, with garbage collection disabled: in older Pythons, a finalizer could wait forever for a
    lock that this call holds (https://github.com/python/cpython/issues/106883)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


class Watch:
    """Watches this process's main thread. There is one instance per process (`watch`)."""

    def __init__(self) -> None:
        self.call = ""
        self.calls = 0
        self.signs = 0
        self.held = 0
        self.broken = False
        """True if a collective, and perhaps the store, has failed."""
        self.code = contract.Exit.MISCONFIGURED
        """Exit code for a script that has made a mistake."""
        self.record: Callable[[str], object] = lambda _: None
        """Callback for the error message, called before a deadlocked process ends."""
        self.last: Callable[[], object] = lambda: None
        """Callback that waits for the save in progress, called after `record`."""
        self._own_groups: set[str] = set()
        self._store: Any = None
        self._rank, self._ranks, self._group = 0, 1, 0
        """Our rank in the store's process group, and the group's size and identity."""
        self._published = False
        """True while this rank's state is published. The other ranks then count this rank as still."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._looks = 0
        self._suspected: list[tuple[RankState, int]] = []
        """All ranks' states in a suspected deadlock, each with the rank's number of reports."""

    def own(self, group: Any) -> Any:
        """Mark a group as Outlast's own, so that its collectives are not counted. Returns the group."""
        self._own_groups.add(sys.modules["torch.distributed"].distributed_c10d._world.pg_names.get(group, ""))
        return group

    def start(self) -> None:
        """Start the watch unless it is running. Does nothing for a single rank without an agent."""
        state = os.environ.get(contract.Env.STATE)
        if self._thread is None and (state or int(os.environ.get("WORLD_SIZE", "1")) > 1):
            self._rank = int(os.environ.get("RANK", "0"))
            atexit.register(self._leave)
            self._thread = threading.Thread(target=self._look, args=(state,), name="outlast-stall", daemon=True)
            self._thread.start()

    def forget(self) -> bool:
        """Forget the last world, before this process waits for the next one. Returns False if that takes longer than FORGET_S,
        since the watch's thread still tries to connect to the last world's store."""
        if not self._lock.acquire(timeout=FORGET_S):
            return False
        self.call, self.calls, self.broken = "", 0, False
        self._own_groups.clear()
        self._store, self._group, self._published, self._suspected = None, 0, False, []
        self._lock.release()
        return True

    def alive(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the process counts as moving."""
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
        pulse = progress_file.Beat(Path(state), int(os.environ.get("LOCAL_RANK", "0"))) if state else None
        motions = motion.Motion()
        last = since = time.monotonic()
        pause, at = LOOK_S, ""
        while True:
            with self._lock:
                frame = _frame(main)
                if frame is None:
                    return
                now = time.monotonic()
                self._connect()
                sample = self._sample(frame)
                moves = motions.moves(sample, now - last, motion.work) or self.held > 0
                last, waits = now, False
                if moves:
                    since, pause, at = now, LOOK_S, ""
                    self._suspected = []
                    self._withdraw()
                elif now - since >= STILL_S:
                    waits, at = self._on_standstill(main, frame, sample)
                    pause = min(PATIENCE, pause * 1.5) if now - since > 10 * STILL_S else LOOK_S
                if pulse:
                    pulse.write(moves or waits, at, 0 if self._group else int(os.environ.get("WORLD_SIZE", "1")))
                del frame
            time.sleep(pause)

    def _on_standstill(self, main: int, frame: FrameType, sample: motion.Sample) -> tuple[bool, str]:
        """Publish that the main thread is still, and end this process if the ranks wait for each other. Returns whether the main
        thread waits for a moving rank, and the place of this rank or of all ranks."""
        state = self._state(frame)
        at = listed([state.call or state.at], "in", first=self._rank)
        if _joins(frame):
            return True, at  # torch's own timeout ends this wait
        try:
            states = self._compare(state)
            if states and self._still(main, sample) and (sentence := self._deadlock(states)) and self._still(main, sample):
                end(sentence)
        except Exception:  # the store has ended, and other ranks with it; torch raises various errors
            return False, at
        return states is None, listed([each.call or each.at for each in states], "in")[:_WHERE_LIMIT] if states else at

    def _sample(self, frame: FrameType) -> motion.Sample:
        """Take a sample. It must be cheap, since it runs once a second during training."""
        spins = motion.accelerator() is not None or where(frame)[0] in _COUNTED
        return motion.Sample(motion.place(frame), self._counts(), motion.cpu_s(), spins)

    def _counts(self) -> tuple[Any, ...]:
        return self.calls, self.signs, *self.begun().items()

    def _still(self, main: int, sample: motion.Sample) -> bool:
        """Return whether the main thread has been still since the sample. If so, all observations since then are consistent."""
        return motion.place(_frame(main)) == sample.place and self._counts() == sample.counts

    def _connect(self) -> None:
        dist: Any = sys.modules.get("torch.distributed")
        with contextlib.suppress(Exception):  # the group is being created or destroyed right now
            if dist is None or not dist.is_initialized() or dist.get_world_size() == 1:
                return
            if self._group != (group := id(dist.distributed_c10d._get_default_group())):
                self._rank, self._ranks, self._group, self._published = dist.get_rank(), dist.get_world_size(), group, False
                self._store = store()
                self._store.set_timeout(datetime.timedelta(seconds=_ANSWER_S))

    def _withdraw(self) -> None:
        if self._published:
            with contextlib.suppress(Exception):  # the store has ended
                self._store.add(_STILL, -1)
                self._published = False

    def _leave(self) -> None:
        """Publish that the script has ended, since other ranks may wait for this rank forever."""
        # Keep the lock: a thread that returns from torch during interpreter shutdown would end the process with SIGABRT.
        if self._lock.acquire(timeout=_ANSWER_S) and self._store is not None and not self.broken:
            with contextlib.suppress(Exception):
                self._publish(RankState(at="its exit, at the end of the script"))

    def _publish(self, state: RankState) -> None:
        self._store.set(f"{_STILL}/{self._rank}", json.dumps(dataclasses.asdict(state)))
        if not self._published:
            self._store.add(_STILL, 1)
            self._published = True

    def _state(self, frame: FrameType) -> RankState:
        waits, at = where(frame)
        blocks = waits not in ("backward", "forward") or motion.accelerator() is None
        self._looks += 1
        return RankState(self.calls, self.call, waits, at, self.begun(), self._looks, blocks)

    def _compare(self, own: RankState) -> list[RankState] | None:
        """Publish our state. Returns all ranks' states if all are still, None if any rank moves, and an empty list without a
        store. A state remains in the store while its rank is stopped, and for up to PATIENCE after the rank has moved."""
        if self._store is None:
            return []
        self._publish(own)
        if self._store.add(_STILL, 0) < self._ranks:
            return None
        texts = self._store.multi_get([f"{_STILL}/{rank}" for rank in range(self._ranks)])
        return [decode(RankState, json.loads(text)) for text in texts]

    def _deadlock(self, states: Sequence[RankState]) -> str:
        """Return the error message for a deadlock, or an empty string. All ranks must have reported the same states twice, since
        only this proves that these states were simultaneous."""
        sentence, last = deadlock(states), self._suspected
        if not sentence or [dataclasses.replace(each, looks=0) for each in states] != [state for state, _ in last]:
            self._suspected = [(dataclasses.replace(each, looks=0), each.looks) for each in states] if sentence else []
            return ""
        return sentence if all(each.looks > looks for each, (_, looks) in zip(states, last, strict=True)) else ""

    def begun(self) -> dict[str, int]:
        """Return the number of collectives begun, keyed by group; empty if not all of them can be counted."""
        begun: dict[str, int] = {}
        dist: Any = sys.modules.get("torch.distributed")
        try:
            for group, name in list(dist.distributed_c10d._world.pg_names.items()) if dist else []:
                if name not in self._own_groups:
                    backends = (group._get_backend(device) for device in group._device_types)
                    begun[name] = sum(backend._get_sequence_number_for_group() for backend in backends)
        except (AttributeError, RuntimeError):  # torch is only partly imported, or a backend does not count
            return {}
        return begun


_watch = Watch()


def watch() -> Watch:
    """Return this process's watch; `start` starts it."""
    return _watch


def store() -> Any:
    """Return a separate connection to the process group's store, since the script's own may be blocked; None without a store."""
    dist = sys.modules["torch.distributed"]
    try:
        return dist.distributed_c10d._get_default_store().clone()
    except (AttributeError, RuntimeError, NotImplementedError):  # a store without a server
        return None


def where(frame: FrameType | None) -> tuple[str, str]:
    """Return the collective that a thread waits in (empty if none), and the script line that it is on."""
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
    """Return a frame's current line, or the first line of its function if the frame is between two lines."""
    return frame.f_lineno or frame.f_code.co_firstlineno  # typed as int, but may be None


def _call(frame: FrameType) -> str:
    """Return the source of a frame's current call if its line starts with `if`, or an empty string."""
    first, last, start, end = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    text = linecache.getline(frame.f_code.co_filename, _line(frame))
    if first is None or first != last or start is None or not text.lstrip().startswith("if "):
        return ""
    return text.encode()[start:end].decode(errors="replace")


def _foreign(frame: FrameType) -> bool:
    """Return whether a frame runs library code, not the script's."""
    name = frame.f_globals.get("__name__", "")
    file = frame.f_code.co_filename
    return name.split(".")[0] in ("torch", "outlast") or "site-packages" in file or file.startswith((_STDLIB, "<frozen"))


def _joins(frame: FrameType | None) -> bool:
    """Return whether a thread is waiting for the other ranks to join a process group."""
    while frame is not None:
        if frame.f_code.co_name in ("init_process_group", "new_group") and frame.f_globals["__name__"].startswith("torch."):
            return True
        frame = frame.f_back
    return False


def end(sentence: str) -> None:
    """End this process with an error message, since no exception reaches its waiting main thread."""
    _watch.record(sentence)
    print(sentence, file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):  # nothing may keep this process from ending
        _watch.last()
        sys.stdout.flush()
    os._exit(_watch.code)
