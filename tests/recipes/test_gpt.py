"""The GPT recipe: its model against plain loops, its losses by hand, nanoGPT's files both ways, and runs in small worlds."""

from __future__ import annotations

import functools
import json
import math
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

import disturbances
import texts
import worlds
from outlast.base.errors import OutlastError
from outlast.data import stdlib_text
from outlast.recipes import gpt, gpt_model
from outlast.recipes.gpt_model import GPT, Config, MoE
from outlast.recipes.shared import loop, settings

TEXT = "def f(x):\n    return x + 1\n\n\nclass A:\n    pass\n"
SMALL = ("--n-layer=1", "--n-head=2", "--n-embd=16", "--block-size=8", "--batch-size=2")
SMALL += ("--warmup-iters=2", "--learning-rate=1e-2")
MOE = ("--use-moe", "--num-experts=4", "--static-experts=1", "--num-experts-per-tok=2", "--expert-hidden=16")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts.characters(tmp_path_factory.mktemp("chars"), TEXT * 40, TEXT * 10)


def final(output: Path, ranks: int, *args: str) -> Any:
    """The results of a world."""
    disturbances.trained(gpt.main, args, output, ranks)
    return disturbances.final(output)


# The mixture of experts


def by_a_loop(moe: MoE, x: Tensor) -> tuple[Tensor, list[int]]:
    """What a mixture returns for x (b, t, c), token by token and expert by expert; and the assignments of each expert."""
    rows, counts = [], [0] * moe.gate.out_features
    for token in x.flatten(0, 1):
        best, chosen = moe.gate(token).topk(moe.k)
        row = moe.static(token) if moe.static else torch.zeros_like(token)
        for share, expert in zip(best.softmax(-1), chosen.tolist(), strict=True):
            counts[expert] += 1
            row = row + share * (F.gelu(token @ moe.experts.c_fc[expert]) @ moe.experts.c_proj[expert])
        rows.append(row)
    return torch.stack(rows).view_as(x), counts


@pytest.mark.parametrize("kind", [torch.float64, torch.float32], ids=["padded", "grouped"])
@pytest.mark.parametrize("static", [0, 2])
def test_a_mixture_is_the_sum_over_its_experts_also_when_one_gets_no_token(kind: torch.dtype, static: int):
    torch.manual_seed(0)
    config = Config(1, 2, 8, 8, 11, num_experts=5 + static, static_experts=static, num_experts_per_tok=2, expert_hidden=12)
    moe = GPT(config).h[0].mlp.to(kind)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(2, 8, 8, dtype=kind)
    moe.gate.weight.data[3] = 0
    moe.gate.weight.data[3, :] = -10 * x.sum((0, 1)).sign()
    x = x.abs() * x.sum((0, 1)).sign()  # now expert 3 is the last for every token
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    made, _, usage = moe(ours)
    expected, counts = by_a_loop(moe, theirs)
    assert counts[3] == 0
    assert usage.tolist() == pytest.approx([count / sum(counts) for count in counts])
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(made, expected)
    direction = torch.randn_like(made)
    weights = list(moe.parameters())
    got = torch.autograd.grad((made * direction).sum(), [ours, *weights])
    for one, other in zip(got, torch.autograd.grad((expected * direction).sum(), [theirs, *weights]), strict=True):
        close(one, other)
    assert not got[1 + [id(w) for w in weights].index(id(moe.experts.c_fc))][3].any()


def test_the_losses_of_balance_are_those_by_hand():
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.5, 0.1]], dtype=torch.float64)
    counts = torch.tensor([3, 0, 1])
    u = [4 / 7, 1 / 7, 2 / 7]  # one assignment more each
    entropy = -sum(each * math.log(each) for each in u)
    expected = {
        "entropy_regularization": 1 - entropy / math.log(3),
        "variance_penalty": sum((3 * each - 1) ** 2 for each in u) / 3,
        "diversity_regularization": sum(math.log((1 / 3) / each) / 3 for each in u),
    }
    assert tuple(expected) == gpt_model.BALANCES
    for kind, value in expected.items():
        assert gpt_model.balance(probabilities, counts, kind).item() == pytest.approx(value), kind
        assert gpt_model.balance(probabilities, torch.tensor([5, 5, 5]), kind).item() == pytest.approx(0, abs=1e-12), kind
        assert gpt_model.balance(torch.ones(4, 1), torch.tensor([4]), kind).item() == 0, "one expert is always balanced"


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"num_experts": 4, "static_experts": 1, "num_experts_per_tok": 4}, r"^num_experts_per_tok \(4\) must be 1 to 3: "),
        ({"num_experts": 2, "static_experts": 2}, r"^static_experts \(2\) leaves none of num_experts \(2\) to choose from"),
        ({"n_embd": 10, "n_head": 3}, r"^n_embd \(10\) is not divisible by n_head \(3\)"),
        ({"moe_loss_type": "entropy"}, r"^moe_loss_type \(entropy\) must be one of entropy_regularization, "),
    ],
)
def test_shapes_that_cannot_be_are_refused(shape: dict[str, Any], sentence: str):
    with pytest.raises(OutlastError, match=sentence):
        Config(**shape)


