"""Lets a training process continue in the next world, instead of being replaced, if its script allows that.

At a planned change of the world, the ranks save, close their groups and wait. The agent gives each process its place in the next
world, where the session opens again and loads its state, as in a new process. A waiting process can be killed at any time, since
its state is saved. See docs/decisions/0072-survivors-keep-their-process.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outlast.base.errors import NotRestored
from outlast.job.contract import Env, Exit
from outlast.job.workerfiles import next_world
from outlast.rendezvous import world_store
from outlast.training import ddp
from outlast.training.collective_calls import Calls
from outlast.training.samples.stream import Stream
from outlast.worker.hangs import deadlocks
from outlast.worker.launch import os_calls, script_files, training_process

log = logging.getLogger("outlast")

_PAUSE_S, _MAX_PAUSE_S = 0.005, 0.1
"""Shortest and longest interval in seconds between checks for the place in the next world."""
_BACKENDS = "gloo", "nccl"
_OPTIONS = {"broadcast_buffers", "bucket_cap_mb", "dim", "find_unused_parameters", "gradient_as_bucket_view"}
"""DDP options that may be passed again when DDP is initialized again."""
_OPEN, _DDP, _RESUME = "session.open(keep_process=True)", "run.ddp()", "run.resume("


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts about a script that decide whether its process can be kept. The default values let the process continue."""

    agent: bool = True
    """True if an agent has started this process."""
    calls: Sequence[str] = (_DDP, _RESUME)
    collectives: int | None = 0
    """Number of other collectives since the session was opened; None if unknown."""
    groups: int = 1
    """Number of process groups other than the session's own."""
    streams: int = 1
    """Number of Streams in the state; 0 until `for batch in stream` reads one."""
    foreign: Sequence[str] = ()
    """Names of objects in the state that are bound to this world, such as FSDP2's modules."""
    hooks: bool = False
    """True if a module wrapped by `run.ddp` has hooks, or options that add hooks or name a process group."""
    backend: str = "gloo"
    compiled: bool = False
    """True if torch has compiled code in this process. A new process would compile it for other shapes, which gives other
    bits."""
    thread: bool = False
    """True if a thread other than the session's reads the Stream."""


def refusal(facts: Facts) -> str:
    """Return why the process cannot continue in the next world, or an empty string if it can. A new process waits in each
    collective before its first batch, and a kept process repeats only those of `run.ddp` and `run.resume`, so there may be no
    others."""
    *first, last = facts.calls or [""]
    others = [call for call in first if call != _DDP] or [last][: not last.startswith(_RESUME)]
    if not facts.agent:
        return "no agent of Outlast has started it"
    if facts.backend not in _BACKENDS:
        return f"the backend {facts.backend} cannot be left and joined again; {' and '.join(_BACKENDS)} can"
    if facts.foreign:
        return f"{facts.foreign[0]!r} in the state is bound to this world; only models of run.ddp() and Streams can change worlds"
    if facts.streams != 1:
        return f"`for batch in stream` reads {facts.streams} Streams of the state; it must read one"
    if facts.compiled:
        return "torch.compile or torch.jit has compiled code, and would compile it otherwise than in a new process"
    if facts.thread:
        return "another thread than the session's reads the Stream"
    if facts.hooks:
        return f"a model of run.ddp() has hooks, or options other than {', '.join(sorted(_OPTIONS))}"
    if others:
        return (
            f"before its first batch, the script calls {others[0] or 'nothing'}; only run.ddp() and a last run.resume() may come"
        )
    if facts.collectives is None or facts.collectives or facts.groups != 1:
        return "the script has collectives before its first batch, or process groups of its own"
    return ""


