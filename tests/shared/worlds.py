"""Worlds of real processes without agents, forked from a server that has imported torch, so that a rank starts in
milliseconds."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

import ports
from outlast.data.prepare import work_units
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.ledger import Event, read
from outlast.storage import checkpoints

fork = multiprocessing.get_context("forkserver")


@dataclasses.dataclass(frozen=True)
class Training:
    """Small run: six epochs of 150 synthetic images, dropout, a learning-rate schedule."""

    net: str = "mlp"
    """Network: mlp, conv (with batch norm) or plain (without dropout)."""
    optimizer: str = "sgd"
    """Optimizer: sgd (with momentum) or adamw."""
    batch: int = 32
    microbatch: int | None = None
    epochs: int = 4
    schedule: bool = True
    kill_at: int = 0
    """Step after which every rank of the first generation kills itself, once a checkpoint has been committed."""
    leave_at: int = 0
    """Step in which rank 0's worker gets its notice."""
    raise_at: int = 0
    limit_at: int = 0
    """First step at which rank `limited` cannot write files of more than 8 KiB, as on a full disk."""
    limited: int = 0
    unlimited_at: int = 0
    """First step at which it can write large files again."""
    hasty: bool = False
    """True to train during a save; otherwise training waits, so that saves are always at the same steps."""
    pause_s: float = 0.0
    sharded: bool = False
    """True to use FSDP2 instead of DDP."""
    eager: bool = False
    """True to take a snapshot at each step, and to be killed in any generation without waiting for a checkpoint."""
    patient: bool = False
    """True to wait in each step for the previous snapshot, so that no due snapshot is skipped."""
    reference: bool = False
    """True to record the hash of the weights after every step and after resuming."""


LAST = 20


def network(kind: str) -> Any:
    from torch import nn

    if kind == "conv":
        body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
        return nn.Sequential(*body, nn.ReLU(), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 4))
    dropout = nn.Dropout(0.1 if kind == "mlp" else 0.0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 48), nn.ReLU(), dropout, nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 4))


def hashed(net: Any, optimizer: Any) -> str:
    """Return a hash of every bit of a model and its optimizer's state; for sharded ones, of this rank's shards."""
    digest = hashlib.sha256()

    def add(tensor: Any) -> None:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(local.detach().cpu().numpy().tobytes())

    for tensor in net.state_dict().values():
        add(tensor)
    for parameter in net.parameters():
        for _, value in sorted(optimizer.state[parameter].items()):
            digest.update(b"-") if value is None else add(value)
    return digest.hexdigest()