# The model and nanoGPT's files


def by_formulas(weights: dict[str, Tensor], heads: int, tokens: Tensor) -> Tensor:
    """Logits (t, v) of tokens (t,), from weights under nanoGPT's names, by the formulas of GPT-2."""

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return x * weights[f"transformer.{name}.weight"] + weights[f"transformer.{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"transformer.{name}.weight"].T + weights[f"transformer.{name}.bias"]

    t = len(tokens)
    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"][:t]
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("transformer.h."))
    for i in range(layers):
        q, k, v = (
            part.view(t, heads, -1).transpose(0, 1) for part in linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, -1)
        )
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(torch.ones(t, t).triu(1).bool(), -math.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(t, -1), f"h.{i}.attn.c_proj")
        h = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        x = x + linear(h * 0.5 * (1 + torch.erf(h / math.sqrt(2))), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["lm_head.weight"].T


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(1)
    made = GPT(Config(2, 2, 12, 6, 13, bias=True))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    return made


TOKENS = torch.tensor([3, 1, 12, 0, 5, 5])


def test_the_model_computes_gpt_2_and_the_loss_of_the_next_tokens(model: GPT):
    logits = by_formulas(gpt_model.exported(model.state_dict()), 2, TOKENS)
    torch.testing.assert_close(model(TOKENS[None])[0], logits[-1])
    losses = model(TOKENS[None, :-1], TOKENS[None, 1:])
    torch.testing.assert_close(losses.main, F.cross_entropy(logits[:-1], TOKENS[1:]))


def test_a_checkpoint_goes_to_nanogpt_and_comes_back(model: GPT, tmp_path: Path):
    record = gpt.record(model.config, "tokenizer")
    record.best = 1.5
    gpt_model.write_nanogpt(tmp_path / "ckpt.pt", model.state_dict(), record, {"iter_num": 7, "config": {"dataset": "x"}})
    read = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert (read["iter_num"], read["best_val_loss"]) == (7, 1.5)
    arguments = {"n_layer": 2, "n_head": 2, "n_embd": 12, "block_size": 6, "bias": True, "vocab_size": 13, "dropout": 0.0}
    assert read["model_args"] == arguments
    assert read["model"]["lm_head.weight"].data_ptr() == read["model"]["transformer.wte.weight"].data_ptr()
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in read["model"].items()}  # as nanoGPT saves a compiled model
    torch.save({**read, "model": compiled, "best_val_loss": torch.tensor(1.5)}, tmp_path / "theirs.pt")
    for found in (gpt_model.pretrained(str(tmp_path)), gpt_model.pretrained(str(tmp_path / "theirs.pt"))):
        assert found.config == model.config
        torch.testing.assert_close(found.model()(TOKENS[None]), model(TOKENS[None]), rtol=0, atol=0)
    cut = gpt_model.pretrained(str(tmp_path), block=4, dropout=0.1)
    assert (cut.config.block_size, cut.config.dropout) == (4, 0.1)
    torch.testing.assert_close(cut.model().eval()(TOKENS[None, :4]), model(TOKENS[None, :4]), rtol=0, atol=0)


def test_a_directory_of_gpt_2_is_read(model: GPT, tmp_path: Path):
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {name: tensor.T.contiguous() if name.endswith(turned) else tensor for name, tensor in model.state_dict().items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 6, 6), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    torch.save({**weights, **masks}, tmp_path / "pytorch_model.bin")
    said = {"n_layer": 2, "n_head": 2, "n_embd": 12, "n_positions": 6, "vocab_size": 13}
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = gpt_model.pretrained(str(tmp_path))
    torch.testing.assert_close(found.model()(TOKENS[None]), model(TOKENS[None]), rtol=0, atol=0)


