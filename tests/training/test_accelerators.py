"""The table of accelerators, and the devices that training makes of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outlast.job import accelerators
from outlast.local import worker_processes
from outlast.training import Stream, device, session


def test_a_short_name_means_a_resource_and_anything_else_itself() -> None:
    assert accelerators.resource("amd") == "amd.com/gpu"
    assert accelerators.resource("habana.ai/gaudi") == "habana.ai/gaudi"


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("Tesla T4", 65),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_the_peak_of_a_gpu_is_not_that_of_one_with_a_longer_name(name: str, teraflops: float | None) -> None:
    assert accelerators.peak_flops(name) == (teraflops and teraflops * 1e12)


def test_nodes_with_parts_of_a_device_are_behind_the_taint_of_the_whole() -> None:
    assert accelerators.taints("nvidia.com/mig-1g.10gb") == ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu"]
    assert accelerators.taints("habana.ai/gaudi") == ["habana.ai/gaudi"]


def test_a_row_is_enough_for_an_accelerator_whose_torch_module_is_like_that_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    module = SimpleNamespace(
        is_available=lambda: True,
        set_device=calls.append,
        get_rng_state=lambda: "state",
        set_rng_state=calls.append,
        synchronize=lambda: calls.append("waited"),
        _is_in_bad_fork=lambda: True,
        get_device_name=lambda: "NVIDIA H100 80GB HBM3",
        manual_seed=calls.append,
        current_device=lambda: 0,
    )
    monkeypatch.setattr(torch, "xpu", module)
    monkeypatch.setattr(accelerators, "DEVICES", {"xpu": accelerators.Accelerator("x.com/y", device="xpu", backend="xccl")})
    found = device.find()
    assert (found.name(), found.peak_flops(), found.bfloat16()) == ("NVIDIA H100 80GB HBM3", 989e12, True)
    assert found.pin(tensor := torch.ones(1, device="meta")) is tensor, "data that are on the device already"
    elsewhere = SimpleNamespace(shape=(2,), dtype=torch.int64, device=torch.device("xpu", 1))
    assert found.room(elsewhere).shape == (2,), "not pinned: synchronize() waits for the current device only"  # type: ignore[arg-type]
    assert (found.type, found.backend, found.random_state()) == ("xpu", "cpu:gloo,xpu:xccl", "state")
    assert found.bind(3) == torch.device("xpu", 3)
    found.set_random_state("state")
    found.synchronize()
    with torch.random.fork_rng(devices=[]):
        found.seed(7)
    assert calls == [3, "state", "waited", 7]


def test_training_computes_on_the_cpu_where_torch_knows_no_such_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    row = accelerators.Accelerator("x.com/y", device="nosuchdevice", backend="nosuchbackend", package="no.such.package")
    monkeypatch.setattr(accelerators, "DEVICES", {"nosuchdevice": row})
    found = device.find()
    assert found is device.CPU
    assert (found.backend, found.bind(3), found.peak_flops()) == ("gloo", torch.device("cpu"), None)
    assert found.pin(tensor := torch.ones(2)) is tensor
    assert found.copy_stream() is None, "copies on the CPU are done when they return, although torch.cpu has streams"
    assert found.name()


def test_ranks_on_different_hardware_agree_on_the_type_of_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.CPU, "bfloat16", lambda: True)
    cpu = torch.device("cpu")
    kinds = [device.dtype(asked, cpu, lambda mine: [mine, False]) for asked in ("auto", "float32", "bfloat16")]
    assert kinds == [torch.float32, torch.float32, torch.bfloat16]
    assert device.dtype("auto", cpu) == device.dtype("auto", cpu, lambda mine: [mine, True]) == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "computed"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (None, torch.float32)]
)
def test_matrix_products_are_computed_in_the_type_that_was_asked_for(dtype: torch.dtype | None, computed: torch.dtype) -> None:
    with device.of(torch.device("cpu")).autocast(dtype):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == computed


def test_each_kind_of_accelerator_is_shown_by_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    row = accelerators.Accelerator("example.com/npu", files="nosuchfile[0-9]*", visible="NPU_VISIBLE_DEVICES")
    monkeypatch.setattr(accelerators, "TABLE", (*accelerators.TABLE, row))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    shown = worker_processes.gpus()
    assert (shown["CUDA_VISIBLE_DEVICES"], shown["NPU_VISIBLE_DEVICES"]) == (["1"], [])


# Devices that are not here, as far as a fake shows


class Fake(device.Device):
    """An accelerator of which each tensor happens to be on the CPU. It notes what it is asked."""

    pins = False

    def __init__(self) -> None:
        super().__init__("fake")
        self.backend = "gloo"
        self.calls: list[str] = []
        self.drawn = 0

    def available(self) -> bool:
        return True

    def bind(self, index: int) -> torch.device:
        self.calls.append(f"bind {index}")
        return torch.device("cpu")

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("pin")
        return tensor

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("room")
        return super().room(tensor)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.calls.append("seed")

    def random_state(self) -> int:
        self.calls.append("state")
        return self.drawn

    def set_random_state(self, state: int) -> None:
        self.drawn = state

    def synchronize(self) -> None:
        self.calls.append("wait")

    def mark_step(self) -> None:
        self.calls.append("mark")


def trained(fake: Fake, output: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> tuple[int, list[str]]:
    """Train some steps of four; returns the step that the run went on from, and what the device was asked in the last one."""
    monkeypatch.setattr(accelerators, "DEVICES", {})
    monkeypatch.setattr(device, "CPU", fake)
    monkeypatch.setenv("OUTLAST_OUTPUT", str(output))
    with session.open(seed=3, quiet=True) as run:
        model = torch.nn.Linear(2, 1).to(run.device)
        stream = Stream((torch.ones(4, 2),), batch=1)
        first = step = run.resume({"model": model, "stream": stream})
        fake.calls = fake.calls if step == 0 else []
        for batch in stream:
            for (x,), _ in batch.split(model):
                model(x)
                fake.drawn += 10  # random numbers
            step += 1
            run.log(step)
            if step == steps:
                run.save(step)
                break
    return first, fake.calls


def test_a_session_binds_its_device_and_a_resumed_one_restores_its_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    first, calls = trained(fake, tmp_path, monkeypatch, 2)
    assert (first, fake.drawn) == (0, 20)
    assert calls[0] == "bind 0"
    assert "pin" in calls[: calls.index("mark")], "by the thread that reads ahead"
    order = [call for call in calls if call != "pin"]
    assert order[:3] == ["bind 0", "seed", "seed"]  # alike on all ranks, then for this one
    assert order[-5:] == ["state", "mark", "room", "room", "wait"], (
        "recorded steps end before the copies, and copies are waited for"
    )
    again = Fake()
    first, calls = trained(again, tmp_path, monkeypatch, 4)
    assert (first, again.drawn) == (2, 40)


def fake_xla(monkeypatch: pytest.MonkeyPatch, kind: str) -> list[object]:
    """Put a torch_xla beside torch, with an accelerator of this kind; returns the list of calls."""
    calls: list[object] = []
    model = SimpleNamespace(
        get_rng_state=lambda: 7,
        set_rng_state=lambda state: calls.append(("state", state)),
        wait_device_ops=lambda: calls.append("waited"),
    )
    tensors = SimpleNamespace(_xla_get_tensor_id=lambda tensor: 42)
    modules = {
        "torch_xla": SimpleNamespace(sync=lambda: calls.append("sync"), _XLAC=tensors),
        "torch_xla.runtime": SimpleNamespace(device_type=lambda: kind),
        "torch_xla.core.xla_model": model,
        "torch_xla.distributed.xla_backend": SimpleNamespace(),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    device._imported.cache_clear()
    device._has_xla.cache_clear()
    return calls


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    yield fake_xla(monkeypatch, "NEURON")
    device._imported.cache_clear()
    device._has_xla.cache_clear()


def test_xla_trains_where_torch_xla_has_an_accelerator(xla: list[object]) -> None:
    found = device.find()
    assert (found.type, found.backend, found.name(), found.peak_flops()) == ("xla", "xla", "NEURON", None)
    assert found.bind(5) == torch.device("xla"), "torchrun's process has one device"
    assert found.pin(tensor := torch.ones(1)) is tensor
    assert (found.bfloat16(), found.random_state(), found.place(tensor)) == (True, 7, 42)
    found.set_random_state(9)
    found.mark_step()
    found.synchronize()
    with torch.random.fork_rng(devices=[]):
        found.seed(3)
    assert xla == [("state", 9), "sync", ("state", 7), "sync", ("state", 7), "waited", ("state", 3)]
    assert device.computing() == torch.device("xla")


def test_torch_xla_without_an_accelerator_is_not_used_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, xla: list[object]
) -> None:
    fake_xla(monkeypatch, "CPU")
    assert device.find() is device.CPU
    device._has_xla.cache_clear()
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert device.find().type == "xla"