def _sharded(net: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for part in net:
        if list(part.parameters()):
            fully_shard(part)
    return fully_shard(net)


def train(plan: Training) -> None:
    """Train as a rank. Writes `rank-R.json` and `consumed-R-GENERATION.jsonl` to the output."""
    import numpy as np
    import torch
    from torch.nn import functional as F

    from outlast.training import Stream, session
    from outlast.training.state import snapshot_taking

    if plan.eager:
        snapshot_taking.SHARE = float("inf")
    draw = np.random.default_rng(0)
    images, labels = draw.standard_normal((150, 3, 8, 8), dtype=np.float32), draw.integers(0, 4, 150)
    with session.open(seed=3, quiet=True) as run:
        net = network(plan.net).to(run.device)
        net = _sharded(net) if plan.sharded else run.ddp(net)
        module = net if plan.sharded else net.module
        sgd = plan.optimizer == "sgd"
        made = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9) if sgd else functools.partial(torch.optim.AdamW, lr=3e-3)
        optimizer = made(net.parameters())
        stream = Stream((images, labels), plan.batch, seed=1, epochs=plan.epochs, microbatch=plan.microbatch)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=stream.total_steps)
        parts = {"model": net, "optimizer": optimizer, "stream": stream, **({"schedule": schedule} if plan.schedule else {})}
        step = resumed = run.resume(parts)
        consumed = (run.output / f"consumed-{run.rank}-{run.generation}.jsonl").open("a", buffering=1)

        def record(**what: Any) -> None:
            consumed.write(json.dumps({"step": step, "generation": run.generation, **what}) + "\n")

        if plan.reference and step:
            record(weights=hashed(module, optimizer), resumed=True)
        losses = []
        for batch in stream:
            optimizer.zero_grad()
            loss = torch.zeros((), device=run.device)
            for (x, y), share in batch.split(net):
                part = F.cross_entropy(net(x), y) * share
                part.backward()
                loss += part.detach()
            optimizer.step()
            if plan.schedule:
                schedule.step()
            step += 1
            weights = {"weights": hashed(module, optimizer)} if plan.reference else {}
            record(epoch=batch.epoch, indices=batch.indices.tolist(), **weights)
            losses.append(run.log(step, loss=loss, reduce=True)["loss"])
            time.sleep(plan.pause_s)
            if step == plan.raise_at and run.rank == 1:
                raise ValueError("a bug of the user's")
            if run.rank == plan.limited and step == plan.limit_at:
                resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
            if run.rank == plan.limited and step == plan.unlimited_at:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            if run.rank == 0 and step == plan.leave_at:
                Path(os.environ[Env.NOTICE]).write_text("{}")
            while plan.patient and run._snapshots._working and not run._snapshots._replicated():
                time.sleep(0.001)
            leaving = run.interrupted()
            if leaving or run.due(step):
                run.save(step)
                while run._saver.busy and not plan.hasty:
                    time.sleep(0.001)
            if step == plan.kill_at and (run.generation == 1 or plan.eager):
                while not plan.eager and not checkpoints.list_(run.output / contract.CHECKPOINTS):
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)
        consumed.close()
        result = {"resumed": resumed, "step": step, "losses": losses, "hash": hashed(module, optimizer)}
        (run.output / f"rank-{run.rank}.json").write_text(json.dumps(result))


def steps(events: Iterable[Event]) -> list[int]:
    """Return the completed steps in a ledger, some of whose events cover several steps."""
    told = [(event["step"], event.get("steps", 1)) for event in events if event["kind"] == "step"]
    return [step for last, count in told for step in range(last - count + 1, last + 1)]


