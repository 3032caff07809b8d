"""Mistakes in training scripts, and their error messages.

Each check raises OutlastError if the run would train on the wrong samples or save an incomplete state without any other error.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from outlast.base.errors import OutlastError
from outlast.training.collective_calls import place
from outlast.training.samples import stream as streams
from outlast.training.samples.stream import Stream
from outlast.training.state.stateful_loader import Stateful
from outlast.worker.hangs import deadlocks

State = Mapping[str, Any]
Method = TypeVar("Method", bound=Callable[..., Any])

_LENGTHS = ("total_steps", "T_max", "total_iters")


def public(example: str) -> Callable[[Method], Method]:
    """Return a decorator that makes a method raise OutlastError, with `example` in the message, for arguments that do not fit."""

    def decorated(method: Method) -> Method:
        @functools.wraps(method)
        def called(*args: Any, **options: Any) -> Any:
            try:
                return method(*args, **options)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # from within the method
                raise OutlastError(f"{error} ({place()}); write {example}") from None
            finally:
                deadlocks.watch().call = ""

        return cast(Method, called)

    return decorated


def whole(step: Any) -> int:
    """Convert the script's step to an int. Raises OutlastError if it is not a whole number."""
    try:
        return operator.index(step)
    except TypeError:
        raise OutlastError(
            f"step ({streams.kind(step)}) must be a whole number, the optimizer steps done ({place()}); "
            "count it: step = run.resume(...), and step += 1 in the loop"
        ) from None


def number(name: str, value: Any) -> float:
    """Convert a logged value to a float. Raises OutlastError if it is not a single number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise OutlastError(
            f"{name} ({streams.kind(value)}) must be a single number to be logged ({place()}); reduce it first, e.g. value.mean()"
        ) from None


def check_mapping(state: Any) -> None:
    """Raise OutlastError if `resume`'s argument is not a mapping."""
    if not isinstance(state, Mapping):
        raise OutlastError(
            f"resume() got {streams.kind(state)} and needs names for what it restores ({place()}); "
            'write run.resume({"model": net, "optimizer": optimizer, "stream": stream})'
        )


def check_sharding(state: State) -> None:
    """Make reading the state's streams raise OutlastError if several ranks share one copy of a model."""
    problem = next((problem for name, thing in state.items() if (problem := _sharding_problem(name, thing))), "")
    for stream in streams_of(state):
        stream.not_shardable = problem


def _sharding_problem(name: str, thing: Any) -> str:
    if not isinstance(thing, torch.nn.Module):
        return ""
    ranks = dist.get_world_size()
    groups = [part.process_group.size() for part in thing.modules() if isinstance(part, DistributedDataParallel)]
    sharded: set[int] = set()
    for part in thing.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:  # older torch has one
                if group is not None:
                    groups.append(group.mesh_info.mesh.size())
                    sharded.update(id(parameter) for parameter in part.parameters())
    groups += [1 for each in thing.parameters() if isinstance(each, DTensor) and id(each) not in sharded]
    least = min(groups, default=ranks)
    if least == ranks:
        return ""
    return (
        f"module {name!r} is data-parallel over {least} of {ranks} ranks, and a Stream gives each rank samples of its own: "
        "those that share one copy of the model would train on different ones; use fully_shard or run.ddp over all ranks, or "
        "deal by hand: `for batch in stream.batches(rank, ranks)`, counted among the copies of the model"
    )


def streams_of(state: State) -> list[Stream | Stateful]:
    return [thing for thing in state.values() if isinstance(thing, Stream | Stateful)]


def described(state: State) -> list[str]:
    """Return the names in a state, with fingerprints of its data, which must be the same on all ranks."""
    prints = {name: thing.fingerprint for name, thing in state.items() if isinstance(thing, Stream)}
    return [f"{name} over data {prints[name]}" if prints.get(name) else name for name in state]


def lengths(state: State) -> dict[str, dict[str, int]]:
    """Return each scheduler's number of steps, keyed by name and attribute."""
    return {
        name: {key: vars(thing)[key] for key in _LENGTHS if isinstance(vars(thing).get(key), int)}
        for name, thing in state.items()
        if isinstance(thing, LRScheduler)
    }


def changed(state: State, made: Mapping[str, Mapping[str, int]]) -> str:
    """Return a warning if a resumed run has a new batch size, or an empty string. `made` is the result of `lengths` before the
    resume. Raises OutlastError if the new batch size changes the number of steps with which a scheduler was saved."""
    warning = ""
    for stream in streams_of(state):
        if stream.saved_with is None or stream.saved_with[0] == stream.batch:
            continue
        (batch, before), after = stream.saved_with, stream.total_steps
        warning = (
            f"batch is {stream.batch} from step {stream.step} on, it was {batch}; the run has {after} steps instead of {before}"
        )
        saved = lengths(state)
        for name in made:
            if before != after and saved[name] != made[name]:
                kind = type(state[name]).__name__
                raise OutlastError(
                    f"{warning}, and {name!r} ({kind}) was saved for the old number; go on with batch {batch}, or take {name!r} "
                    f"out of resume() and make it afterwards: {kind}(..., last_epoch=step - 1) with stream.total_steps"
                )
    return warning


def check_read(state: State, before: Mapping[Any, int]) -> None:
    """Raise OutlastError if a stream that is being read was not saved. `before` is the result of `saves` before the state was
    captured."""
    for stream in streams.being_read():
        if stream not in streams_of(state) and stream.saves == before.get(stream, 0):
            raise OutlastError(
                f"a Stream that is being read (batch {stream.step} of {stream.total_steps}) is not among what resume() was given "
                f"({', '.join(state)}), so its samples would come again after a restart ({place()}); "
                'add it: run.resume({..., "stream": stream})'
            )


def saves() -> dict[Any, int]:
    """Return the number of `state_dict` calls on each stream that is being read."""
    return {stream: stream.saves for stream in streams.being_read()}


def hint(error: BaseException, state: State) -> str:
    """Return a hint about the mistake that probably caused the script's final error, or an empty string."""
    message = str(error)
    if isinstance(error, ValueError | TypeError) and "unpack" in message:
        sample = next((stream.sample for stream in [*streams_of(state), *streams.being_read()] if stream.sample), "")
        if sample:
            return (
                f"outlast: batch.split() gives (data, share) pairs, and data here is {sample}: unpack just that, "
                "e.g. `for data, share in batch.split(net):`, or return pairs from the dataset"
            )
    if isinstance(error, ValueError) and "initialize the default process group twice" in message:
        return "outlast: session.open() has joined the process group already; remove init_process_group() from the script"
    return ""