def test_the_optimizer_is_numbered_as_nanogpt_numbers_its_own(model: GPT):
    optimizer = torch.optim.AdamW(loop.groups(model, 0.1), lr=1e-3)
    model(TOKENS[None, :-1], TOKENS[None, 1:]).main.backward()
    optimizer.step()
    found = gpt.numbered(model, optimizer)
    named = dict(model.named_parameters())
    theirs = [p for p in named.values() if p.dim() >= 2], [p for p in named.values() if p.dim() < 2]
    groups = [{"params": theirs[0], "weight_decay": 0.1}, {"params": theirs[1], "weight_decay": 0.0}]
    other = torch.optim.AdamW(groups, lr=1.0)
    other.load_state_dict(found)
    assert [group["weight_decay"] for group in other.param_groups] == [0.1, 0.0]
    for p in named.values():
        assert torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_files_of_other_models_are_refused(model: GPT, tmp_path: Path):
    path, record = tmp_path / "ckpt.pt", gpt.record(model.config)

    def refusal(weights: dict[str, Tensor], **more: Any) -> str:
        gpt_model.write_nanogpt(path, weights, record, more)
        with pytest.raises(OutlastError) as refused:
            gpt_model.pretrained(str(path))
        return str(refused.value).removeprefix(f"{path}")

    weights = model.state_dict()
    assert refusal({**weights, "h.0.gate": torch.ones(1)}) == ": the weights are not of this model: it has no h.0.gate"
    assert refusal({name: tensor for name, tensor in weights.items() if name != "ln_f.bias"}).endswith(
        "ln_f.bias is missing, and (12,) is needed"
    )
    assert refusal(weights, model_args={"n_layer": 2, "lora": 8}) == " is a model of another kind: its model_args have lora"
    with pytest.raises(OutlastError, match=r"^init_from gpt2-xl: there is no such file or directory; .*nothing is downloaded"):
        gpt_model.pretrained("gpt2-xl")


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


def test_sampling_is_a_function_of_the_seed(model: GPT):
    start = torch.tensor([[1, 2]] * 3)
    draw = functools.partial(gpt_model.generate, model, start, 12)
    one = draw(temperature=1.0, top_k=5, seed=4)
    assert one.shape == (3, 14)
    assert torch.equal(one, draw(temperature=1.0, top_k=5, seed=4))
    assert not torch.equal(one, draw(temperature=1.0, top_k=5, seed=5))
    assert torch.equal(draw(temperature=0.7, top_k=1, seed=1), draw(temperature=0, top_k=0, seed=2))


# Settings


def test_every_key_of_a_configuration_of_nanogpt_with_experts_is_known(tmp_path: Path):
    keys: dict[str, Any] = {
        "out_dir": "out", "eval_interval": 2, "log_interval": 1, "eval_iters": 20, "eval_only": False,
        "always_save_checkpoint": True, "init_from": "resume", "num_checkpoints": 2, "save_current_ckpt": True,
        "dataset": "shakespeare", "gradient_accumulation_steps": 40, "batch_size": 12, "block_size": 1024,
        "n_layer": 5, "n_head": 5, "n_embd": 125, "dropout": 0, "bias": False, "use_moe": True, "num_experts": 6,
        "num_experts_per_tok": 2, "static_experts": 2, "moe_loss": True, "moe_loss_type": "entropy_regularization",
        "moe_loss_coef": 0.01, "learning_rate": 6e-4, "max_iters": 600000, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95,
        "grad_clip": 1.0, "decay_lr": True, "warmup_iters": 2000, "lr_decay_iters": 600000, "min_lr": 6e-5,
        "backend": "nccl", "device": "cuda", "dtype": "bfloat16", "compile": False,
    }  # fmt: skip
    (tmp_path / "conf.yaml").write_text(yaml.safe_dump(keys))
    s = settings.parse(gpt.Settings, ["--config", str(tmp_path / "conf.yaml"), "--output_dir=here"], "", gpt.ALIASES)
    assert (s.output_dir, s.evaluate, s.n_embd, s.gradient_accumulation_steps) == ("here", False, 125, 40)
    config = gpt.shape(s, 65)
    assert (config.routed, config.hidden) == (4, 500)


