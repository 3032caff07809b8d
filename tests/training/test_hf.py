"""`outlast.hf.attach`: a Trainer that is killed continues with the same samples, logs and weights. Needs transformers.

All starts are in one process. A kill is an exception in a callback that comes after ours. Nothing of the interrupted start is
used but its checkpoints.
"""

from __future__ import annotations

import copy
import functools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.base.errors import OutlastError
from outlast.job.contract import Env
from outlast.job.workerfiles import progress_file
from outlast.storage import checkpoints
from outlast.training import session

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import outlast.hf

pytestmark = [
    pytest.mark.usefixtures("a_checkpoint_of_each_step"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(120),
]
SAMPLES, STEPS = 30, 12
NEW = {"train_sampling_strategy", "enable_jit_checkpoint"} <= TrainingArguments.__dataclass_fields__.keys()
LOGGED = ("loss", "eval_loss") if int(transformers.__version__.partition(".")[0]) >= 5 else ("eval_loss",)
"""Logs that are those of the undisturbed run: transformers 4 keeps the sum of losses in a local variable."""


class Data(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples with random noise, and the numbers of those that were read."""

    def __init__(self) -> None:
        self.rows = torch.randint(64, (SAMPLES, 8), generator=torch.Generator().manual_seed(0))
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        row = self.rows[index].clone()
        row[random.randrange(8)] = torch.randint(64, ()).item()
        return {"input_ids": row, "labels": self.rows[index]}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    return {"input_ids": torch.where(torch.rand(ids.shape) < 0.1, 0, ids), "labels": labels}


class Killed(Exception):
    pass


class Kill(TrainerCallback):
    """Does something at an event of the Trainer, at a step: by default, it dies."""

    def __init__(self, event: str, step: int, act: Callable[[], object] | None = None) -> None:
        def at(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                if act is None:
                    raise Killed
                act()

        setattr(self, event, at)


def killed(made: Trainer, event: str, step: int, batch: int = 4) -> Trainer:
    """The trainer after a start that dies."""
    outlast.hf.attach(made, batch=batch)
    made.add_callback(Kill(event, step))
    with pytest.raises(Killed):
        made.train()
    return made


Changes = dict[str, Any]


def trainer(directory: Path, **changes: Any) -> Trainer:
    """A small GPT-2 with dropout, accumulation, a schedule, and an evaluation every four steps."""
    transformers.set_seed(7)
    options = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 3}
    options |= {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    callbacks = changes.pop("callbacks", [])
    made = changes.pop("kind", Trainer)
    args = TrainingArguments(str(directory), use_cpu=True, seed=7, **(options | changes))
    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    data = Data()
    return made(
        GPT2LMHeadModel(config),
        args,
        train_dataset=data,
        eval_dataset=copy.deepcopy(data),
        data_collator=collate,
        callbacks=callbacks,
    )


def outcome(made: Trainer) -> tuple[list[bytes], list[dict[str, Any]], int]:
    """Weights, logs without what clocks and the size of a start change, and the last step."""
    clocks = ("runtime", "per_second", "train_loss", "total_flos", "grad_norm", "learning_rate")
    logs = [{name: value for name, value in entry.items() if not name.endswith(clocks)} for entry in made.state.log_history]
    weights = [parameter.detach().numpy().tobytes() for parameter in made.model.parameters()]
    return weights, [entry for entry in logs if any(name in entry for name in LOGGED)], made.state.global_step


def trained(directory: Path, kills: list[tuple[str, int]], make: Callable[[], Changes] = dict, batch: int = 4) -> Trainer:
    """The trainer that has finished, after a start for each of the kills."""
    for event, step in kills:
        killed(trainer(directory, **make()), event, step, batch)
    last = trainer(directory, **make())
    outlast.hf.attach(last, batch=batch)
    last.train()
    return last


CASES: dict[str, tuple[Callable[[], Changes], list[tuple[str, int]]]] = {
    "steps, evaluations": (dict, [("on_step_begin", 5), ("on_pre_optimizer_step", 8), ("on_evaluate", 8), ("on_step_begin", 11)]),
    "epochs": (
        lambda: {"max_steps": -1, "num_train_epochs": 2}
        | {f"{work}_strategy": "epoch" for work in ("eval", "save", "logging")},
        [("on_epoch_end", 8), ("on_save", 8), ("on_epoch_begin", 8), ("on_evaluate", 16), ("on_train_end", 16)],
    ),
    "a plateau, and stopping early": (
        lambda: {
            "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, "eval_steps": 2,
            "metric_for_best_model": "loss", "load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2,
            "callbacks": [EarlyStoppingCallback(2, early_stopping_threshold=10.0)],
        },
        [("on_evaluate", 2), ("on_step_begin", 3), ("on_evaluate", 6), ("on_train_end", 6)],
    ),
    "the last batch left out, samples in order": (
        lambda: {"dataloader_drop_last": True} | ({"train_sampling_strategy": "sequential"} if NEW else {}),
        [("on_step_begin", 7)],
    ),
    "worker processes": (lambda: {"dataloader_num_workers": 1, "max_steps": 4}, [("on_step_begin", 2)]),
}  # fmt: skip


Outcome = Callable[[Callable[[], Changes]], tuple[list[bytes], list[dict[str, Any]], int]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The outcome of trainers that nothing disturbs, each of which trains once."""
    return functools.cache(lambda make: outcome(trained(tmp_path_factory.mktemp("undisturbed"), [], make)))


@pytest.mark.parametrize("case", [next(iter(CASES)), *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])])
def test_a_trainer_that_is_killed_ends_as_one_that_is_not(tmp_path: Path, case: str, undisturbed: Outcome) -> None:
    make, kills = CASES[case]
    assert outcome(trained(tmp_path, kills, make)) == undisturbed(make)
    assert undisturbed(make)[2] > 2


