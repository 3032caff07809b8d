"""Calls a training function in one world after another, in the same process (`session.run`).

The function ends in one of two ways that do not end the process: `Session.save` has left the world, or the loss of another rank
has broken a collective. Then the process leaves its group, gives up what the function has made, and waits. The agent gives it its
place in the next world, where the function begins like in a new process. A waiting process can be killed at any time, since all
that counts is in a checkpoint or in the agent's memory. See docs/decisions/0072-survivors-keep-their-process.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from outlast.base.errors import NotRestored, causes
from outlast.job.contract import Env, Exit
from outlast.job.workerfiles import next_world, notice_file, progress_file
from outlast.rendezvous import world_store
from outlast.training.samples import seeded
from outlast.training.state import background_save
from outlast.worker.hangs import deadlocks
from outlast.worker.launch import os_calls, script_files, training_process

T = TypeVar("T")
_PAUSE_S, _MAX_PAUSE_S = 0.005, 0.1
"""Shortest and longest interval in seconds between checks for the place in the next world."""
_BREAKS = "torch.distributed", "torch.nn.parallel", "torch.autograd", "torch._ops", "outlast.training"
"""Modules in which a collective breaks."""
_within = _outside = False
"""Whether `run` is calling a function, and whether a session was opened outside of one, which a new process would do again."""
_decision: tuple[BaseException, bool] | None = None


class Left(SystemExit):
    """Raised by a session that has left its world."""


def keeps() -> bool:
    """Return whether this process can continue in the next world: an agent has started it, and `run` calls the function. Every
    session calls this as it opens."""
    global _outside
    _outside = _outside or not _within
    return _within and training_process.is_rank


def run(train: Callable[[], T]) -> T:
    """Call `train` in this world and in each later one, until it returns or raises an exception of its own."""
    global _within, _outside, _decision
    if _within or _outside or not training_process.is_rank:
        return train()
    _within, generators = True, seeded.generators()
    try:
        while True:
            try:
                return train()
            except (Exception, SystemExit) as error:
                if not stays(error):
                    raise
                if not isinstance(error, SystemExit):
                    training_process.report(error)
                for each in causes(error):
                    traceback.clear_frames(each.__traceback__)
            _decision = None
            _give_up()
            _wait()
            seeded.set_generators(generators)
    finally:
        _within, _outside, _decision = False, True, None


def stays(error: BaseException) -> bool:
    """Return whether `run` calls its function again after this error."""
    global _decision
    if _decision is None or _decision[0] is not error:  # the session closes if this is true, so the answer must stay the same
        _decision = error, _stays(error)
    return _decision[1]


def _stays(error: BaseException) -> bool:
    if not (_within and training_process.is_rank) or any(each.name == background_save.THREAD for each in threading.enumerate()):
        return False
    record = progress_file.read(Path(os.environ[Env.STATE]), int(os.environ["LOCAL_RANK"]))
    if record is None or not (record.snapshot or record.committed):  # `check` would refuse
        return False
    if isinstance(error, SystemExit):
        return isinstance(error, Left) and notice_file.read(Path(os.environ[Env.NOTICE])).get("kind") != "leave"
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return training_process.is_secondary(error) and frames[-1].startswith(_BREAKS)


def check(state: Mapping[str, Any], source: str) -> None:
    """Check that a kept process has loaded `state` from a `source`, since what was made outside of the function is no longer as a
    new process would make it. Gradients are in no state, so they are cleared. Raises NotRestored."""
    if not source:
        raise NotRestored("no saved state is left, so the run begins anew, in new processes")
    for thing in state.values():
        if isinstance(thing, torch.nn.Module):
            thing.zero_grad()


def _give_up() -> None:
    """Leave the process group, and release what the function has made and what libraries remember of this world."""
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()
    if "torch._dynamo" in sys.modules:  # a new process compiles for the shapes of its world
        torch._dynamo.reset()
    if "torch.distributed.tensor" in sys.modules:  # its caches have our place in a mesh, and equal meshes are one key
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # since torch 2.12
    gc.collect()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # its connections are broken
            dist.destroy_process_group()
        if dist.is_initialized():
            raise SystemExit(Exit.INTERRUPTED)


def _wait() -> None:
    """Wait until the agent has given this process its place in the next world, and take it. Raises RuntimeError."""
    state, local_rank = Path(os.environ[Env.STATE]), int(os.environ["LOCAL_RANK"])
    start, pause_s, watch = next_world.start(os.environ), _PAUSE_S, deadlocks.watch()
    if not watch.forget():
        raise SystemExit(Exit.INTERRUPTED)
    if record := progress_file.read(state, local_rank):
        with contextlib.closing(progress_file.Writer(state, local_rank)) as writer:
            writer.write(dataclasses.replace(record, phase="waiting"))
    with watch.alive():
        while not (place := next_world.read(state, local_rank, start)):
            time.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, 1.1 * pause_s)
    training_process.kept = True
    watch.code = Exit.FAILED  # a new process tells whether the script has the mistake
    os.environ.update(place)
    os_calls.entitle(training_process.title(training_process.command, os.environ))
    script_files.stays(os.environ, world_store.client)
    training_process.enter(state)