@dataclasses.dataclass
class Ended:
    codes: list[int]
    """Exit codes by rank, -9 for SIGKILL."""
    errors: list[str]
    output: Path
    disks: Sequence[str] = ()

    def disk(self, rank: int) -> Path:
        return self.output / self.disks[rank] if self.disks else self.output

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads((self.disk(rank) / f"rank-{rank}.json").read_text()) for rank in range(len(self.codes))]

    @property
    def events(self) -> list[Event]:
        outputs = sorted({self.disk(rank) for rank in range(len(self.codes))})
        return sorted((event for output in outputs for event in read(output / contract.LEDGER)), key=lambda event: event["t"])

    @property
    def steps(self) -> list[int]:
        """Return the completed steps in the ledger."""
        return steps(self.events)

    def kinds(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds, without time and source."""
        return [{k: v for k, v in e.items() if k not in ("t", "source")} for e in self.events if e["kind"] in kinds]

    @property
    def checkpoints(self) -> list[checkpoints.Checkpoint]:
        return checkpoints.list_(self.output / contract.CHECKPOINTS)


def started(
    program: Callable[[], None],
    output: Path,
    ranks: int,
    *,
    generation: int | None = 1,
    run: str = "r",
    disks: Sequence[str] = (),
    local: int = 1,
    **env: str,
) -> list[ForkServerProcess]:
    """Start the processes of a world; `env` changes the environment. Each worker has `local` processes.

    With `disks`, each name is a worker with a separate output directory below `output`; ranks with the same name are its
    processes.
    """
    everybody = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free()),
        "OMP_NUM_THREADS": "1", Env.OUTPUT: str(output), Env.RUN: run, Env.CHECKPOINT_EVERY: "5 steps",
    }  # fmt: skip
    if generation is not None:
        everybody[Env.GENERATION] = str(generation)
    processes = []
    for rank in range(ranks):
        worker, number = divmod(rank, local)
        state, stderr = output / "workers" / str(worker), output / "workers" / str(rank) / "stderr"
        state.mkdir(parents=True, exist_ok=True)
        stderr.parent.mkdir(exist_ok=True)
        own = {"RANK": str(rank), "LOCAL_RANK": str(number), Env.STATE: str(state)}
        own[Env.NOTICE] = str(state / contract.NOTICE)
        if local > 1:
            own[Env.WORKER] = str(worker)
        if disks:
            own[Env.OUTPUT] = str(output / disks[rank])
            own[Env.WORKER] = str(list(dict.fromkeys(disks)).index(disks[rank]))
            own["LOCAL_RANK"], own["LOCAL_WORLD_SIZE"] = str(disks[:rank].count(disks[rank])), str(disks.count(disks[rank]))
        process = fork.Process(daemon=True, target=_rank, args=(program, {**everybody, **own, **env}, str(stderr)))
        process.start()
        processes.append(process)
    return processes


def ended(processes: list[ForkServerProcess], output: Path, *, disks: Sequence[str] = (), timeout_s: float = 120) -> Ended:
    """Wait until all processes have ended; kill them after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    errors = [(output / "workers" / str(rank) / "stderr").read_text() for rank in range(len(processes))]
    return Ended([process.exitcode or 0 for process in processes], errors, output, disks)


def ran(program: Callable[[], None], output: Path, ranks: int, *, code: int = 0, **how: Any) -> Ended:
    """Run a world to its end. Each rank must exit with this code."""
    end = ended(started(program, output, ranks, **how), output, disks=how.get("disks", ()))
    assert end.codes == [code] * ranks, end.errors
    return end


def world(plan: Training, output: Path, ranks: int, **how: Any) -> Ended:
    """Train with this number of ranks until they end."""
    return ended(started(functools.partial(train, plan), output, ranks, **how), output, disks=how.get("disks", ()))


def _exact(args: Sequence[str]) -> None:
    sys.argv = ["exact.py", *args]
    runpy.run_path(str(Path(__file__).parent / "programs" / "exact.py"), run_name="__main__")


def exact(args: Sequence[str], output: Path, ranks: int) -> Ended:
    """Run programs/exact.py with this number of ranks, without pauses. No rank may fail."""
    (output / "hurry").touch()
    return ran(functools.partial(_exact, args), output, ranks, **{Env.WORKER: "0"})


Calm = Callable[[Training, int], Ended]


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """The one server of this process, started before `data.prepare` starts it without torch: then each rank would import that.

    It imports as well what the modules of tests import: each rank finds its program in one of them.
    """
    ours = ["outlast.training.session", "outlast.worker.agent.upload", "outlast.storage.checkpoints.in_store"]
    fork.set_forkserver_preload([*ours, "torch._dynamo", "pytest", *work_units._PRELOADED])
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """Return the results of undisturbed trainings, each of which runs once per session."""
    return functools.cache(lambda plan, ranks: world(plan, tmp_path_factory.mktemp("undisturbed"), ranks))


def hashes(end: Ended) -> set[str]:
    """Return the hashes of the ranks' final weights. No rank may have failed."""
    assert end.codes == [0] * len(end.codes), end.errors
    return {result["hash"] for result in end.results}


def damage(path: Path) -> None:
    """Flip a bit of the largest file of a checkpoint."""
    target = max(path.glob("__*"), key=lambda file: file.stat().st_size)
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)


def again(end: Ended) -> None:
    """Remove the notices, as a new agent does."""
    for notice in end.output.glob(f"workers/*/{contract.NOTICE}"):
        notice.unlink()


def fresh(output: Path) -> Path:
    shutil.rmtree(output, ignore_errors=True)
    return output


def _rank(program: Callable[[], None], env: Mapping[str, str], stderr: str) -> None:
    for name in [name for name in os.environ if name.startswith("OUTLAST_")]:
        del os.environ[name]
    os.environ.update(env)
    fd = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(fd, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    warnings.simplefilter("error")
    import torch

    torch.set_num_threads(1)
    program()