def test_a_size_sets_what_is_not_given():
    s = settings.parse(gpt.Settings, ["--size=350M", "--n-head=8"], "")
    config = gpt.shape(s, 50304)
    assert (config.n_layer, config.n_head, config.n_embd, config.num_experts) == (24, 8, 1024, 0)


# Bad input


@pytest.mark.parametrize(
    ("files", "args", "sentence"),
    [
        (("meta.pkl", pickle.dumps({"vocab_size": 70_000})), "", r"vocabulary of 70000 tokens in uint16, whose largest token is"),
        (("meta.pkl", pickle.dumps({"vocab_size": 5})), "", r"token 2\d, and its vocabulary has 5, so it was made by another"),
        (("val.bin", b""), "", r"has no token in val"),
        (("val.bin", bytes(16)), "", r"^no shard of val in .* has the 9 tokens of a block and the next one; use a smaller block"),
        (("conf.yaml", b"n_layers: 3"), "--config={data}/conf.yaml", r"line 1: there is no flag or setting --n-layers=3"),
        ((), "--use-moe --num-experts-per-tok=5", r"^num_experts_per_tok \(5\) must be 1 to 4: "),
        ((), "--init-from={data}/other.pt", r"^init_from .*other\.pt knows 9 tokens, and the data have 2\d: they were made by"),
        ((), "--init-from={data}/of.pt", r"of\.pt was trained with tokenizer abc, and the data were made by [0-9a-f]{16}: "),
    ],
)
def test_bad_input_is_one_sentence(files: tuple[str, bytes] | tuple[()], args: str, sentence: str, tmp_path: Path):
    data = texts.characters(tmp_path, TEXT * 40, TEXT * 10)
    if files:
        (data / files[0]).write_bytes(files[1])
    for name, vocabulary, digest in (("other.pt", 9, ""), ("of.pt", 40, "abc")):
        config = Config(1, 2, 16, 8, vocabulary)
        gpt_model.write_nanogpt(data / name, GPT(config).state_dict(), gpt.record(config, digest), {})
    with pytest.raises(OutlastError, match=sentence):
        begin([f"--data={data}", *SMALL, *args.format(data=data).split()])


def begin(args: list[str]) -> None:
    """What a run does before its first step."""
    s = settings.parse(gpt.Settings, args, "")
    corpus = gpt.Corpus(gpt.place(s), s.block_size)
    gpt.first(s, corpus)
    corpus.check(corpus.train.take(np.arange(3)))


# Worlds


def test_it_trains_measures_and_samples(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path))
    args = [f"--data={data}", *SMALL, *MOE, "--max-iters=6", "--eval-interval=3", "--eval-iters=4"]
    args += ["--gradient-accumulation-steps=2"]
    gpt.main([*args, "--export-nanogpt", "--device=cuda:1", "--backend=nccl", "--init_from=resume"])
    printed = capsys.readouterr()
    assert printed.err.startswith("backend is not needed: a run finds it")
    lines = printed.out.splitlines()
    assert lines == (tmp_path / "log.txt").read_text().splitlines()
    assert lines[1].startswith("step 0: train loss 3."), lines
    number = r"\d+\.\d+"
    assert sum(line.startswith("step ") for line in lines) == 3
    assert re.fullmatch(rf"Iter 1: Loss {number}, Main Loss {number}, Aux Loss {number}, Time {number}ms, MFU -", lines[2])
    assert re.fullmatch(r"Block 0 usage: Expert 0: [\d.]+%, Expert 1: [\d.]+%, Expert 2: [\d.]+%", lines[3])
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = [(each["step"], each["val_loss"]) for each in metrics if "val_loss" in each]
    assert [step for step, _ in measured] == [0, 3, 6]
    assert measured[-1][1] < measured[0][1]
    result = json.loads((tmp_path / "final.json").read_text())
    assert (result["step"], result["val_loss"]) == measured[-1]
    assert {path.name for path in tmp_path.iterdir()} >= {"model.pt", "ckpt.pt", "current_ckpt.pt", "meta.pkl", "checkpoints"}
    assert torch.load(tmp_path / "current_ckpt.pt", weights_only=True)["iter_num"] == 6

    gpt.main([*args, "--evaluate"])
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["weights"] == "step-00000006", "ckpt.pt is that of the best step, or of an earlier run"
    gpt.main(args)
    assert "all 6 steps are done; --max-iters sets more\n" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "checkpoints")
    gpt.main([*args, "--evaluate"])
    assert json.loads((tmp_path / "evaluation.json").read_text()) == found | {"weights": "ckpt.pt"}
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    capsys.readouterr()
    gpt.main(["--sample", "--prompt=def ", "--num-samples=2", "--max-new-tokens=9", *args[1:]])
    said = capsys.readouterr().out
    assert [text[:4] for text in said.split("---------------\n")] == ["def ", "def ", ""]
    assert [len(text.removesuffix("\n")) for text in said.split("---------------\n")[:2]] == [13, 13]