def sft(directory: Path) -> Any:
    """TRL's SFTTrainer for a LoRA of a small GPT-2 with dropout, on text of several lengths."""
    trl = pytest.importorskip("trl", exc_type=ImportError)
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers.set_seed(7)
    words = ["<unk>", "<pad>", "<eos>", *(f"w{number}" for number in range(29))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=2)
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words[3:], k=draw.randrange(4, 12))) for _ in range(SAMPLES)]
    options = {"max_steps": STEPS, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 4}
    options |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 3, "bf16": False}
    return trl.SFTTrainer(
        GPT2LMHeadModel(config),
        trl.SFTConfig(str(directory), use_cpu=True, seed=7, learning_rate=1e-2, max_length=16, **options),
        train_dataset=Dataset.from_dict({"text": texts}),
        eval_dataset=Dataset.from_dict({"text": texts[:4]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True, task_type="CAUSAL_LM"),
    )


@pytest.mark.slow
def test_trls_trainer_of_a_lora_that_is_killed_ends_as_one_that_is_not(tmp_path: Path) -> None:
    def losses(directory: Path) -> Any:  # its own counts of tokens begin again with the process, as when it resumes by itself
        made = sft(directory)
        outlast.hf.attach(made, batch=4)
        made.train()
        weights, logs, last = outcome(made)
        return weights, [{name: entry.get(name) for name in (*LOGGED, "step")} for entry in logs], last

    undisturbed = losses(tmp_path / "undisturbed")
    for event, step in (("on_step_begin", 3), ("on_evaluate", 8), ("on_pre_optimizer_step", 10)):
        killed(sft(tmp_path / "killed"), event, step)
    assert losses(tmp_path / "killed") == undisturbed
    assert undisturbed[2] == STEPS


def test_a_run_that_has_ended_may_get_more_steps_and_evaluations_may_follow_it(tmp_path: Path) -> None:
    make = {"lr_scheduler_type": "constant"}
    whole = trained(tmp_path / "whole", [], lambda: make | {"max_steps": 5})
    trained(tmp_path / "more", [], lambda: make | {"max_steps": 3})
    more = trained(tmp_path / "more", [], lambda: make | {"max_steps": 5})
    assert (outcome(more)[0], outcome(more)[2]) == (outcome(whole)[0], 5)
    assert more.evaluate()["eval_loss"] > 0, "the session has ended, and is not asked"


def test_a_checkpoint_of_the_trainer_itself_is_imported_at_the_first_start(tmp_path: Path) -> None:
    old = trainer(tmp_path, save_strategy="steps", save_steps=4, max_steps=4)
    old.train()
    new = trainer(tmp_path, max_steps=6)
    outlast.hf.attach(new, batch=4)
    new.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [entry["step"] for entry in new.state.log_history if "loss" in entry] == [3, 6]


class Shuffles(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.RandomSampler(self.train_dataset)


class GRPOTrainer(Trainer):
    pass


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ()


REFUSED: dict[str, Changes] = {
    "auto_find_batch_size begins again with another batch; leave it out": {"auto_find_batch_size": True},
    "samples are grouped by length, which depends on the batch of a rank": {"train_sampling_strategy": "group_by_length"}
    if NEW
    else {"group_by_length": True},
    "Shuffles._get_train_sampler chooses the samples itself": {"kind": Shuffles},
    "GRPOTrainer generates samples while it trains": {"kind": GRPOTrainer},
} | ({"enable_jit_checkpoint also saves on SIGTERM; leave it out": {"enable_jit_checkpoint": True}} if NEW else {})


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_trainer_that_cannot_continue_exactly_is_refused(tmp_path: Path, sentence: str) -> None:
    made = trainer(tmp_path, **REFUSED[sentence])
    with pytest.raises(OutlastError, match=f"^outlast.hf.attach: {sentence}"):
        outlast.hf.attach(made, batch=4)
    assert type(made).__mro__[0] is REFUSED[sentence].get("kind", Trainer)


def test_what_is_attached_too_late_or_twice_or_to_other_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutlastError, match="a dict is no Trainer of transformers"):
        outlast.hf.attach({}, batch=4)  # type: ignore[arg-type]
    made = trainer(tmp_path)
    made.train_dataset = Stream()
    with pytest.raises(OutlastError, match="the training data is a Stream without an order to continue; give a dataset with"):
        outlast.hf.attach(made, batch=4)
    made = trainer(tmp_path, max_steps=1)
    with pytest.raises(OutlastError, match=r"batch \(0\) must be a whole number of 1 or more"):
        outlast.hf.attach(made, batch=0)
    made.optimizer = object()
    with pytest.raises(OutlastError, match="the optimizer has no state_dict"):
        outlast.hf.attach(made, batch=4)
    made.optimizer = None
    outlast.hf.attach(made, batch=4)
    with pytest.raises(OutlastError, match="this trainer is attached already"):
        outlast.hf.attach(made, batch=4)
    made.train()
    with pytest.raises(OutlastError, match=r"train\(\) is called a second time; one run trains once"):
        made.train()
    late = trainer(tmp_path, max_steps=1)
    late.train()
    with pytest.raises(OutlastError, match=r"training has begun already; attach before trainer.train\(\)"):
        outlast.hf.attach(late, batch=4)


def test_another_transformers_is_told_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path)
    monkeypatch.setattr(Trainer, "_load_scaler", lambda self, path: None)
    sentence = f"transformers {transformers.__version__} has another Trainer._load_scaler than this Outlast knows; tested: "
    with pytest.raises(OutlastError, match=sentence):
        outlast.hf.attach(made, batch=4)


