"""outlast.recipes.llm: what it learns of a record, its loss on packed rows, what it writes, and what it says of wrong input.

Imports transformers, which takes seconds: other tests of the recipe belong here, too. It is imported by the first test that runs,
for files are collected by every process of pytest.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

import disturbances
from outlast.base.errors import OutlastError
from outlast.data.prepare import chat, jsonl, work_units
from outlast.job import contract
from outlast.recipes import llm, llm_data, llm_tiny
from outlast.training import Shards
from outlast.training.state import checkpoint

if TYPE_CHECKING:
    from outlast.recipes import llm_model

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "peft")), reason="needs outlast[llm]"
)

MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
CHATS = [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is {a} and {b}?"},
                  {"role": "assistant", "content": f"It is {a + b}, as {b} and {a}."}]}
    for a, b in ((1, 2), (3, 4), (5, 6), (7, 8))
]  # fmt: skip
RECORDS = [
    *CHATS,
    *({"prompt": f"{a} is", "completion": f" {b}."} for a, b in (("Snow", "white"), ("Coal", "black"), ("Grass", "green"))),
    *({"text": text} for text in ("All roads lead to Rome.", "Time flies like an arrow.", "Where there is smoke there is fire.")),
]  # fmt: skip
MARKED = (  # as Qwen2.5's and Llama 3's: no {% generation %}, a newline or a token after a turn
    "{% if messages and messages[0].role != 'system' %}<s>system\nHelp.</s>\n{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETFUL = (  # as Qwen3's: what comes before </think> is left out of all turns but the last
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def _late() -> None:
    global llm_model
    from outlast.recipes import llm_model


@pytest.fixture(scope="module")
def known() -> Any:
    """A tokenizer trained on the records."""
    texts = [text for record in RECORDS for text in _texts(record)]
    return llm_tiny.trained_tokenizer(texts, 400)


def _texts(record: dict[str, Any]) -> list[str]:
    return [m["content"] for m in record["messages"]] if "messages" in record else list(record.values())


def written(directory: Path, known: Any, kind: str = "llama", **more: Any) -> Path:
    """A tiny model with its tokenizer, as Hugging Face writes it."""
    shape = {"layers": 2, "width": 32, "positions": 128, "seed": 0, **more}
    made = llm_tiny.model(kind, len(known), eos_token_id=known.eos_token_id, **shape)
    made.save_pretrained(str(directory))
    known.save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, known: Any) -> Path:
    return written(tmp_path_factory.mktemp("llm") / "tiny", known)


def lines(path: Path, records: Any = RECORDS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.Env.CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv(contract.Env.OUTPUT, str(tmp_path / "out"))
    monkeypatch.setenv(contract.Env.CHECKPOINT_BEST, "1 min val_loss")


def refused(argv: list[str], said: str) -> None:
    """A run ends with a sentence."""
    with pytest.raises(OutlastError, match=said):
        disturbances.alone(llm.main, argv)


def arguments(model: Path, data: Path, *more: str) -> list[str]:
    step = ["--batch=2", "--grad-accum=2", "--seq-len=64", "--epochs=2", "--lr=1e-2", "--warmup=0", "--dtype=float32"]
    return [f"--model-local-dir={model}", f"--data={data}", *step, *more]


# What is learned of a record


@pytest.mark.parametrize(
    ("template", "said", "answers"),
    [
        (MARKED, "system\nHelp.|user\na|assistant\n<think>x</think>b|user\nc|assistant\n<think>y</think>d",
         "<think>x</think>b</s><think>y</think>d</s>"),
        (FORGETFUL, "user\na|assistant\nb|user\nc|assistant\n<think>y</think>d", "<think>y</think>d</s>"),
    ],
    ids=["marked", "forgetful"],
)  # fmt: skip
def test_what_the_assistant_says_is_found_in_any_chat_template(known: Any, template: str, said: str, answers: str) -> None:
    """By common beginnings of renderings. A turn that is rendered otherwise later on (without its thoughts) is not guessed at."""
    turns = [("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "<think>y</think>d")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    ids, labels = chat.sample(record, jsonl.segments(record, None, 0), other := _with(known, template))  # type: ignore[arg-type]
    found = other.decode(labels[labels != chat.NOT_LEARNED])
    assert other.decode(ids) == "".join(f"<s>{turn}</s>\n" for turn in said.split("|"))
    assert found.endswith(answers) if template is FORGETFUL else found == answers


def _with(known: Any, template: str) -> Any:
    other = copy.deepcopy(known)
    other.chat_template = template
    return other


def test_a_chat_that_the_template_refuses_names_the_file_and_the_line(tmp_path: Path, known: Any) -> None:
    other = _with(known, "{{ raise_exception('roles must alternate') }}")
    other.save_pretrained(str(tmp_path / "tokenizer"))
    source = lines(tmp_path / "train.jsonl", RECORDS[-1:] + CHATS)
    settings = jsonl.Settings(str(tmp_path / "tokenizer"), val=0)
    with pytest.raises(OutlastError, match=r"train.jsonl, line 2 is refused by the tokenizer's chat template: roles must alt"):
        jsonl.prepare(work_units.Request(source, tmp_path / "to"), settings)
    made = jsonl.prepare(work_units.Request(source, tmp_path / "to"), dataclasses.replace(settings, skip_damaged=True))
    assert (made.source["damaged"], len(made.source["left_out"]), made.part("train").samples) == (4, 3, 1)


# The loss


def rows_of(samples: list[llm_data.Sample], packing: bool) -> list[llm_data.Row]:
    return llm_data.packed(samples, 10**6) if packing else [llm_data.padded(samples)]


@pytest.mark.parametrize(
    ("kind", "more"),
    [("llama", {}), ("qwen2", {}), ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0})],
    ids=["llama", "qwen2", "sliding"],
)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_packed_and_padded_samples_have_the_loss_and_the_gradients_of_each_alone(
    tmp_path: Path, known: Any, kind: str, more: dict[str, Any], packing: bool
) -> None:
    """Positions begin anew in every sample, nothing attends to another one, and none predicts the first token of the next."""
    directory = written(tmp_path / kind, known, kind, **more)
    draw = torch.Generator().manual_seed(0)
    samples = []
    for n in (3, 17, 8, 5, 30, 9):
        tokens = torch.randint(len(known), (n,), generator=draw)
        samples.append((tokens, tokens.where(torch.rand(n, generator=draw) < 0.6, torch.tensor(-100))))
    net = llm_model.Tuned(llm_model.load(directory, torch.float32, 64, torch.device("cpu")), low=False)
    assert net.check() == ""
    assert not net.whole
    found = sum(net(row) for row in rows_of(samples, packing))
    found.backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    plain = llm_model.transformers.AutoModelForCausalLM.from_pretrained(str(directory), attn_implementation="eager")
    wanted = torch.zeros(())
    for tokens, labels in samples:
        logits = plain(tokens[None]).logits[0]
        wanted = wanted + F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
    wanted.backward()
    torch.testing.assert_close(found, wanted)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(gradients[f"model.{name}"], p.grad, rtol=1e-4, atol=1e-5)


def test_a_model_whose_head_is_more_than_a_product_computes_its_own_logits(model: Path) -> None:
    loaded = llm_model.load(model, torch.float32, 64, torch.device("cpu"))
    forward = loaded.forward

    def scaled(*args: Any, **options: Any) -> Any:
        found = forward(*args, **options)
        found.logits = 30 * torch.tanh(found.logits * 5 / 30)
        return found

    loaded.forward = scaled
    net = llm_model.Tuned(loaded, low=False)
    assert net.check() == ""
    assert net.whole


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mamba", {"state_size": 4}),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 32, "head_dim": 8}),
        ("bloom", {"n_head": 4}),
    ],
    ids=["state", "sinks", "alibi"],
)
def test_a_model_with_attention_of_its_own_keeps_it_and_pads(tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    """Which it is, its logits tell: weights this small have about the same loss whatever is attended to."""
    transformers = llm_model.transformers
    shape = {"vocab_size": 300, "num_hidden_layers": 1, "hidden_size": 32, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **shape, **more)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.mul_(5) if p.dim() > 1 else p.normal_() if name.endswith("sinks") else None
    made.save_pretrained(str(tmp_path))
    net = llm_model.Tuned(llm_model.load(tmp_path, torch.float32, 64, torch.device("cpu")), low=False)
    assert net.check().startswith("samples are not packed: ")
    tokens = torch.arange(3, 20)
    with torch.no_grad():
        wanted = F.cross_entropy(made.eval()(tokens[None]).logits[0, :-1], tokens[1:], reduction="sum")
        torch.testing.assert_close(net.eval()(llm_data.padded([(tokens, tokens)])), wanted)


def test_a_base_model_is_known_by_values_up_to_the_end_of_its_largest_weight() -> None:
    """Of more than 2^24 values, at which floats no longer count by ones."""
    net = torch.nn.Module()
    net.large = torch.nn.Parameter(torch.zeros(1).expand(151936 * 2048))
    assert len(llm_model.fingerprint(net)) == 16


def test_recomputed_activations_have_the_same_gradients(model: Path) -> None:
    tokens = torch.arange(3, 40)
    found = []
    for again in (False, True):
        net = llm_model.Tuned(llm_model.load(model, torch.float32, 64, torch.device("cpu")), low=False)
        if again:
            llm_model.recompute(net.base)
        passes: list[None] = []
        net.base.model.layers[1].self_attn.register_forward_hook(lambda *_, passes=passes: passes.append(None))
        net.train()(llm_data.packed([(tokens, tokens), (tokens, tokens)], 99)[0]).backward()
        assert len(passes) == 1 + again
        found.append([p.grad for p in net.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_step_is_the_mean_over_the_learned_tokens_of_the_global_batch(tmp_path: Path, model: Path) -> None:
    """However it is cut: 4 micro-batches of 1 sample and 1 of 4 are the same step, although the samples differ in length."""
    data = lines(tmp_path / "train.jsonl")
    found = []
    for number, cut in enumerate((["--batch=1", "--grad-accum=4"], ["--batch=4", "--grad-accum=1"], ["--no-packing"])):
        os.environ[contract.Env.OUTPUT] = str(tmp_path / str(number))
        llm.main(arguments(model, data, "--val=none", "--epochs=1", "--no-epoch-results", *cut))
        found.append(disturbances.logged(tmp_path / str(number)))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] == pytest.approx(found[2], rel=1e-4)
    assert len(found[0]) == 3, "10 samples make 3 steps an epoch: the last, smaller group is a step of its own"


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, list[float]]]:
    """Of each step, the norm of its gradients, and the decay of each group of parameters."""
    found, step = list[tuple[float, list[float]]](), torch.optim.AdamW.step

    def noted(self: torch.optim.AdamW, *args: Any, **named: Any) -> Any:
        gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
        found.append((torch.cat(gradients).norm().item(), [group["weight_decay"] for group in self.param_groups]))
        return step(self, *args, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    return found


def test_the_learning_rate_rises_and_falls_to_zero_over_the_true_number_of_steps() -> None:
    s = llm.Settings(data="x", lr=1.0, warmup=0.25)
    assert [llm.rate(s, step, 8) for step in range(9)] == pytest.approx([0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


# A run


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_what_a_run_writes_hugging_face_reads(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], lora: bool
) -> None:
    """Epochs and the last weights, as an adapter, merged, or whole, have the logits of training; a report has all tokens."""
    data = lines(tmp_path / "data" / "train.jsonl").parent
    lines(data / "val.jsonl", RECORDS[::3])
    more = ["--lora", "--lora-r=4", "--lora-dropout=0.1", "--merge"] if lora else []
    llm.main(arguments(model, data, f"--report-json={tmp_path / 'report.json'}", "--log-batches=all", *more))
    output = tmp_path / "out"
    kinds = [line.split("[")[1].split("]")[0] for line in capsys.readouterr().out.splitlines() if "[" in line]
    assert kinds.count("COLLATE") == 6
    assert [kind for kind in kinds if kind in ("TRAIN", "EPOCH", "DONE")] == ["TRAIN", "EPOCH", "TRAIN", "EPOCH", "DONE"]
    report = json.loads((tmp_path / "report.json").read_text())
    train = llm_data.cached(llm_data.Source(data / "train.jsonl", "train"), model, skip_bad=False, make=False, say=print)
    tokens = sum(len(Shards(train)[i]["input_ids"]) for i in range(10))
    assert (report["world_size"], report["tokens_total"]) == (1, 2 * tokens)
    assert report["tokens_per_sec"] == pytest.approx(report["tokens_total"] / report["elapsed_sec"], rel=0.05)
    best = json.loads((output / "best.json").read_text())
    assert best["perplexity"] == pytest.approx(math.exp(best["val_loss"]))
    assert disturbances.final(output)["best"] == best

    transformers, peft = llm_model.transformers, llm_model.peft
    ids = torch.arange(12)[None] * 3
    auto = transformers.AutoModelForCausalLM.from_pretrained
    parts = llm.Parts.load(llm.settings.parse(llm.Settings, arguments(model, data, *more), ""), torch.device("cpu"), None)
    newest = max((output / "checkpoints").glob("step-*"))
    trains = parts.training()
    checkpoint.restore(newest, {"model": trains})
    with torch.no_grad():
        wanted = parts.tuned.eval().base(ids).logits
        for name in ("model", "epoch-2", *(["merged"] if lora else [])):
            read = auto(str(model if lora and name != "merged" else output / name))
            if lora and name != "merged":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for names of old
                    read = peft.PeftModel.from_pretrained(read, str(output / name))
            torch.testing.assert_close(read.eval()(ids).logits, wanted, msg=name)
        assert not torch.equal(auto(str(model))(ids).logits, wanted)
    assert transformers.AutoTokenizer.from_pretrained(str(output / "model")).chat_template == chat.TEMPLATE
    names = set(checkpoint.read(newest, "model"))
    assert all("lora_" in name for name in names) is lora, "under LoRA a checkpoint holds what trains, and nothing else"

    llm.main(arguments(model, data, "--evaluate", *more))
    measured = json.loads((output / "evaluation.json").read_text())
    assert measured["loss"] == pytest.approx(disturbances.final(output)["val_loss"], rel=1e-5)
    assert measured["weights_sha256"] == disturbances.final(output)["weights_sha256"]
    assert f"{measured['loss']:.4f}" in capsys.readouterr().out


def test_a_checkpoint_refuses_another_base_and_other_data(tmp_path: Path, model: Path, known: Any) -> None:
    data = lines(tmp_path / "train.jsonl")
    llm.main(arguments(model, data, "--lora", "--max-steps=2"))
    other = written(tmp_path / "other", known, seed=1)
    refused(arguments(other, data, "--lora", "--max-steps=4"), "belongs to another base model")
    changed = lines(tmp_path / "other.jsonl", [*RECORDS[:-1], {"text": "Another sentence of the same number."}])
    refused(arguments(model, changed, "--lora", "--max-steps=4"), "belongs to other training data")


def test_gradients_are_clipped_and_a_run_that_ends_within_an_epoch_goes_on_with_another_decay(
    tmp_path: Path, model: Path, stepped: list[tuple[float, list[float]]]
) -> None:
    argv = arguments(model, lines(tmp_path / "train.jsonl"), "--lora", "--no-epoch-results", "--val=none", "--grad-clip=0.001")
    for more in (["--max-steps=2", "--wd=0"], ["--max-steps=3", "--wd=0.5"]):
        llm.main([*argv, *more])
    assert [decays for _, decays in stepped] == [[0.0], [0.0], [0.5]]
    assert [norm for norm, _ in stepped] == pytest.approx([0.001] * 3, rel=0.01)


def test_a_run_that_ends_within_an_epoch_has_a_best_checkpoint(tmp_path: Path, model: Path, capsys: Any) -> None:
    argv = arguments(model, lines(tmp_path / "train.jsonl"), "--lora", "--max-steps=1", f"--val={lines(tmp_path / 'some.jsonl')}")
    llm.main(argv)
    best = json.loads((Path(os.environ[contract.Env.OUTPUT]) / "best.json").read_text())
    assert best["step"] == 1
    assert "directory" not in best, "a longer run would overwrite model/ with weights that may be worse"
    llm.main([*argv, "--evaluate", "--checkpoint=best"])
    assert "step-00000001" in capsys.readouterr().out


def test_under_lora_frozen_weights_are_bfloat16_and_what_trains_is_float32(tmp_path: Path, model: Path) -> None:
    """Nothing is float16, which needs a scaler for its gradients."""
    found = {}
    for lora in (True, False):
        more = ["--lora"] if lora else []
        argv = [*arguments(model, lines(tmp_path / "train.jsonl")), "--dtype=bfloat16", *more]
        parts = llm.Parts.load(llm.settings.parse(llm.Settings, argv, ""), torch.device("cpu"), None)
        found[lora] = {(p.requires_grad, p.dtype) for p in parts.tuned.parameters()}
    assert found == {True: {(True, torch.float32), (False, torch.bfloat16)}, False: {(True, torch.float32)}}
    with pytest.raises(OutlastError, match="'float16' is not one of auto, float32, bfloat16"):
        llm.main(["--dtype=float16"])


# Wrong input


def test_a_bad_line_is_found_before_training_and_may_be_left_out(tmp_path: Path, model: Path, capsys: Any) -> None:
    data = lines(tmp_path / "train.jsonl", [*RECORDS[:7], "{", *RECORDS[7:]])
    refused(arguments(model, data), "train.jsonl, line 8 is not JSON: ")
    assert not (tmp_path / "out" / contract.METRICS).exists()
    llm.main(arguments(model, data, "--skip-bad", "--max-steps=1", "--no-epoch-results"))
    told = capsys.readouterr().out
    assert [said for said in ("1 of the lines of", "train.jsonl, line 8 is not JSON: ", "10 samples") if said not in told] == []


def test_data_are_tokenized_once_and_again_when_they_change(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    write = jsonl._write
    monkeypatch.setattr(jsonl, "_write", lambda unit, **options: made.append(options["to"]) or write(unit, **options))
    data = lines(tmp_path / "train.jsonl")
    source = llm_data.Source(data, "train")
    for records, wanted in ((RECORDS, 1), (RECORDS, 1), (RECORDS[1:], 2)):
        if records is not RECORDS:
            lines(data, records)
        llm_data.cached(source, model, skip_bad=False, make=True, say=lambda text: None)
        assert len(made) == wanted
    assert llm_data.cached(source, model, skip_bad=False, make=False, say=lambda text: None) == made[-1].parent.parent


def test_prepared_data_are_read_as_they_are_and_cut_samples_are_counted(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = lines(tmp_path / "train.jsonl")
    jsonl.prepare(work_units.Request(source, tmp_path / "prepared"), jsonl.Settings(str(model), val=0.3))
    llm.main(arguments(model, tmp_path / "prepared", "--seq-len=8", "--max-steps=1", "--no-epoch-results"))
    told = capsys.readouterr().out
    assert "samples are longer than --seq-len 8 and lose their end" in told
    assert "samples are left out: nothing to learn within --seq-len 8" in told
    assert disturbances.final(tmp_path / "out")["val_loss"] > 0


def test_what_is_measured_is_said(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = lines(tmp_path / "train.jsonl")
    sources = llm_data.sources
    beside = llm_data.Source(data, "train")
    missing = f"nothing is measured: {tmp_path / 'val.jsonl'} does not exist; --val FILE names a validation file"
    assert sources(str(data), "") == (beside, None, missing)
    assert sources(str(data), "none")[1:] == (None, "nothing is measured: --val none")
    val = lines(tmp_path / "val.jsonl", ["", " "])
    assert sources(str(tmp_path), "") == (beside, llm_data.Source(val, "train"), "")
    refused(arguments(model, data), r"val\.jsonl is empty; give it records, one a line")
    with pytest.raises(OutlastError, match=r"--val nowhere\.jsonl does not exist"):
        sources(str(data), "nowhere.jsonl")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model-local-dir=nowhere"], "--model-local-dir nowhere is no directory"),
        (["--tokenizer-local-dir=nowhere"], "--tokenizer-local-dir nowhere is no directory"),
        (["--tokenizer-local-dir=."], "has no tokenizer.json; name a directory of Hugging Face that has one"),
        (["--lora", "--target-modules", "q_proj", "query"], "--target-modules query: the model has no such module; it has down"),
        (["--seq-len=4096"], "--seq-len 4096 is above the 128 positions of tiny; give at most that"),
        (["--data=nowhere"], "--data nowhere does not exist"),
        (["--report-json=."], "--report-json . is a directory; name a file"),
        (["--bf16"], "--bf16 and --dtype float32 contradict each other"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    refused([*arguments(model, lines(tmp_path / "train.jsonl")), *flags], said)
    assert not list((tmp_path / "out" / "checkpoints").glob("step-*"))


def test_a_model_is_found_below_the_jobs_models_and_never_downloaded_when_that_is_forbidden(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(contract.Env.MODELS, str(model.parent))
    for name in ("someone/tiny", str(model)):
        assert llm_model.place(name, "", offline=True) == (model, str(model.resolve()))
    with pytest.raises(OutlastError, match="model someone/else is not here, and nothing may be downloaded"):
        llm_model.place("someone/else", "", offline=True)


def test_an_offline_start_finds_what_an_earlier_one_has_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not the whole repository: weights in other formats, for instance, are left there."""
    monkeypatch.setattr(llm_model.huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--someone--tiny", "0" * 40
    snapshot = repository / "snapshots" / commit
    files = {name: {"size": 2, "blob_id": "0"} for name in ("config.json", "pytorch_model.bin")}
    for path, text in (
        (repository / "refs" / "main", commit),
        (snapshot / "config.json", "{}"),
        (repository / "trees" / f"{commit}.json", json.dumps({"format_version": 1, "files": files})),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert llm_model.place("someone/tiny", "", offline=True) == (snapshot, "someone/tiny")


# In several processes


@pytest.mark.slow
def test_resized_1_to_3_to_2_each_sample_is_seen_once_and_the_loss_is_the_same(tmp_path: Path, model: Path) -> None:
    """So gradients are the mean over the tokens of all ranks, however unevenly these are dealt."""
    data = lines(tmp_path / "data" / "train.jsonl").parent
    lines(data / "val.jsonl", RECORDS[:5])
    argv = arguments(model, data, "--epochs=1", "--batch=1", "--grad-accum=3", "--no-epoch-results")
    disturbances.resized(llm.main, argv, tmp_path, logs=("loss", "val_loss", "tokens"), preload=["outlast.recipes.llm_model"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("lora", "parallel"), [(True, "ddp"), (False, "fsdp")], ids=["lora", "full"])
def test_killed_20_times_it_ends_with_the_same_bits(tmp_path: Path, model: Path, parallel: str, lora: bool) -> None:
    data = lines(tmp_path / "data" / "train.jsonl").parent
    lines(data / "val.jsonl", RECORDS[:5])
    argv = arguments(model, data, "--epochs=20", f"--parallel={parallel}", *(["--lora", "--lora-dropout=0.2"] if lora else []))
    disturbances.killed_20_times(llm.main, argv, tmp_path, logs=("loss", "val_loss"), preload=["outlast.recipes.llm_model"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_tiny_model_memorises_ten_samples(tmp_path: Path, known: Any, kind: str, lora: bool) -> None:
    directory = written(tmp_path / "model", known, kind, width=64, tie_word_embeddings=False)
    data = lines(tmp_path / "train.jsonl", RECORDS * 5)
    more = ["--epochs=30", "--batch=10", "--grad-accum=1", "--no-epoch-results", "--wd=0", "--val=none", "--lr=3e-3"]
    if lora:
        more += ["--lr=5e-3", "--lora", "--lora-r=32", "--lora-alpha=64", "--lora-dropout=0", "--target-modules", *MODULES]
    llm.main(arguments(directory, data, *more))
    assert disturbances.final(tmp_path / "out")["loss"] < 0.05
