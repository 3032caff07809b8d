"""outlast.recipes.gpt in real processes: killed, resized, beside nanoGPT's own scripts; what it learns, and what it says."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disturbances
import texts
import worlds
from outlast.data import stdlib_text
from outlast.recipes import gpt, gpt_model
from outlast.recipes.gpt_model import GPT, Config

BLOCK = 16
LAYERS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": BLOCK}
EXPERTS = ("--use-moe", "--num-experts=4", "--num-experts-per-tok=2", "--static-experts=1")
SCHEDULE = ("--warmup-iters=3", "--min-lr=1e-4", "--learning-rate=1e-3")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """84 blocks of text, and 6 to measure on."""
    draw = random.Random(0)
    words = " ".join(draw.choice(["def", "return", "yield", "import", "self", "x", "(y)", ":\n"]) for _ in range(600))
    return texts.characters(tmp_path_factory.mktemp("blocks"), words[: 84 * BLOCK + 1], words[-6 * BLOCK - 1 :])


def arguments(data: Path, steps: int, *more: str, accumulate: int = 1, batch: int = 4) -> list[str]:
    shape = [f"--{name}={value}" for name, value in LAYERS.items()]
    step = [f"--batch-size={batch}", f"--gradient-accumulation-steps={accumulate}", f"--max-iters={steps}"]
    return [f"--data={data}", *shape, *step, "--eval-interval=10", "--eval-iters=2", *SCHEDULE, *more]


def trained(argv: list[str], output: Path, ranks: int = 1, *, timeout_s: float = 240) -> None:
    disturbances.trained(gpt.main, argv, output, ranks, timeout_s=timeout_s)


# The loss


@pytest.mark.parametrize("rows", [3, 64, 10_000])
@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_the_loss_and_its_gradients_are_those_of_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, rows: int, scale: float
) -> None:
    monkeypatch.setattr(gpt_model, "_LOGITS_OF_A_CACHE", rows * 50)
    draw = torch.Generator().manual_seed(0)
    found = []
    for loss_of in (gpt_model.cross_entropy, lambda x, weight, y: F.cross_entropy(F.linear(x, weight), y)):
        x, weight = (torch.randn(n, 8, generator=draw.manual_seed(n), dtype=torch.float64) for n in (100, 50))
        x, weight = (x * scale).requires_grad_(), weight.requires_grad_()
        loss = loss_of(x, weight, torch.arange(100) % 50)
        (loss * 3).backward()
        found.append((loss.detach(), x.grad, weight.grad))
    torch.testing.assert_close(*found)
    assert found[0][0].isfinite()


# Killed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("experts", "accumulate", "parallel"),
    [((), 1, "ddp"), (EXPERTS, 3, "ddp"), (EXPERTS, 1, "fsdp")],
    ids=["dense", "moe", "sharded"],
)
def test_killed_20_times_it_ends_with_the_same_bits(
    tmp_path: Path, blocks: Path, experts: tuple[str, ...], accumulate: int, parallel: str
) -> None:
    argv = arguments(blocks, 100, f"--parallel={parallel}", "--dropout=0.1", *experts, accumulate=2 * accumulate)
    disturbances.killed_20_times(gpt.main, argv, tmp_path, seed=accumulate, logs=("loss", "val_loss"))


@pytest.mark.slow  # the jobs of the other recipes are not
@pytest.mark.jobs
def test_a_job_whose_worker_is_killed_ends_with_the_same_bits(machine: Any, tmp_path: Path, blocks: Path) -> None:
    argv = arguments(blocks, 40, "--use-moe", "--num-experts=3", "--static-experts=0")
    trained(argv, tmp_path / "calm", 2)
    job = {"script": None, "code": None, "module": "outlast.recipes.gpt", "hang": None, "checkpoint": {"every": "5 steps"}}
    name = machine.submit(machine.job("gpt", args=tuple(argv), **job))
    machine.at_step(name, 12)
    machine.backend.chaos(name, "kill-worker", worker=1, rng=machine.rng)
    assert machine.end(name).exit_code == 0
    assert disturbances.final(machine.backend.output(name)) == disturbances.final(tmp_path / "calm")


# Resized


@pytest.mark.slow  # as those of the other recipes; tests/training/test_session.py resizes quickly
@pytest.mark.parametrize("experts", [(), EXPERTS], ids=["dense", "moe"])
def test_resized_1_to_3_to_2_each_sample_is_seen_once_and_the_loss_is_the_same(
    tmp_path: Path, blocks: Path, experts: tuple[str, ...]
) -> None:
    argv = arguments(blocks, 7, *experts, accumulate=3)  # 7 steps of 12 samples: one epoch of 84
    disturbances.resized(gpt.main, argv, tmp_path, logs=("loss", "val_loss"))


# Measured


def test_every_block_is_measured_once_by_one_rank_and_the_best_stays_the_best(tmp_path: Path, blocks: Path) -> None:
    """The learning rate grows until the loss rises. 3 micro-batches for 2 ranks: one of them makes a call that does not count."""
    argv = arguments(blocks, 20, "--learning-rate=1", "--warmup-iters=20", "--weight-decay=0", "--grad-clip=0")
    argv += ["--eval-interval=5", "--eval-iters=3", "--batch-size=2", "--export-nanogpt", "--dataset=words"]
    end = worlds.ended(worlds.started(functools.partial(measuring, argv), tmp_path, 2), tmp_path)
    assert end.codes == [0, 0], end.errors
    calls = [len((tmp_path / f"measured-{rank}").read_text().splitlines()) for rank in range(2)]
    assert calls[0] == calls[1] == 2 * 2 * len(disturbances.logged(tmp_path, "val_loss")), (
        "half of 4 calls, for both parts, at every evaluation"
    )
    losses = disturbances.logged(tmp_path, "val_loss")
    assert losses[20] > min(losses.values())
    assert disturbances.final(tmp_path)["best_val_loss"] == min(losses.values())
    best, newest = (torch.load(tmp_path / name, weights_only=True) for name in ("ckpt.pt", "current_ckpt.pt"))
    assert (best["best_val_loss"], losses[best["iter_num"]]) == (min(losses.values()), min(losses.values()))
    assert newest["iter_num"] == 20
    for found in (best, newest):  # the entries of nanoGPT's
        assert found.keys() >= {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
        assert found["model"].keys() == nanogpt_names(2)
        assert found["model_args"].keys() == {*LAYERS, "bias", "vocab_size", "dropout"}
        assert found["config"]["dataset"] == "words"
        tied = found["model"]["lm_head.weight"], found["model"]["transformer.wte.weight"]
        assert tied[0].data_ptr() == tied[1].data_ptr()
    assert len(newest["optimizer"]["state"]) == len(nanogpt_names(2)) - 1


def measuring(argv: list[str]) -> None:
    """A rank that counts its forward passes without gradient."""
    forward = gpt.Training.forward

    def counted(self: gpt.Training, net: Any, tokens: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            with (self.run.output / f"measured-{self.run.rank}").open("a") as file:
                file.write(f"{len(tokens)}\n")
        return forward(self, net, tokens)

    gpt.Training.forward = counted  # type: ignore[method-assign] # in a process of its own
    gpt.main(argv)


def test_a_model_keeps_no_counts_beside_its_weights() -> None:
    """Counts of usage in a checkpoint would tie it to a number of experts, and to how long it ran; buffers make DDP send them."""
    model = GPT(Config(**LAYERS, vocab_size=20, num_experts=5, static_experts=1))
    assert list(model.buffers()) == []
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


# nanoGPT's files


def nanogpt_names(layers: int) -> set[str]:
    """The weights of nanoGPT's model without biases."""
    block = ["ln_1.weight", "attn.c_attn.weight", "attn.c_proj.weight", "ln_2.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    inner = [f"transformer.h.{number}.{name}" for number in range(layers) for name in block]
    return {*inner, "transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "lm_head.weight"}


# What it learns


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_loss_on_the_standard_library_is_in_its_band(tmp_path: Path) -> None:
    """Of characters; every tenth module is measured on."""
    stdlib_text.write(tmp_path / "text")
    parts: dict[bool, list[str]] = {False: [], True: []}
    for number, file in enumerate(sorted((tmp_path / "text").rglob("*.py"))):
        parts[number % 10 == 9].append("".join(c for c in file.read_text() if c.isascii() and (c.isprintable() or c == "\n")))
    data = texts.characters(tmp_path / "tokens", "".join(parts[False]), "".join(parts[True]))
    size = "--size=tiny --block-size=64 --batch-size=12 --gradient-accumulation-steps=1 --max-iters=400 --eval-interval=400"
    rates = "--learning-rate=2e-3 --min-lr=2e-4 --warmup-iters=40 --eval-iters=50 --dtype=float32"
    trained([f"--data={data}", *size.split(), *rates.split()], tmp_path / "out", timeout_s=900)
    assert 2.05 < disturbances.final(tmp_path / "out")["val_loss"] < 2.35
