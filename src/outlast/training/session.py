"""A session: one training process's part in a world, from opening the process group to leaving it.

    with session.open(seed=0) as run:
        net = run.ddp(model.to(run.device))
        step = run.resume({"model": net, "optimizer": optimizer, "stream": stream})
        for batch in stream:
            ...
            step += 1
            run.log(step, loss=loss)
            leaving = run.interrupted()
            if leaving or run.due(step):
                run.save(step)

Works under Outlast, under torchrun, and as a plain `python train.py` (a world of one). What stays true: a run that is killed and resumed
with as many ranks computes the same bits as one that was left alone, and all ranks agree at every step whether to save and whether to leave.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outlast import checkpoints, contract
from outlast.contract import Env, Exit
from outlast.errors import OutlastError, Superseded
from outlast.runtime.ledger import Ledger
from outlast.runtime.progress import Progress, Writer
from outlast.training import checkpoint

log = logging.getLogger("outlast")

_LAST_SAVE_S = 10.0
"""How long a process that dies of an exception waits for the save in flight; arbitrary."""


def open(seed: int = 0) -> Session:
    """Join the world that the environment describes; use as a context manager.

    `seed` makes models come out the same on every rank; from `Session.resume` on, every rank draws random numbers of its own. Exits with
    78 and one sentence when the output cannot be written.
    """
    return Session(seed)


class Session:
    """This process among its ranks. Made by `open`."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    generation: int
    """Number of this world among those of the run."""
    output: Path
    data: Path | None
    step: int = 0
    """The last step that was logged or restored."""

    def __init__(self, seed: int) -> None:
        env = os.environ
        self.seed = seed
        self.rank, self.world_size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
        self.local_rank = int(env.get("LOCAL_RANK", 0))
        self.output = Path(env.get(Env.OUTPUT, "out"))
        self.data = Path(env[Env.DATA]) if Env.DATA in env else None
        self._run = env.get(Env.RUN, "")
        self._notice = Path(env[Env.NOTICE]) if Env.NOTICE in env else None
        self._every = Every.parse(env.get(Env.CHECKPOINT_EVERY, "300s"))
        self._state: Mapping[str, Any] = {}
        self._steps: int | None = None
        self._committed = 0
        self._leaving = False
        self._agreed: tuple[bool, bool] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        env = os.environ
        directory = self.output / contract.CHECKPOINTS
        self._make_writable(directory)
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", self.local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        if "RANK" in env:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        said = env.get(Env.GENERATION)
        number = torch.tensor(int(said or 0))
        if self.rank == 0:
            number.fill_(checkpoints.take(directory, self._run, int(said) if said else None))
        if not said:
            dist.broadcast(number, 0)
        self.generation = int(number)
        self._ledger = Ledger(Path(env.get(Env.LEDGER, self.output / contract.LEDGER)), f"rank-{self.rank}")
        self._progress = Writer(Path(env[Env.STATE]), self.local_rank) if Env.STATE in env else None
        self._record = Progress(self.generation, self.rank, "open")
        self._saver = checkpoint.Saver(directory, self._run, self.generation, int(env.get(Env.CHECKPOINT_KEEP, 3)), self._saved)
        self._ledger.write("session", generation=self.generation, rank=self.rank, world_size=self.world_size)
        self._metrics = self.output / contract.METRICS
        self._report(phase="open")
        _seed(self.seed)
        self._last_save, self._last_saved_step = time.monotonic(), 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._settle(self._saver.wait())
            self._report(phase="done")
        else:
            self._saver.wait(_LAST_SAVE_S)  # the others' threads go on saving although their steps wait for ours
        if kind is None or self._leaving:
            dist.destroy_process_group()
        self._ledger.close()
        if self._progress:
            self._progress.close()

    def _make_writable(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            print(f"outlast: output {self.output} cannot be written: {error.strerror}; name a directory that can", file=sys.stderr)
            raise SystemExit(Exit.MISCONFIGURED) from error

    def ddp(self, model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        """`DistributedDataParallel(model, **options)` that adds up gradients in the same order in every generation.

        DDP lays out its gradient buckets anew after its first backward pass, by the order in which gradients were ready. With three or
        more ranks another layout means another order of additions and other bits, so the first step after a resume would differ.
        A backward pass over nothing lets that happen before the first step.
        """
        if options.get("static_graph"):
            raise OutlastError("ddp(static_graph=True) cannot resume bit-identically; leave static_graph out")
        net = DistributedDataParallel(model, device_ids=[self.device.index] if self.device.type == "cuda" else None, **options)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kept = vars(model).pop("forward", None)
        vars(model)["forward"] = lambda: sum(parameter.sum().abs().float().to(self.device) * 0 for parameter in parameters)
        try:
            net().backward()
        finally:
            del vars(model)["forward"]
            if kept is not None:
                vars(model)["forward"] = kept
        for parameter in parameters:
            parameter.grad = None
        return net

    def resume(self, state: Mapping[str, Any]) -> int:
        """Restore the newest valid checkpoint of this run into `state` and return its step, or 0 when there is none.

        `state` holds modules, optimizers and whatever else has `state_dict` and `load_state_dict`, by name; `save` saves the same.
        Damaged checkpoints are reported and skipped. A collective.
        """
        self._state = dict(state)
        self._steps = next((thing.total_steps for thing in state.values() if hasattr(thing, "total_steps")), None)
        self._report(phase="restore", steps=self._steps)
        if self.rank == 0:
            self._ledger.write("restoring", generation=self.generation)
        chosen = self._chosen()
        if chosen is None or not checkpoint.restore(chosen.path, state, self.rank):
            _seed(self.seed, self.rank, chosen.step if chosen else 0)
        self.step = self._committed = self._last_saved_step = chosen.step if chosen else 0
        if self.rank == 0:
            self._ledger.write("restored", generation=self.generation, step=self.step, path=str(chosen.path) if chosen else None)
            _forget_after(self._metrics, self.step)
        self._last_save = time.monotonic()
        self._report(phase="train", step=self.step, committed=self._committed)
        return self.step

    def _chosen(self) -> checkpoints.Checkpoint | None:
        """The newest checkpoint that is valid for every rank. Rank 0 proposes; the ranks of a worker share the work of checking."""
        proposals: list[Any] = [None]
        if self.rank == 0:
            found = checkpoints.list_(self.output / contract.CHECKPOINTS)
            proposals = [[c for c in reversed(found) if c.problem or c.run == self._run]]
        dist.broadcast_object_list(proposals, src=0)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        for proposal in proposals[0]:
            problem = proposal.problem or checkpoints.verify(proposal.path, self.local_rank % local, local)
            problems: list[Any] = [None] * self.world_size
            dist.all_gather_object(problems, problem)
            problem = next((problem for problem in problems if problem), None)
            if problem is None:
                return proposal  # type: ignore[no-any-return]
            if self.rank == 0:
                self._ledger.write("damaged", path=str(proposal.path), reason=problem)
                log.warning("outlast: %s is damaged and skipped: %s", proposal.path, problem)
        return None

    def log(self, step: int, *, reduce: bool = False, **values: Any) -> dict[str, float]:
        """Say that `step` has ended, with numbers for `metrics.jsonl` (rank 0 writes it); returns them as floats.

        With `reduce` they are averaged over the ranks, which makes this a collective: a sum of `loss * share` becomes the mean loss over
        the global batch.
        """
        self.step = step
        numbers = {name: float(value) for name, value in values.items()}
        if reduce and numbers:
            total = torch.tensor(list(numbers.values()), dtype=torch.float64)
            dist.all_reduce(total)
            numbers = dict(zip(numbers, (total / self.world_size).tolist(), strict=True))
        if self.rank == 0:
            self._ledger.write("step", generation=self.generation, step=step)
            if numbers:
                self._append({"step": step, "time": round(time.time(), 3), "generation": self.generation, **numbers})
        self._report(step=step)
        return numbers

    def interrupted(self) -> bool:
        """Whether to save and leave, the same answer on every rank. A collective, once per step."""
        asked = self._notice is not None and self._notice.exists()
        late = self._every.seconds is not None and time.monotonic() - self._last_save >= self._every.seconds
        votes = torch.tensor([asked, late and self.rank == 0, self._saver.busy], dtype=torch.uint8)
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        asked, late, busy = votes.tolist()
        self._leaving = self._leaving or bool(asked)
        self._agreed = bool(late), bool(busy)
        if not busy:
            self._settle(self._saver.wait())
        return self._leaving

    def due(self, step: int) -> bool:
        """Whether it is time for the next checkpoint, the same answer on every rank. Not while the previous one is being saved."""
        if self._agreed is None:
            self.interrupted()
        assert self._agreed is not None
        (late, busy), self._agreed = self._agreed, None
        if self._every.steps is not None:
            late = step // self._every.steps > self._last_saved_step // self._every.steps
        return late and not busy

    def save(self, step: int) -> None:
        """Save the state given to `resume` as that after `step`. Training goes on once it is copied; a thread does the rest. A collective.

        When the session is to leave (`interrupted`), waits until the checkpoint is committed and raises SystemExit(75) inside the
        with-block. A save that fails, because the disk is full for instance, is reported and training goes on.
        """
        if not self._state:
            raise OutlastError("save() does not know what to save; call resume() with the state first")
        begun = time.monotonic()
        if self.rank == 0:
            self._ledger.write("saving", step=step)
        self._settle(self._saver.wait())
        if self._committed != step:
            self._saver.begin(step, checkpoint.capture(self._state, self.rank, self.world_size))
        self._last_save, self._last_saved_step = time.monotonic(), step
        if self._leaving:
            self._report(phase="save")
            self._settle(self._saver.wait())
        if self.rank == 0:
            self._ledger.write("staged", step=step, stall_s=round(time.monotonic() - begun, 6))
        if self._leaving:
            self._leave(step)

    def _leave(self, step: int) -> None:
        reason = f"saved step {step}"
        if self._committed != step:
            reason = f"step {step} could not be saved, {step - self._committed} steps are lost"
            if self.rank == 0:
                log.error("outlast: leaving: %s; the run goes on from step %d", reason, self._committed)
        if self.rank == 0:
            self._ledger.write("interrupted", step=step, reason=reason)
        raise SystemExit(Exit.INTERRUPTED)

    def _settle(self, outcome: checkpoint.Outcome | None) -> None:
        """Take note of how a save ended; called on every rank, by the thread that trains."""
        if outcome is None:
            return
        if outcome.superseded:
            raise Superseded(outcome.reason)
        if outcome.committed:
            self._committed = max(self._committed, outcome.step)
            self._report(committed=self._committed, warning="")
        else:
            self._report(warning=f"step {outcome.step} could not be saved: {outcome.reason}")

    def _saved(self, kind: str, **fields: Any) -> None:
        """What became of a save, on rank 0, in the saving thread."""
        if self.rank == 0:
            self._ledger.write(kind, **fields)
        if kind == "committed":
            self._report(committed=fields["step"])
        elif self.rank == 0:
            log.warning("outlast: step %d could not be saved: %s; training goes on", fields["step"], fields["reason"])

    def _report(self, **changes: Any) -> None:
        """Rewrite this process's progress record; two threads do."""
        with self._lock:
            self._record = dataclasses.replace(self._record, **changes)
            if self._progress:
                self._progress.write(self._record)

    def _append(self, line: dict[str, Any]) -> None:
        """Add to the metrics; a full disk must not end the run."""
        try:
            with self._metrics.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._report(warning=f"{self._metrics.name} cannot be written: {error.strerror}")


@dataclasses.dataclass(frozen=True)
class Every:
    """How often to save: by the clock or by steps."""

    seconds: float | None = None
    steps: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `300s` or `200 steps`."""
        if text.endswith("steps"):
            return cls(steps=int(text.removesuffix("steps")))
        return cls(seconds=float(text.removesuffix("s")))


def _seed(seed: int, rank: int | None = None, step: int = 0) -> None:
    """Seed all generators: alike on every rank, or with `rank` as a function of (seed, rank, step)."""
    if rank is not None:
        digest = hashlib.shake_256(f"outlast rank {seed} {rank} {step}".encode()).digest(8)
        seed = int.from_bytes(digest, "little")
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def _forget_after(metrics: Path, step: int) -> None:
    """Cut the lines of later steps off the metrics: these steps come again."""
    try:
        with metrics.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
            end = len(lines)
            while end:
                start = lines.rfind(b"\n", 0, end - 1) + 1
                try:
                    if json.loads(lines[start:end])["step"] <= step:
                        break
                except ValueError:  # torn: its writer was killed
                    pass
                end = start
            os.ftruncate(file.fileno(), end)
    except (FileNotFoundError, ValueError):  # there is none, or it is empty
        return