def test_killed_before_the_best_is_in_ckpt_pt_it_measures_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path))
    args = [f"--data={data}", *SMALL, "--max-iters=4", "--eval-interval=3", "--eval-iters=2", "--gradient-accumulation-steps=1"]
    export, written = gpt.Training.export, []

    def interrupted(trainer: gpt.Training, step: int, names: Any) -> Any:
        written.append(step)
        if len(written) == 1:
            raise KeyboardInterrupt
        return export(trainer, step, names)

    monkeypatch.setattr(gpt.Training, "export", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpt.main([*args, "--export-nanogpt"])
    torch.distributed.destroy_process_group()
    gpt.main([*args, "--export-nanogpt"])
    assert written == [3, 3, 4, 4]


def test_a_sharded_model_computes_what_one_rank_computes(data: Path, tmp_path: Path):
    args = (f"--data={data}", *SMALL, *MOE, "--max-iters=3", "--eval-interval=3", "--eval-iters=3")
    args += ("--gradient-accumulation-steps=3",)  # two micro-batches on one rank, one on the other
    alone = final(tmp_path / "alone", 1, *args)
    sharded = final(tmp_path / "sharded", 2, *args, "--parallel=fsdp")
    for loss in ("loss", "train_eval_loss", "val_loss"):
        assert sharded[loss] == pytest.approx(alone[loss], rel=2e-4), loss


def test_experts_without_tokens_keep_no_rank_waiting(data: Path, tmp_path: Path):
    few = ("--block-size=2", "--batch-size=1", "--gradient-accumulation-steps=2", "--num-experts=8", "--static-experts=0")
    args = (f"--data={data}", *SMALL, *few, "--use-moe", "--num-experts-per-tok=1", "--max-iters=3", "--eval-iters=1")
    assert final(tmp_path, 2, *args)["step"] == 3
    usage = [line for line in (tmp_path / "log.txt").read_text().splitlines() if line.startswith("Block 0")]
    assert sum(line.count(" 0.0%") >= 4 for line in usage) == 3, "4 tokens of a step meet at most 4 of 8 experts"


# Killed, resized, measured, and what it learns


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


@pytest.mark.slow  # as those of the other recipes; tests/training/test_session.py resizes quickly
@pytest.mark.parametrize("experts", [(), EXPERTS], ids=["dense", "moe"])
def test_resized_1_to_3_to_2_each_sample_is_seen_once_and_the_loss_is_the_same(
    tmp_path: Path, blocks: Path, experts: tuple[str, ...]
) -> None:
    argv = arguments(blocks, 7, *experts, accumulate=3)  # 7 steps of 12 samples: one epoch of 84
    disturbances.resized(gpt.main, argv, tmp_path, logs=("loss", "val_loss"))


def test_every_block_is_measured_once_by_one_rank_and_the_best_stays_the_best(tmp_path: Path, blocks: Path) -> None:
    """The learning rate grows until the loss rises. 3 micro-batches for 2 ranks: one of them makes a call that does not count."""
    argv = arguments(blocks, 20, "--learning-rate=1", "--warmup-iters=20", "--weight-decay=0", "--grad-clip=0")
    argv += ["--eval-interval=5", "--eval-iters=3", "--batch-size=2", "--export-nanogpt", "--dataset=words"]
    worlds.ran(functools.partial(measuring, argv), tmp_path, 2)
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
        assert found["config"]["dataset"] == "words"
    assert len(newest["optimizer"]["state"]) == len(newest["model"]) - 1, "two of them are one"


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
    disturbances.trained(gpt.main, [f"--data={data}", *size.split(), *rates.split()], tmp_path / "out", timeout_s=900)
    assert 2.05 < disturbances.final(tmp_path / "out")["val_loss"] < 2.35
