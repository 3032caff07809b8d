"""Copies beside the computation of an accelerator, on simulated streams: whichever runs first, a snapshot is of its step.

An operation on a stream runs as late as it may, when somebody waits for an event. See `test_gpu.py` for real streams.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.training import device
from ranks import Grown, Rank, a_model


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
