"""What a snapshot holds, whatever a script does to its state between two of them: copied into memory, and read back.

Copies beside the computation of an accelerator are on simulated streams, where an operation runs as late as it may, when somebody
waits for an event. See `test_gpu.py` for real streams.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.job.ledger import Ledger
from outlast.storage.snapshots import client
from outlast.training import device
from outlast.training.state import snapshot_capture
from outlast.training.state.snapshot_taking import Place, Snapshots, significant_delay, steady
from ranks import Grown, Rank, a_model


class Odd(torch.nn.Module):
    """Tensors of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turned = torch.nn.Parameter(torch.randn(6, 4).t())
        self.wide = torch.nn.Parameter(torch.randn(300, 300).t())
        self.brief = torch.nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.tied = self.brief
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("waves", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))


def same(a: Any, b: Any) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[key].reshape(-1).contiguous().view(torch.uint8), theirs[key].reshape(-1).contiguous().view(torch.uint8))
        for key in ours
    )


def test_tensors_of_any_kind_come_back_as_they_were(rank: Rank) -> None:
    net, again = Odd(), Odd()
    for parameter in again.parameters():
        parameter.data.zero_()
    rank.begin({"model": net})
    rank.take()
    rank.loaded({"model": again})
    assert same(net, again)


def a_step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def new_memory(net: Any, optimizer: Any) -> None:
    net[0].weight.data = net[0].weight.data.clone() + 1


def other_shape(net: Any, optimizer: Any) -> None:
    net[0].weight.data = net[0].weight.data.t()


