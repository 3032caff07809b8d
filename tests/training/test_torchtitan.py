"""`outlast.torchtitan`: a Trainer of torchtitan that is killed continues with the same samples and weights, on gloo.

torchtitan is made for GPUs; `_on_cpus` replaces what does not exist on a CPU. Its dependencies are large (triton alone has a
gigabyte), so it is not installed with the other tools of development, and these tests are skipped without it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, WeightedRandomSampler

import ports
import worlds
from outlast.base.errors import OutlastError
from outlast.job.contract import Env

pytest.importorskip("torchtitan")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
SAMPLES, BATCH, STEPS, LENGTH = 18, 4, 12, 16


def _on_cpus() -> None:
    """Import torchtitan for CPUs: it takes the device from torch at its import, and asks GPUs for their memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._utils, "_get_available_device_type", lambda: "cpu")
        import torchtitan.tools.utils
    import torchtitan.components.metrics
    import torchtitan.distributed.utils

    class Memory:
        device_name, device_capacity_gib = "cpu", 0.0

        def get_peak_stats(self) -> Any:
            return torchtitan.components.metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

        def reset_peak_stats(self) -> None: ...

    torchtitan.components.metrics.build_device_memory_monitor = Memory
    torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None  # calls torch.distributed.set_timeout of torch > 2.13


class Data(torch.utils.data.Dataset[Any]):
    """Samples with random noise, and the numbers of those that were read."""

    def __init__(self, length: int) -> None:
        self.rows = torch.randint(2048, (SAMPLES, length + 1), generator=torch.Generator().manual_seed(0))
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        tokens = self.rows[index].clone()
        tokens[random.randrange(LENGTH)] = torch.randint(2048, ()).item()
        return {"input": tokens[:-1]}, tokens[1:]


def data(_: Any, length: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Data(length), **{"batch_size": 1, "shuffle": True, **options})