def test_the_batch_is_reported_before_it_is_refused_and_kept_by_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Env.STATE, str(tmp_path))
    made = trainer(tmp_path / "out")
    monkeypatch.setattr(TrainingArguments, "world_size", 3)
    with pytest.raises(OutlastError, match=r"a global batch of 8 samples cannot be shared equally among 3 ranks"):
        outlast.hf.attach(made, batch=8)
    record = progress_file.read(tmp_path, 0)
    assert (record.phase, record.batch) == ("started", 8)
    with session.attach(output=tmp_path / "own", batch=6):
        record = progress_file.read(tmp_path, 0)
        assert (record.phase, record.batch) == ("open", 6)


def test_a_worker_that_is_told_to_leave_saves_even_within_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Outcome
) -> None:
    expected = undisturbed(dict)
    monkeypatch.setenv(Env.CHECKPOINT_EVERY, "1000 steps")
    for event, step in (("on_prediction_step", 4), ("on_step_begin", 6)):
        made = trainer(tmp_path / "left")
        outlast.hf.attach(made, batch=4)
        made.add_callback(Kill(event, step, lambda made=made: setattr(made._outlast.run, "_leaving", True)))
        with pytest.raises(SystemExit, match="75"):
            made.train()
    assert outcome(trained(tmp_path / "left", [])) == expected


@pytest.mark.parametrize(("strategy", "evaluated"), [("steps", [4, 8]), pytest.param("epoch", [8, 16], marks=pytest.mark.slow)])
def test_the_best_checkpoints_are_ranked_by_the_evaluation_of_their_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, evaluated: list[int]
) -> None:
    """Their state is that of the end of the step: a run that continues from one ends as the undisturbed one does."""
    monkeypatch.setenv(Env.CHECKPOINT_EVERY, "4 steps")
    monkeypatch.setenv(Env.CHECKPOINT_BEST, "9 min eval_loss")
    runs = [
        trained(tmp_path / str(len(kills)), kills, lambda: {"eval_strategy": strategy, "max_steps": evaluated[-1]})
        for kills in ([], [("on_step_begin", evaluated[0] + 1)])
    ]
    assert outcome(runs[0]) == outcome(runs[1])
    measured = {entry["step"]: entry["eval_loss"] for entry in runs[0].state.log_history if "eval_loss" in entry}
    assert list(measured) == evaluated
    for number in ("0", "1"):
        saved = checkpoints.list_(tmp_path / number / "outlast" / "checkpoints")
        found = {each.step: each.metric and each.metric.value for each in saved if each.step in measured}
        assert evaluated[-1] in found  # others may be skipped while a save is in progress
        assert found.items() <= measured.items()
