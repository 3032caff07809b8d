"""Ranks that wait for each other: found in seconds, by what each says of itself in the store of the process group.

A thread of every training process looks at its main thread once a second. When that has not moved for a while, it writes down
which call of the session it is in, where in the script, and how many collectives of each group it has begun. If all ranks stand
still, and one waits in a call that another has not begun, and that one in a collective that the first has not begun, neither
will ever go on: that is a mistake in the script, and ends it with a sentence. A slow rank, a slow network and a slow disk look
different: then what one waits for, the others have begun.

Works for sessions and for scripts that know nothing of Outlast. While training moves, nothing is sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

LOOK_S = 1.0
STILL_S = 3.0
"""How long the main thread must not have moved before we ask what the others do."""
BUSY = 0.2
"""Share of a core's time; a thread that uses more computes."""
PATIENCE = 10.0
"""Longest pause between two looks at the others, for waits that take long and are none of our business."""
_COUNTED = frozenset(
    [
        *("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
        *("gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    ]
)
"""Functions of torch.distributed that every rank calls, and that are counted before they wait."""


@dataclasses.dataclass(frozen=True)
class Standing:
    """What a rank whose main thread does not move says of itself."""

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
    """How often it has said something: what has not been said anew may be over."""
    blocks: bool = True
    """Whether being in `waits` means to wait for what was begun last. Not so in the backward pass of a GPU, which the main thread
    leaves to others."""


def deadlock(standings: Sequence[Standing]) -> str:
    """The sentence about ranks of which none moves, and which wait for each other by mistake; empty if that is not certain."""
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
    return f"{listed(said, 'in')}, and wait for each other; every rank must make the same calls in the same order"


def _ahead(one: Standing, other: Standing) -> bool:
    """Whether `one` has begun a collective that `other` has not."""
    return any(count > other.begun[group] for group, count in one.begun.items() if group in other.begun)


def listed(said: Sequence[str], word: str) -> str:
    """`rank 0 is in this, ranks 1 and 2 are in that`."""
    ranks: dict[str, list[int]] = {}
    for rank, what in enumerate(said):
        ranks.setdefault(what, []).append(rank)
    return ", ".join(f"{_named(those)} {word} {what}" for what, those in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    if len(ranks) > 4:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ...) are"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} are"


# This process


class Watch:
    """Looks after the main thread of this process. There is one; see `watch`."""

    def __init__(self) -> None:
        self.call = ""
        """The call of the session that the main thread is in, with its place."""
        self.calls = 0
        """Calls of the session that it has begun."""
        self.last: Callable[[], object] = lambda: None
        """What is to be brought to an end before a stalled process ends: the save in flight."""
        self._ours: set[str] = set()
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._looks = 0
        self._suspected: list[tuple[Standing, int]] = []
        """Where all ranks are when that may be a deadlock, and how often each had said something by then."""

    def own(self, group: Any) -> Any:
        """Take note of a group that is not the script's; threads of ours use them at times of their own. Returns it."""
        self._ours.add(sys.modules["torch.distributed"].distributed_c10d._world.pg_names.get(group, ""))
        return group

    def start(self) -> None:
        """Begin to look, unless that has begun, or this is the only rank."""
        if self._thread is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._thread = threading.Thread(target=self._look, name="outlast-stall", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        last: tuple[Any, ...] = ()
        since = used = 0.0
        pause, said = LOOK_S, False
        while True:
            time.sleep(pause)
            frame = sys._current_frames().get(main)
            if frame is None:
                return
            now = time.monotonic()
            before, used = used, _used(main)
            begun = self._begun()
            position = (id(frame), frame.f_code, frame.f_lasti, self.calls, begun)
            if position != last or used - before > BUSY * pause:
                last, since, pause = position, now, LOOK_S
                self._suspected = []
                if said:
                    said = not self._say("")
            elif now - since >= STILL_S:
                with contextlib.suppress(Exception):  # torch raises what it likes when a store is gone; then others have ended
                    standing = self._standing(frame, begun)
                    said = True
                    if self._still(frame, position) and (sentence := self._compared(standing)) and self._still(frame, position):
                        end(sentence)
                pause = min(PATIENCE, pause * 1.5) if now - since > 10 * STILL_S else LOOK_S
            del frame

    def _still(self, frame: FrameType, position: tuple[Any, ...]) -> bool:
        """Whether the main thread is where it was: what was read of it one after another belongs together."""
        here = sys._current_frames().get(threading.main_thread().ident or 0)
        return here is frame and (frame.f_lasti, self.calls, self._begun()) == position[2:]

    def _say(self, text: str) -> bool:
        with contextlib.suppress(Exception):
            dist = sys.modules["torch.distributed"]
            self._store.set(f"outlast/still/{dist.get_rank()}", text)
            return True
        return False

    def _standing(self, frame: FrameType, begun: Mapping[str, int]) -> Standing:
        """Where we are."""
        waits, at = where(frame)
        blocks = waits not in ("backward", "forward") or not sys.modules["torch"].cuda.is_initialized()
        self._looks += 1
        return Standing(self.calls, self.call, waits, at, begun, self._looks, blocks)

    def _compared(self, ours: Standing) -> str:
        """Say where we are, and compare with the others: the sentence, once all have said the same anew since we suspected it.

        Then all were there at that moment. What one says stands while it is stopped, and for up to PATIENCE after it moved on.
        """
        dist: Any = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return ""
        ranks = dist.get_world_size()
        if self._store is None:
            self._store = store()
        if self._store is None or ranks == 1:
            return ""
        if not ours.call and not ours.waits:
            self._say("")
            return ""
        self._say(json.dumps(dataclasses.asdict(ours)))
        keys = [f"outlast/still/{rank}" for rank in range(ranks)]
        texts = self._store.multi_get(keys) if self._store.check(keys) else [b""]
        found = [Standing(**json.loads(text)) for text in texts] if all(texts) else []
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
    """The one of this process; `start` makes it look."""
    return _watch


def store() -> Any:
    """A connection of our own to the store of the process group: the script's may be busy waiting. None when there is none."""
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
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return waits, f"{text[:60] or frame.f_code.co_name} ({os.path.basename(file)}:{line})"


def _foreign(frame: FrameType) -> bool:
    """Whether this is code of a library, and not the script's."""
    name = frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("torch", "outlast", "contextlib", "threading") or "site-packages" in frame.f_code.co_filename


def _used(thread: int) -> float:
    """Seconds of a core that a thread has used."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):  # not on this system: then only its position tells
        return 0.0


_enders: list[Callable[[str], None]] = []


def on_end(record: Callable[[str], None]) -> None:
    """Have `record` told the sentence before a stalled process ends."""
    _enders.append(record)


def end(sentence: str) -> None:
    """End this process: its main thread waits where no exception reaches it."""
    from outlast import contract

    for record in _enders:
        record(sentence)
    print(sentence, file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):  # whatever happens, the end comes
        _watch.last()
        sys.stdout.flush()
    os._exit(contract.Exit.MISCONFIGURED)