def parallelized(model: Any, **options: Any) -> Any:
    """A model with dropout, whose gradients gloo can reduce."""
    from torchtitan.models.llama3 import parallelize_llama

    model.tok_embeddings.register_forward_hook(
        lambda module, _, embedded: torch.nn.functional.dropout(embedded, 0.1, training=module.training)
    )
    model = parallelize_llama(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def configured(dump: Path, **changes: Any) -> Any:
    """The configuration of a Llama of one layer, with a schedule, accumulation on one rank, and a validation."""
    _on_cpus()
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import BaseValidator
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    import outlast.torchtitan

    class Tokenizer(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, *, tokenizer_path: str) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None  # type: ignore[assignment]

    class Validator(BaseValidator):
        """A validation that draws random numbers, at every third step."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseValidator.Config):
            enable: bool = True
            freq: int = 3

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__(config=config)
            self.done: list[int] = []

        def validate(self, model_parts: Any, step: int) -> None:
            torch.rand(())
            self.done.append(step)

    spec = model_registry("debugmodel")
    del spec.model.layers[1:]
    for _, _, parent, attribute in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    spec.parallelize_fn = parallelized
    training = {"local_batch_size": 2, "global_batch_size": BATCH, "seq_len": LENGTH, "steps": STEPS}
    training |= {"disable_cuda_graphs": True, "mixed_precision_param": "float32"}
    parallelism = {"spmd_backend": "partial_dtensor"}  # the default needs torch > 2.13
    return Trainer.Config(
        model_spec=spec,
        dump_folder=str(dump),
        tokenizer=Tokenizer.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(**(training | changes.pop("training", {}))),
        parallelism=ParallelismConfig(**(parallelism | changes.pop("parallelism", {}))),
        dataloader=outlast.torchtitan.Loader.Config(make=changes.pop("make", data), batch=changes.pop("batch", BATCH)),
        checkpoint=outlast.torchtitan.CheckpointManager.Config(**changes.pop("checkpoint", {"load_only": True})),
        metrics=MetricsProcessor.Config(log_freq=2),
        activation_checkpoint=None,
        validator=Validator.Config(),
        debug=DebugConfig(seed=3),
        **changes,
    )


def weights(trainer: Any) -> list[torch.Tensor]:
    return [each.full_tensor().detach() for each in trainer.model_parts[0].parameters()]


def hashed(trainer: Any) -> str:
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights(trainer))).hexdigest()


def train(kill_at: int = 0, **changes: Any) -> None:
    """Train as a rank, and write `rank-R.json`. With `kill_at`, die within that step."""
    warnings.simplefilter("ignore")
    output = Path(os.environ[Env.OUTPUT])
    trainer = configured(output, **changes).build()
    step = trainer.train_step

    def killed(batches: Any) -> None:
        while trainer.checkpointer.run._saver.busy:  # so that each step is saved
            time.sleep(0.001)
        if trainer.step == kill_at:
            next(batches)
            os.kill(os.getpid(), signal.SIGKILL)
        step(batches)

    trainer.train_step = killed
    trainer.train()
    result = {
        "hash": hashed(trainer),
        "norms": [float(each.norm()) for each in weights(trainer)],
        "read": trainer.dataloader.dataset.read,
        "validated": trainer.validator.done,
        "position": [trainer.step, trainer.ntokens_seen],
    }
    trainer.close()
    (output / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result))


def world(output: Path, ranks: int, generation: int, kill_at: int = 0, **changes: Any) -> worlds.Ended:
    program = functools.partial(train, kill_at, **changes)
    started = worlds.started(program, output, ranks, generation=generation, **{Env.CHECKPOINT_EVERY: "1 step"})
    return worlds.ended(started, output)


def order(end: worlds.Ended) -> list[int]:
    """The samples of all ranks, in the order of the steps."""
    share = BATCH // len(end.codes)
    reads = [result["read"] for result in end.results]
    assert {len(read) % share for read in reads} == {0}
    return [n for at in range(0, len(reads[0]), share) for read in reads for n in read[at : at + share]]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_world_that_is_killed_ends_as_one_that_is_not_and_another_degree_continues_the_order(
    tmp_path: Path, replicas: int
) -> None:
    """With sharded and with replicated models."""
    of_two = functools.partial(world, ranks=2, parallelism={"data_parallel_replicate_degree": replicas})
    calm = of_two(tmp_path / "calm", generation=1)
    assert calm.codes == [0, 0], calm.errors
    [expected] = worlds.hashes(calm)
    samples = order(calm)
    epoch = samples[: -(-SAMPLES // BATCH) * BATCH]
    assert sorted(set(epoch)) == list(range(SAMPLES))
    assert epoch[SAMPLES:] == epoch[: len(epoch) - SAMPLES], "the last batch is filled up with the first samples"

    killed = of_two(tmp_path / "killed", generation=1, kill_at=7)
    assert killed.codes == [-signal.SIGKILL] * 2, killed.errors
    shutil.copytree(tmp_path / "killed", tmp_path / "alone")

    same = of_two(tmp_path / "killed", generation=2)
    assert worlds.hashes(same) == {expected}
    assert order(same) == samples[6 * BATCH :]
    assert [result["validated"] for result in same.results] == [[6, 9, 12]] * 2, "step 6 is validated again"

    alone = world(tmp_path / "alone", ranks=1, generation=2)
    assert order(alone) == samples[6 * BATCH :]
    [result] = alone.results
    assert result["position"] == [STEPS, STEPS * BATCH * LENGTH]
    assert result["norms"] == pytest.approx(calm.results[0]["norms"], rel=1e-2), "dropout is another with each number of ranks"


class Killed(Exception):
    pass


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, a_checkpoint_of_each_step: None) -> Iterator[None]:
    """This process is the world. torchtitan stops the garbage collector and autograd's threads."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": ports.free()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield
    gc.enable()
    torch.autograd.set_multithreading_enabled(True)


def at(method: str, step: int, act: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what makes a Trainer do something at a step, before one of its methods: `train_step` or `validator.validate`."""

    def prepare(trainer: Any) -> None:
        owner = trainer.validator if method == "validate" else trainer
        before = getattr(owner, method)

        def acted(*args: Any) -> Any:
            if trainer.step == step:
                act(trainer)
            return before(*args)

        setattr(owner, method, acted)

    return prepare


def die(_: Any) -> None:
    raise Killed


def trained(config: Any, prepare: Callable[[Any], object] = lambda trainer: None) -> Any:
    """Train in this process as torchtitan's `main` does."""
    trainer = config.build()
    prepare(trainer)
    try:
        trainer.train()
    except Exception:
        trainer.close()
        raise
    else:
        trainer.close()
    finally:
        torch.distributed.destroy_process_group()
    return trainer


@pytest.mark.usefixtures("one_rank")
def test_a_trainer_that_is_killed_or_told_to_leave_ends_as_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = trained(configured(tmp_path / "calm"))
    struck = functools.partial(configured, tmp_path / "struck")
    for disturbance in (at("train_step", 4, die), at("validate", 6, die)):
        with pytest.raises(Killed):
            trained(struck(), disturbance)
    monkeypatch.setenv(Env.CHECKPOINT_EVERY, "1000 steps")
    with pytest.raises(SystemExit, match="75"):
        trained(struck(), at("train_step", 8, lambda trainer: setattr(trainer.checkpointer.run, "_leaving", True)))
    last = trained(struck())
    assert last.dataloader.dataset.read == calm.dataloader.dataset.read[8 * BATCH :]
    assert (hashed(last), last.ntokens_seen) == (hashed(calm), calm.ntokens_seen)
    assert (calm.validator.done, last.validator.done) == ([1, 3, 6, 9, 12], [9, 12])
    logged = [json.loads(line) for line in (tmp_path / "struck" / "outlast" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "loss_metrics/global_avg_loss" in line] == [1, 2, 4, 6, 8, 10, 12]


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_torchtitan_is_imported_at_the_first_start_and_not_read_later(tmp_path: Path) -> None:
    from torchtitan.components.checkpointer import CheckpointManager

    theirs = configured(tmp_path, training={"steps": 3})
    theirs.checkpoint = CheckpointManager.Config(enable=True, last_save_model_only=False)
    trained(theirs)
    ours = functools.partial(configured, tmp_path, checkpoint={"interval": 4})
    with pytest.raises(Killed):
        trained(ours(), at("train_step", 7, die))
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-3", "step-4"]
    shutil.rmtree(tmp_path / "checkpoint")
    last = trained(ours())
    assert (last.step, len(last.dataloader.dataset.read)) == (STEPS, 6 * BATCH)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-12", "step-8"]


weighted = functools.partial(data, shuffle=False, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
REFUSED: dict[str, dict[str, Any]] = {
    "the training loader is a list of 2, whose samples have no order": {"make": lambda *_: [1, 2]},
    "the loader's WeightedRandomSampler chooses the samples itself": {"make": weighted},
    "the loader's batch is 4, and training.global_batch_size -1; make them the same": {"training": {"global_batch_size": -1}},
    "the loader is a HuggingFace, which fits one number of ranks only; set dataloader=": {"dataloader": "theirs"},
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sentence", REFUSED)
def test_a_trainer_that_cannot_continue_exactly_is_refused_before_the_first_step(tmp_path: Path, sentence: str) -> None:
    from torchtitan.components.dataloader import BaseDataLoader

    class HuggingFace(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None: ...

        __iter__ = state_dict = load_state_dict = None  # type: ignore[assignment]

    changes = dict(REFUSED[sentence])
    theirs = changes.pop("dataloader", None)
    config = configured(tmp_path, **changes)
    if theirs:
        config.dataloader = HuggingFace.Config()
    with pytest.raises(OutlastError, match=f"^outlast.torchtitan: {sentence}"):
        trained(config)


@pytest.mark.usefixtures("one_rank")
def test_another_torchtitan_is_told_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path)
    import outlast.torchtitan

    monkeypatch.setattr(outlast.torchtitan, "_TRAINER", ("tokens_seen",))
    with pytest.raises(
        OutlastError, match=r"torchtitan \S+ has another Trainer.tokens_seen than this Outlast knows; tested: 0.3.0"
    ):
        trained(config)
