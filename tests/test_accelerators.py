"""The table of accelerators, and the devices that training makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outlast import accelerators
from outlast.local import workers
from outlast.training import device


def test_a_short_name_means_a_resource_and_anything_else_itself() -> None:
    assert accelerators.resource("amd") == "amd.com/gpu"
    assert accelerators.resource("habana.ai/gaudi") == "habana.ai/gaudi"


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
    )
    monkeypatch.setattr(torch, "xpu", module)
    monkeypatch.setattr(accelerators, "DEVICES", {"xpu": accelerators.Accelerator("x.com/y", device="xpu", backend="xccl")})
    found = device.find()
    assert (found.name(), found.peak_flops(), found.bfloat16()) == ("NVIDIA H100 80GB HBM3", 989e12, True)
    assert (found.type, found.backend, found.random_state()) == ("xpu", "cpu:gloo,xpu:xccl", "state")
    assert found.bind(3) == torch.device("xpu", 3)
    found.set_random_state("state")
    found.synchronize()
    with torch.random.fork_rng(devices=[]):
        found.seed(7)
    assert calls == [torch.device("xpu", 3), "state", "waited", 7]


def test_training_computes_on_the_cpu_where_torch_knows_no_such_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    row = accelerators.Accelerator("x.com/y", device="nosuchdevice", backend="nosuchbackend", package="no.such.package")
    monkeypatch.setattr(accelerators, "DEVICES", {"nosuchdevice": row})
    found = device.find()
    assert found is device.CPU
    assert (found.backend, found.bind(3), found.peak_flops()) == ("gloo", torch.device("cpu"), None)
    assert found.pin(tensor := torch.ones(2)) is tensor
    assert found.name()


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
    shown = workers.gpus()
    assert (shown["CUDA_VISIBLE_DEVICES"], shown["NPU_VISIBLE_DEVICES"]) == (["1"], [])