def loaded_state(net: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def unfrozen(net: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": net[1].parameters(), "lr": 0.5})


def moved(net: Any, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


ADAM, SGD = torch.optim.Adam, torch.optim.SGD


@pytest.mark.parametrize(
    ("change", "kind"),
    [(new_memory, ADAM), (other_shape, SGD), (loaded_state, ADAM), (unfrozen, SGD), (unfrozen, ADAM), (moved, SGD)],
)
def test_what_a_script_changes_between_two_snapshots_is_in_the_second(
    rank: Rank, change: Callable[..., None], kind: type[torch.optim.Optimizer]
) -> None:
    def fresh() -> dict[str, Any]:
        net = a_model()
        optimizer = kind(net[0].parameters(), lr=0.1)  # type: ignore[call-arg, index]
        if change is moved:
            unfrozen(net, optimizer)
        return {"model": net, "optimizer": optimizer}

    state = fresh()
    net, optimizer = state["model"], state["optimizer"]
    rank.begin(state)
    for _ in range(2):
        a_step(net, optimizer)
        rank.take()
    change(net, optimizer)
    rank.take()
    a_step(net, optimizer)
    rank.take()
    again = fresh()
    if change in (unfrozen, moved):
        change(again["model"], again["optimizer"])
    rank.loaded(again)
    assert same(net, again["model"])
    for _ in range(2):
        for each in (state, again):
            a_step(each["model"], each["optimizer"])
    assert same(net, again["model"])


class Meeting:
    """A thing whose state_dict is a collective."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_every_rank_asks_things_for_their_state_as_it_may_be_a_collective(rank: Rank) -> None:
    thing = Meeting()
    rank.begin({"thing": thing, "model": a_model()}, rank=1)
    for step in range(1, 4):
        rank.capture.prepare(b"{}")
        assert thing.asked == step


def maps() -> int:
    """How many rooms this process has mapped."""
    return Path("/proc/self/maps").read_text().count("outlast-snapshot")


def test_objects_that_grow_steadily_seldom_need_another_room() -> None:
    sizes = range(1 << 20, 2 << 20, 1 << 10)
    rooms = [snapshot_capture.size(snapshot_capture.Content("unique", []), {"lines": bytes(size)}) for size in sizes]
    assert len(set(rooms)) <= 17
    assert all(size < room <= size * 9 / 8 + 1 for size, room in zip(sizes, rooms, strict=True))


class Broken:
    """A thing that has no state yet."""

    def state_dict(self) -> dict[str, int]:
        raise RuntimeError("consolidate first")

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def the_snapshots(connected: client.Client | None, tmp_path: Path) -> Snapshots:
    return Snapshots(connected, Place("r", 1, 1, 0, 0, 0, 1), Ledger(tmp_path / "ledger", "rank-0"), lambda **changes: None)


class Loop:
    """A training loop of one rank, as far as snapshots see it. Training never waits: what asks the agent does so in a thread."""

    def __init__(self, ours: Snapshots, connected: client.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("outlast.training.state.snapshot_taking.SHARE", float("inf"))
        self.ours, self.step, self.now = ours, 0, 0.0
        ours._clock = lambda: self.now
        exchange = connected._exchange

        def asked(message: dict[str, Any]) -> dict[str, Any]:
            assert threading.current_thread() is not threading.main_thread(), "training waits for the agent"
            return exchange(message)

        monkeypatch.setattr(connected, "_exchange", asked)

    def boundary(self) -> None:
        self.step += 1
        self.ours.count(self.ours.votes())
        self.ours.boundary(self.step)

    def until(self, true: Callable[[], bool]) -> None:
        """Go on until something is so."""
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline
            self.boundary()
            time.sleep(0.002)

    def complete(self) -> None:
        """Go on until another snapshot is complete."""
        before = self.ours._complete
        self.until(lambda: self.ours._complete > before)


@pytest.fixture
def loop(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(the_snapshots(rank.client, tmp_path), rank.client, monkeypatch)


def test_a_state_that_cannot_be_copied_ends_the_snapshots_for_a_while_and_not_the_training(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    loop.ours.begin({"thing": Broken()}, (0, 0), dict)
    for _ in range(5):
        loop.boundary()
    sentence = "the state of step 1 cannot be copied: RuntimeError('consolidate first')"
    assert [record.getMessage() for record in caplog.records] == [f"outlast: no snapshots are taken for 10 minutes: {sentence}"]


def test_after_a_refusal_memory_is_given_back_and_it_is_tried_again_at_growing_intervals(
    loop: Loop, rank: Rank, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is complete stays."""
    reserve, requests = rank.client.reserve, list[int]()

    def counted(*request: Any) -> None:
        requests.append(loop.step)
        reserve(*request)

    monkeypatch.setattr(rank.client, "reserve", counted)
    net, ours = torch.nn.Linear(100, 100), loop.ours
    gc.collect()
    mapped = maps()
    ours.begin({"model": net}, (0, 0), dict)
    for _ in range(3):
        loop.complete()
    rooms = rank.server.rooms
    free, rooms.headroom = rooms.headroom, lambda: 0
    net.weight = torch.nn.Parameter(torch.zeros(300, 300))  # needs other rooms
    requests.clear()
    for minutes in (10, 20, 40):
        loop.until(lambda: bool(caplog.records))
        assert len(requests) == 1, "memory is not requested while it is given back"
        assert (
            caplog.records[-1]
            .getMessage()
            .startswith(f"outlast: no snapshots are taken for {minutes} minutes: 0.4 MB are needed")
        )
        loop.until(lambda: [part.at for part in rooms.parts()] == [ours._complete] * 2 and len(rooms.ids()) == 2)
        gc.collect()
        assert maps() == mapped + 2, "this process, in which the agent is, too, maps nothing else"
        for now, again in ((loop.now + 60 * minutes - 1, False), (loop.now + 60 * minutes, True)):
            loop.now = now
            caplog.clear()
            requests.clear()
            loop.boundary()
            assert ours._enabled is again
    loop.until(lambda: bool(caplog.records))
    caplog.clear()
    rooms.headroom, loop.now = free, loop.now + 80 * 60
    loop.complete()
    loop.complete()
    assert caplog.messages == []
    assert ours._pause_s == 600.0
    loop.until(lambda: len(rooms.ids()) == 4)


def test_a_state_that_grows_misses_a_snapshot_and_not_more(loop: Loop, rank: Rank) -> None:
    thing, ours = Grown(), loop.ours
    ours.begin({"thing": thing, "model": a_model()}, (0, 0), dict)
    loop.complete()
    for _ in range(2):
        before = ours._complete
        thing.size *= 100
        loop.until(lambda: ours._missed)
        assert {part.at for part in rank.server.rooms.parts()} >= {before}
        loop.complete()
        assert max(part.bytes for part in rank.server.rooms.parts() if part.at == ours._complete) > thing.size


def test_what_a_step_varies_by_is_not_taken_for_what_a_snapshot_costs() -> None:
    """Steps of 100 ms that vary by 5 %, and snapshots that add nothing, or 30 ms."""
    rng = random.Random(1)
    steps = [rng.gauss(0.1, 0.005) for _ in range(31)]
    assert [significant_delay([rng.gauss(more, 0.005) for _ in range(15)], steps) > 0.01 for more in (0.0, 0.03)] == [False, True]
    found = [
        significant_delay([rng.gauss(0, 0.005) for _ in range(15)], [rng.gauss(0.1, 0.005) for _ in range(31)])
        for _ in range(200)
    ]
    assert sum(each > 0 for each in found) < 20
    assert significant_delay([1.0, 1.0], steps) == 0.0, "too few"


def test_the_interval_follows_steps_that_become_fast_while_each_has_a_snapshot(tmp_path: Path) -> None:
    ours = the_snapshots(None, tmp_path)
    ours._copies_s.append(0.005)
    for _ in range(3):
        ours._measure(1.0)
    ours._choose(0.005)
    assert ours._every == 1
    for _ in range(10):
        ours._delay_s, ours._ended = 0.0, True
        ours._measure(0.01)
    ours._choose(0.005)
    assert ours._every == 50


@pytest.mark.parametrize(("wanted", "now", "used"), [(12, 10, 12), (10, 10, 10), (8, 10, 10), (7, 10, 7), (1, 2, 1)])
def test_the_interval_grows_at_once_and_shrinks_for_more_than_noise(wanted: int, now: int, used: int) -> None:
    assert steady(wanted, now) == used


# Beside the computation of an accelerator: whichever runs first, a snapshot is of its step


class Event:
    """Of a stream."""

    def __init__(self, module: Module) -> None:
        self._module, self.done = module, False

    def record(self, stream: Stream) -> None:
        stream.queue.append(functools.partial(setattr, self, "done", True))

    def synchronize(self) -> None:
        self._module.run(until=self)


class Stream:
    """Operations in their order, and events to wait for between them."""

    def __init__(self, module: Module) -> None:
        self._module, self.queue = module, deque[Callable[[], object] | Event]()
        module.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._module)
        event.record(other)
        self.wait_event(event)

    def advance(self) -> bool:
        """Run the next operation, if it need not wait."""
        if not self.queue or (isinstance(self.queue[0], Event) and not self.queue[0].done):
            return False
        operation = self.queue.popleft()
        if not isinstance(operation, Event):
            operation()
        return True


class Module:
    """As much of a module such as `torch.cuda` as `device.CopyStream` uses."""

    def __init__(self, *, copies_first: bool) -> None:
        self.streams: list[Stream] = []
        self._copies_first = copies_first
        self._current = Stream(self)
        self.Stream, self.Event = functools.partial(Stream, self), functools.partial(Event, self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def current_stream(self) -> Stream:
        return self._current

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        assert index == 0

    def put(self, operation: Callable[[], object]) -> None:
        self._current.queue.append(operation)

    def run(self, until: Event) -> None:
        """Run one stream as far as possible before the other."""
        streams = self.streams[:: -1 if self._copies_first else 1]
        while not until.done:
            assert any(stream.advance() for stream in streams), "the streams wait for each other"


class Delayed(device.CopyStream):
    """Copies wait in their stream. All tensors count as those of an accelerator."""

    def covers(self, tensor: torch.Tensor) -> bool:
        return True

    def queue(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._module.put(lambda: device.CopyStream.queue(self, pairs))


class Accelerator(device.Device):
    """An accelerator with such streams, which pins memory."""

    def __init__(self, module: Module) -> None:
        super().__init__("fake")
        self.module, self.pinned = module, set[int]()

    def copy_stream(self) -> device.CopyStream:
        return Delayed(self.module)

    def register(self, memory: torch.Tensor) -> bool:
        assert memory.data_ptr() not in self.pinned, "what was mapped there before is still pinned"
        self.pinned.add(memory.data_ptr())
        return True

    def unregister(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


class Late(torch.optim.Optimizer):
    """Adds one to all that it has, on the stream that is current."""

    def __init__(self, parameters: Any, module: Module) -> None:
        super().__init__(parameters, {})
        self._module = module
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> None:
        for parameter, state in self.state.items():
            self._module.put(lambda parameter=parameter, state=state: (parameter.data.add_(1), state["sum"].add_(1)))


@pytest.mark.parametrize("copies_first", [False, True])
def test_what_is_copied_beside_the_next_step_is_the_state_of_its_own(rank: Rank, copies_first: bool) -> None:
    module = Module(copies_first=copies_first)

    def fresh() -> dict[str, Any]:
        net = a_model()
        for parameter in net.parameters():
            parameter.data.zero_()
        net.register_buffer("mean", torch.zeros(3))
        return {"model": net, "optimizer": Late(net.parameters(), module)}

    state = fresh()

    def a_step() -> None:
        module.put(lambda: state["model"].mean.add_(1))  # the forward pass of a batch norm
        state["optimizer"].step()

    rank.begin(state, accelerator=Accelerator(module))
    a_step()
    for step in range(1, 5):
        rank.take(meanwhile=a_step)
        again = rank.loaded(fresh())
        sums = [each["sum"] for each in again["optimizer"].state.values()]
        values = torch.cat([each.flatten() for each in (*again["model"].state_dict().values(), *sums)])
        assert values.unique().tolist() == [step]


def test_memory_is_no_longer_pinned_when_it_is_unmapped(rank: Rank) -> None:
    """Else copies would go to the memory that was mapped at the same address before."""
    thing, accelerator = Grown(), Accelerator(Module(copies_first=True))
    rank.begin({"thing": thing, "model": a_model()}, accelerator=accelerator)
    for _ in range(12):
        rank.take()
        thing.size *= 2
        mapped = {int(line.split("-")[0], 16) for line in Path("/proc/self/maps").read_text().splitlines()}
        assert accelerator.pinned <= mapped
    rank.capture.close()
    assert not accelerator.pinned