class Keeper:
    """The part of a session that outlives a world if its process continues in the next one."""

    def __init__(self) -> None:
        self.models: list[tuple[DistributedDataParallel, Mapping[str, Any]]] = []
        self.departure: int | None = None
        """The saved step after which this process leaves its world; None if it stays."""
        self.refusal: str | None = None
        """Why the process cannot continue in the next world; empty if it can, None before the first batch."""
        self.warning = ""
        self._facts = Facts()
        self._thread = threading.get_ident()
        self._calls: list[str] = []
        self._batches = 0
        self._mixed = False
        """True if a process in this world was started in an earlier one."""
        self._opened_at = self._resumes_at = _counted()
        """Number of collectives when the session was opened, and when its `resume` began; None if unknown."""
        self._own = 0

    def opened(self, meet: Callable[[str, float], Sequence[float]]) -> None:
        """Start counting the calls before the first batch. Raises OutlastError if only some ranks keep their processes. All ranks
        must call this. If kept and new processes make different calls before the second batch, the world restarts instead of
        ending the job."""
        self._mixed = any(meet(_OPEN, training_process.kept))
        deadlocks.watch().call = ""
        deadlocks.watch().code = Exit.FAILED if self._mixed else Exit.MISCONFIGURED
        self._calls, self._own, self._batches, self._opened_at = [], 0, 0, _counted()

    def meet(self, calls: Calls, call: str, position: int, numbers: Sequence[float]) -> list[float]:
        """Record a call, and make it with `Calls.meet`. All ranks must call this."""
        if self.refusal is None:
            self._calls.append(call)
        if call.startswith(_RESUME):
            self._resumes_at = _counted()
        return calls.meet(call, position, numbers)

    def wrap(self, model: torch.nn.Module, device: torch.device, options: Mapping[str, Any]) -> DistributedDataParallel:
        """Wrap and record the model. All ranks must call this."""
        before = _counted()
        net = ddp.wrap(model, device, **options)
        self._own += _difference(before)
        self.models.append((net, options))
        if self.refusal is not None:
            self.refusal = "the script calls run.ddp() after its first batch"
        return net

    def wrap_again(self, device: torch.device, meet: Callable[[str], object]) -> None:
        """Bind all models to the current world, with the same collectives as in a new process."""
        for net, options in self.models:
            meet(_DDP)
            ddp.wrap_again(net, device, **options)

    def resumed(self, state: Mapping[str, Any], between: Callable[[], bool]) -> None:
        """Make a state's Streams call `between`, which may change the world, before each batch."""
        self._own += _difference(self._resumes_at)
        for thing in state.values():
            if isinstance(thing, Stream):
                thing._between = between

    def resume(self, resume: Callable[[Mapping[str, Any]], int], state: Mapping[str, Any], step: int) -> None:
        """Load the state saved at `step`. Raises NotRestored if `resume` loads another step. All ranks must call this."""
        with same_groups(state):
            restored = resume(state)
        if restored != step:
            raise NotRestored(f"step {step} was saved, and only step {restored} can be read; the next start goes on there")

    def before_batch(self, state: Mapping[str, Any], meet: Callable[[str], object]) -> str:
        """Decide before the first batch whether this process can continue in the next world, and return a warning once if it
        cannot. In a world with kept processes, the first batch is a collective, so a new process that makes another call is
        detected."""
        self._batches, known = self._batches + 1, self.warning
        if self._batches > 1:
            deadlocks.watch().code = Exit.MISCONFIGURED
        if self.refusal is None:
            counted = None if self._opened_at is None else _difference(self._opened_at) - self._own
            self._facts = Facts(training_process.is_rank, self._calls, counted, backend=dist.get_backend())
            self.look(state)
        elif self.departure is not None or threading.get_ident() != self._thread:
            self.look(state)
        if self._batches == 1 and self._mixed:
            meet("for batch in stream")
            deadlocks.watch().call = ""
        return "" if known else self.warning

    def look(self, state: Mapping[str, Any]) -> bool:
        """Return whether anything prevents the process from continuing in the next world."""
        models = [model for model, _ in self.models]
        facts = dataclasses.replace(
            self._facts,
            groups=len(deadlocks.watch().begun()),
            streams=sum(isinstance(thing, Stream) for thing in state.values()) if self._batches else 0,
            foreign=[name for name, thing in state.items() if _bound(thing, models)],
            hooks=any(_hooks(model) or options.keys() - _OPTIONS for model, options in self.models),
            compiled=_compiled(state),
            thread=threading.get_ident() != self._thread,
        )
        self.refusal = self.refusal or refusal(facts)
        if self.refusal and training_process.is_rank and not self.warning:  # otherwise no agent changes this process's world
            self.warning = f"each change of the world starts new processes, although keep_process is set: {self.refusal}"
            if dist.get_rank() == 0:
                log.warning("outlast: %s", self.warning)
        return self.refusal != ""

    def wait(self, local_rank: int) -> None:
        """Wait until the agent has given this process its place in the next world, and take it. Raises RuntimeError."""
        state, start, pause_s = Path(os.environ[Env.STATE]), next_world.start(os.environ), _PAUSE_S
        with deadlocks.watch().alive():
            while not (place := next_world.read(state, local_rank, start)):
                time.sleep(pause_s)
                pause_s = min(_MAX_PAUSE_S, 1.1 * pause_s)
        training_process.kept = True
        deadlocks.watch().forget()
        os.environ.update(place)
        os_calls.entitle(training_process.title(training_process.command, os.environ))
        script_files.stays(os.environ, world_store.client)
        training_process.enter(state)


@contextlib.contextmanager
def same_groups(state: Mapping[str, Any]) -> Iterator[None]:
    """Keep the dictionaries of each optimizer's parameter groups while the block loads a state, since the script may refer to
    them."""
    optimizers = [thing for thing in state.values() if isinstance(thing, torch.optim.Optimizer)]
    held = [(optimizer, optimizer.state, optimizer.param_groups, list(optimizer.param_groups)) for optimizer in optimizers]
    yield
    for optimizer, values, groups, each in held:
        for own, loaded in zip(each, [dict(group) for group in optimizer.param_groups], strict=True):
            own.clear()
            own.update(loaded)
        loaded_values = dict(optimizer.state)
        values.clear()
        values.update(loaded_values)
        groups[:] = each
        optimizer.state, optimizer.param_groups = values, groups


def _counted() -> int | None:
    """Return the number of collectives in the script's groups so far, or None if unknown."""
    counts = deadlocks.watch().begun()
    return sum(counts.values()) if counts else None


def _difference(before: int | None) -> int:
    return (_counted() or 0) - (before or 0)


def _bound(thing: Any, models: Sequence[DistributedDataParallel]) -> bool:
    """Return whether an object is bound to its world by anything but these models."""
    if isinstance(thing, torch.nn.Module):
        parts = list(thing.modules())
        tensors = [*thing.parameters(), *thing.buffers()]
        wraps = any(isinstance(part, DistributedDataParallel) and part not in models for part in parts)
        return wraps or any(hasattr(tensor, "device_mesh") for tensor in tensors)
    names = "not_shardable", "process_group", "device_mesh"
    return not isinstance(thing, Stream) and any(hasattr(thing, name) for name in names)


def _hooks(model: DistributedDataParallel) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_comm_hooks")
    return any(getattr(model, name, None) for name in names)


def _compiled(state: Mapping[str, Any]) -> bool:
    """Return whether torch has compiled code in this process, or will."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    modules = [part for thing in state.values() if isinstance(thing, torch.nn.Module) for part in thing.modules()]
    return bool(dynamo and getattr(dynamo, "FRAME_COUNTER", 1)) or any(
        isinstance(part, torch.jit.ScriptModule) or getattr(part, "_compiled_call_impl", None) or hasattr(part, "_orig_mod")
        for part in modules
    )
