"""Weights for use without Outlast: of models in training, plain, wrapped and sharded, and of those in a checkpoint."""

from __future__ import annotations

import functools
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fake
import outlast.__main__
import worlds
from outlast import cli
from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.job.status import JobStatus, State, StoreStatus
from outlast.storage import checkpoints, runs, store
from outlast.storage.checkpoints import in_store
from outlast.training import session
from outlast.training.state import background_save, checkpoint, weights


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Odd(nn.Module):
    """Tied weights, views of a larger tensor, bfloat16, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        whole = torch.arange(1000.0)
        self.first, self.second = nn.Parameter(whole[:3]), nn.Parameter(whole[3:9].reshape(2, 3).t())
        self.short = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.norm = nn.BatchNorm1d(4)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_torch_and_safetensors_read_what_is_written(tmp_path: Path, name: str):
    if name.endswith(weights.SAFE):
        pytest.importorskip("safetensors", reason="is in the dependency group dev")
    torch.manual_seed(0)
    model, path = Odd(), tmp_path / "deep" / name
    for _ in range(2):
        weights.write(path, weights.whole(model))
    assert [file.name for file in path.parent.iterdir()] == [name]
    (tmp_path / "link").symlink_to(path)
    weights.write(tmp_path / "link", weights.whole(model))
    assert (tmp_path / "link").is_symlink()
    weights.write(path, weights.whole(model))
    assert path.stat().st_size < 4000 + 4 * 1000  # not the thousand numbers that two parameters are views of
    other = Odd()
    if name.endswith(weights.SAFE):
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}  # as its load_model expects
            found = {key: file.get_tensor(key) for key in list(file.keys())}
        assert other.load_state_dict(found, strict=False).missing_keys == ["head.weight"]
    else:
        found = torch.load(path, weights_only=True)
        assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
        other.load_state_dict(found)
    for key, tensor in model.state_dict().items():
        assert other.state_dict()[key].dtype == tensor.dtype
        assert other.state_dict()[key].equal(tensor)


def exported(kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with session.open(seed=1) as run:
        net = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
        if kind == "full disk" and run.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        if kind == "fsdp":
            net[2].weight = nn.Parameter(net[2].weight.to(torch.bfloat16))
            net.extend([nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)])
            net[4].weight = net[3].weight  # tied, and nothing of it is on rank 1
            fully_shard(net[0], mesh=init_device_mesh("cpu", (run.world_size,)))
            fully_shard(net, mesh=init_device_mesh("cpu", (run.world_size,)))
        try:
            path = run.export(run.ddp(net) if kind == "ddp" else net, "end/model.pt")
            said = str(path.relative_to(run.output))
        except OutlastError as error:
            said = str(error)
        print(said, file=sys.stderr)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_wrapped_and_sharded_models_are_exported_whole_under_their_own_names(tmp_path: Path, kind: str):
    assert worlds.ran(functools.partial(exported, kind), tmp_path, 2).errors == ["end/model.pt\n"] * 2
    found = torch.load(tmp_path / "end/model.pt", weights_only=True)
    assert {name: (type(tensor), tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()} == {
        "0.weight": (torch.Tensor, (9, 7), torch.float32),
        "0.bias": (torch.Tensor, (9,), torch.float32),
        "2.weight": (torch.Tensor, (3, 9), torch.bfloat16 if kind == "fsdp" else torch.float32),
        "2.bias": (torch.Tensor, (3,), torch.float32),
        **({f"{number}.weight": (torch.Tensor, (1, 4), torch.float32) for number in (3, 4)} if kind == "fsdp" else {}),
    }
    torch.manual_seed(1)  # as session.open(seed=1) does
    assert found["0.weight"].equal(nn.Linear(7, 9).weight)


def test_a_full_disk_is_one_sentence_on_all_ranks_and_leaves_nothing_behind(tmp_path: Path):
    for error in worlds.ran(functools.partial(exported, "full disk"), tmp_path, 2).errors:
        assert f"{tmp_path}/end/model.pt cannot be written: " in error
    assert list((tmp_path / "end").iterdir()) == []


def test_safetensors_that_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        OutlastError, match=r"^m.safetensors needs the package safetensors: pip install safetensors, or name it m.pt$"
    ):
        weights.check(Path("m.safetensors"))


@pytest.mark.parametrize("name", [".", "pipe"])
def test_what_is_no_regular_file_stays(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / "pipe")
    target = tmp_path / name
    for call in (lambda: weights.write(target, {}), lambda: weights.main([str(tmp_path / "none"), str(target)])):
        with pytest.raises((OutlastError, SystemExit), match=r"is no regular file; name a file to write or to replace$"):
            call()
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.usefixtures("alone")
def test_the_weights_in_a_checkpoint_become_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def in_this_process(command: list[str], *, check: bool) -> SimpleNamespace:  # which has imported torch already
        assert command[:3] == [sys.executable, "-m", "outlast"]
        with pytest.raises(SystemExit) as ended:
            outlast.__main__.main(command[3:])
        return SimpleNamespace(returncode=ended.value.code or 0)

    monkeypatch.setattr(subprocess, "run", in_this_process)
    net, other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    directory = tmp_path / "one" / contract.CHECKPOINTS
    checkpoints.acquire(directory, "r", 1)
    writer = background_save.Saver(directory, "r", 1, retention=checkpoints.Retention(2), report=lambda kind, **fields: None)
    writer.begin(7, checkpoint.capture({"net": net, "other": other, "optimizer": optimizer}, rank=0, ranks=1))
    assert writer.wait() == background_save.Outcome(7, committed=True)
    writer.close()
    backend = fake.FakeBackend(tmp_path)
    backend.runs["one"] = fake.Run(JobStatus(name="one", run="r", state=State.SUCCEEDED, output=str(tmp_path / "one")))

    def export(*options: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["checkpoints", "export", "one", *map(str, options)], backend=backend)
        return int(ended.value.code or 0), *capfd.readouterr()

    target = tmp_path / "net.pt"
    assert export("--step", 8)[0] == 2
    with pytest.raises(SystemExit, match=r"^outlast: step-00000007 holds the modules net, other; name one of them with --key$"):
        weights.main([str(checkpoints.list_(directory)[0].path), str(target), ""])
    there = store.open_(f"file://{tmp_path}/store/one")
    runs.claim(there, runs.Run("r", "one", 1.0))
    stored = in_store.Checkpoints(there, "r")
    stored.acquire(1)
    stored.push(checkpoints.list_(directory)[0], journals=tmp_path / "journals")
    shutil.rmtree(directory)
    backend.runs["one"].status.store = StoreStatus(url=there.url)
    code, out, _ = export("--to", target, "--key", "net", "--step", 7)  # downloads it for that
    assert (code, out.startswith("step 7, "), out.endswith(f"KiB: {target}\n")) == (0, True, True)
    assert not directory.exists()
    found = torch.load(target, weights_only=True)
    assert list(found) == list(net.state_dict())
    assert all(found[name].equal(tensor) for name, tensor in net.state_dict().items())
