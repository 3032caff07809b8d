"""`outlast.lightning.attach`: a Trainer that is killed continues with the same samples, logs and weights. In one process.

A kill is an exception in a callback: nothing of the interrupted start is used but its checkpoints.
"""

from __future__ import annotations

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

pytest.importorskip("lightning")

import lightning
from lightning.pytorch import LightningModule, Trainer, callbacks, strategies
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, Subset, WeightedRandomSampler
from torchmetrics import MeanMetric

import outlast.lightning

pytestmark = [
    pytest.mark.usefixtures("a_checkpoint_of_each_step"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(120),
]
SAMPLES, BATCH, EPOCHS = 30, 8, 3
Make = Callable[[Path], dict[str, Any]]


class Data(torch.utils.data.Dataset[Any]):
    """Samples with random noise, and the numbers of those that were read."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.rows[index] + 0.1 * torch.randn(4), self.rows[index].sum()[None] * random.choice([1, 2])


def collate(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (torch.stack(column) for column in zip(*rows, strict=True))
    return x * (torch.rand(x.shape) > 0.1), y


class Net(LightningModule):
    """Dropout, batch norm, two schedules, means over an epoch, and a validation that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.seen = MeanMetric()
        self.logged: list[tuple[int, dict[str, float]]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.seen(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]) + torch.rand(()))

    def on_validation_end(self) -> None:
        self._note()

    def on_train_epoch_end(self) -> None:
        self._note()
        torch.rand(())

    def _note(self) -> None:
        if not self.trainer.sanity_checking:
            self.logged.append((self.global_step, {name: float(value) for name, value in self.trainer.callback_metrics.items()}))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.estimated_stepping_batches)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        watched = {"scheduler": plateau, "monitor": "seen", "interval": "epoch"}
        return [optimizer], [{"scheduler": cosine, "interval": "step"}, watched]


class Killed(Exception):
    pass


class Kill(callbacks.Callback):
    """Does something at an event of the Trainer, at a step: by default, it dies."""

    def __init__(self, event: str, step: int, act: Callable[[Trainer], None] | None = None) -> None:
        def at(trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == step and not trainer.sanity_checking:
                if act is None:
                    raise Killed
                act(trainer)

        setattr(self, event, at)


def trainer(directory: Path, *more: callbacks.Callback, attached: bool = True, **changes: Any) -> Trainer:
    lightning.seed_everything(7, verbose=False)
    options: dict[str, Any] = {"max_epochs": EPOCHS, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "devices": 1, "default_root_dir": directory}
    chosen = [*changes.pop("callbacks", []), *more]
    made = Trainer(callbacks=chosen, **(options | changes))
    if attached:
        outlast.lightning.attach(made, batch=BATCH)
    return made


def loader(**changes: Any) -> DataLoader[Any]:
    return DataLoader(Data(), **{"batch_size": 4, "shuffle": True, "collate_fn": collate, **changes})


def fit(made: Trainer, workers: int = 0, **options: Any) -> tuple[Net, list[int]]:
    net, train = Net(), loader(num_workers=workers)
    made.fit(net, train, DataLoader(Data(), batch_size=10), **options)
    return net, train.dataset.read


def outcome(made: Trainer, net: Net) -> tuple[Any, ...]:
    """Weights, statistics, the rate, and the steps."""
    rate = [group["lr"] for group in made.optimizers[0].param_groups]
    return [each.numpy().tobytes() for each in net.state_dict().values()], rate, made.global_step, made.current_epoch


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Any, ...], list[int]]:
    """Outcome and samples of a run that nothing disturbs."""
    made = trainer(tmp_path_factory.mktemp("undisturbed"))
    net, read = fit(made)
    return outcome(made, net), read


STOPS, KEEPS = callbacks.EarlyStopping, callbacks.ModelCheckpoint
CASES: dict[str, tuple[Make, list[tuple[str, int]]]] = {
    "validation within and after an epoch": (
        lambda _: {"val_check_interval": 0.5, "num_sanity_val_steps": 0},
        [("on_validation_end", 2), ("on_validation_start", 4), ("on_train_epoch_end", 4), ("on_train_batch_start", 5),
         ("on_train_end", 12)],
    ),
    "a last step within an epoch": (
        lambda _: {"max_epochs": -1, "max_steps": 6, "val_check_interval": 3, "check_val_every_n_epoch": None},
        [("on_validation_end", 6), ("on_train_end", 6)],
    ),
    "the best checkpoints, and stopping early": (
        lambda directory: {
            "enable_checkpointing": True,
            "callbacks": [STOPS("seen", patience=1, min_delta=10.0, check_on_train_epoch_end=True),
                          KEEPS(directory / "best", monitor="val", save_top_k=2, enable_version_counter=False)],
        },
        [("on_train_epoch_end", 4), ("on_train_end", 8)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [next(iter(CASES)), *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])])
def test_a_trainer_that_is_killed_ends_as_one_that_is_not(tmp_path: Path, case: str) -> None:
    make, kills = CASES[case]
    whole = trainer(tmp_path / "whole", **make(tmp_path / "whole"))
    expected, _ = fit(whole)
    for event, step in kills:
        killed = trainer(tmp_path / "killed", Kill(event, step), **make(tmp_path / "killed"))
        with pytest.raises(Killed):
            fit(killed)
    last = trainer(tmp_path / "killed", **make(tmp_path / "killed"))
    net, _ = fit(last)
    assert outcome(last, net) == outcome(whole, expected)
    assert net.logged, "the end of the last epoch was repeated"
    assert net.logged == expected.logged[-len(net.logged) :]
    assert expected.logged[-1][1].keys() >= {"loss_epoch", "seen", "val"}
    if whole.checkpoint_callback:
        assert names(last) == names(whole)


def names(made: Trainer) -> list[str]:
    kept: Any = made.checkpoint_callback
    return [Path(kept.best_model_path).name, *sorted(Path(path).name for path in kept.best_k_models)]


@pytest.mark.slow
def test_a_checkpoint_of_lightning_is_imported_at_the_first_start_and_not_read_later(tmp_path: Path) -> None:
    own = trainer(tmp_path, attached=False, max_epochs=1)
    fit(own)
    own.save_checkpoint(tmp_path / "own.ckpt")
    new = trainer(tmp_path, Kill("on_train_batch_start", own.global_step + 3))
    with pytest.raises(Killed):
        fit(new, ckpt_path=tmp_path / "own.ckpt")
    (tmp_path / "own.ckpt").unlink()
    last = trainer(tmp_path)
    net, read = fit(last, ckpt_path=tmp_path / "own.ckpt")
    assert (last.global_step, last.current_epoch) == (own.global_step + 8, EPOCHS)
    assert net.logged[-1][0] == last.global_step
    assert 5 * BATCH <= len(read) < 8 * BATCH


def test_a_worker_that_is_told_to_leave_saves_even_within_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: tuple[Any, Any]
) -> None:
    monkeypatch.setenv(Env.CHECKPOINT_EVERY, "1000 steps")
    for event, step in (("on_validation_batch_end", 4), ("on_train_batch_start", 6)):
        made = trainer(tmp_path / "left", Kill(event, step, lambda made: setattr(made._outlast.run, "_leaving", True)))
        with pytest.raises(SystemExit, match="75"):
            fit(made)
    last = trainer(tmp_path / "left")
    net, read = fit(last)
    assert outcome(last, net) == undisturbed[0]
    assert len(read) == 5 * BATCH


def test_the_best_checkpoints_are_ranked_by_the_validation_of_their_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their state is that of the end of the step: a run that continues from one ends as the undisturbed one does."""
    monkeypatch.setenv(Env.CHECKPOINT_EVERY, "2 steps")
    monkeypatch.setenv(Env.CHECKPOINT_BEST, "9 min val")
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    net, _ = fit(made := trainer(calm, val_check_interval=0.5))
    with pytest.raises(Killed):
        fit(trainer(struck, Kill("on_train_batch_start", 5), val_check_interval=0.5))
    again, _ = fit(continued := trainer(struck, val_check_interval=0.5))
    assert outcome(continued, again) == outcome(made, net)
    measured = {step: values["val"] for step, values in reversed(net.logged)}
    assert len(set(measured.values())) > 3
    for directory in (calm, struck):
        saved = checkpoints.list_(directory / "out" / "checkpoints")
        found = {each.step: each.metric.value for each in saved if each.metric and each.step in measured}
        assert 12 in found  # others may be skipped while a save is in progress
        assert found == {step: pytest.approx(measured[step]) for step in found}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ()


REFUSED: dict[str, dict[str, Any]] = {
    "the Trainer is made for 2 processes, and there are 1; write L.Trainer": {"devices": 2, "strategy": "ddp"},
    "static_graph lays out gradients after the first step": {"strategy": strategies.DDPStrategy(static_graph=True)},
    "DDPStrategy is not supported; use strategy='ddp'": {"strategy": "ddp_fork"},
    "limit_train_batches, overfit_batches and fast_dev_run count batches of a rank": {"limit_train_batches": 1},
    "reload_dataloaders_every_n_epochs changes the data; leave it out": {"reload_dataloaders_every_n_epochs": 1},
    "BackboneFinetuning changes weights or batches in ways that no state holds": {"callbacks": [callbacks.BackboneFinetuning()]},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_trainer_that_cannot_continue_exactly_is_refused(tmp_path: Path, sentence: str) -> None:
    made = trainer(tmp_path, attached=False, **REFUSED[sentence])
    with pytest.raises(OutlastError, match=f"^outlast.lightning.attach: {sentence}"):
        outlast.lightning.attach(made, batch=BATCH)
    assert type(made) is Trainer


LOADERS: dict[str, Callable[[], Any]] = {
    "the training data is a Stream without an order to continue": lambda: DataLoader(Stream(), batch_size=4),
    "the training loader is a range, whose samples have no order": lambda: range(4),
    "there are several loaders of training samples; give one": lambda: {"a": loader(), "b": loader()},
    "the loader's WeightedRandomSampler chooses the samples itself": lambda: loader(
        shuffle=False, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    ),
    "the loader's RandomSampler chooses the samples itself": lambda: loader(
        shuffle=False, sampler=RandomSampler(range(SAMPLES), num_samples=8)
    ),
}


class Two(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_data_and_modules_that_cannot_continue_exactly_are_refused_before_the_first_step(tmp_path: Path) -> None:
    for sentence, make in LOADERS.items():
        with pytest.raises(OutlastError, match=f"^outlast.lightning: {sentence}"):
            trainer(tmp_path).fit(Net(), make())
    with pytest.raises(OutlastError, match="val_check_interval=5 counts optimizer steps, of which an epoch has 4"):
        fit(trainer(tmp_path, val_check_interval=5))
    with pytest.raises(OutlastError, match="manual optimization takes steps that the loop does not count"):
        trainer(tmp_path).fit(Manual(), loader())
    with pytest.raises((OutlastError, RuntimeError), match=r"2 optimizers|multiple optimizers"):
        trainer(tmp_path).fit(Two(), loader())


def test_strategies_that_shard_are_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, attached=False)
    devices = [torch.device("cpu")]
    for sharded in (strategies.FSDPStrategy(parallel_devices=devices), strategies.ModelParallelStrategy()):
        sharded.parallel_devices = devices
        made._accelerator_connector.strategy = sharded
        with pytest.raises(OutlastError, match=f"{type(sharded).__name__} is not supported; use strategy='ddp'"):
            outlast.lightning.attach(made, batch=BATCH)


def test_what_is_attached_too_late_or_twice_or_to_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OutlastError, match=r"a dict of builtins is no Trainer of lightning; write `import lightning.pytorch as pl`"
    ):
        outlast.lightning.attach({}, batch=BATCH)  # type: ignore[arg-type]
    made = trainer(tmp_path, attached=False, max_steps=1)
    with pytest.raises(OutlastError, match=r"batch \(0\) must be a whole number of 1 or more"):
        outlast.lightning.attach(made, batch=0)
    outlast.lightning.attach(made, batch=BATCH)
    with pytest.raises(OutlastError, match="this trainer is attached already"):
        outlast.lightning.attach(made, batch=BATCH)
    made.fit(Net(), DataLoader(Subset(Data(), range(8)), batch_size=4, collate_fn=collate))
    with pytest.raises(OutlastError, match=r"fit\(\) is called a second time; one run trains once"):
        fit(made)
    late = trainer(tmp_path, attached=False, max_steps=1)
    fit(late)
    with pytest.raises(OutlastError, match=r"training has begun already; attach before trainer.fit\(\)"):
        outlast.lightning.attach(late, batch=BATCH)


def test_another_lightning_is_told_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, attached=False)
    for path, name in (("_data_connector._prepare_dataloader", "_prepare_dataloader"), ("fit_loop.setup_data", "setup_data")):
        with monkeypatch.context() as patched:
            owner = type(getattr(made, path.partition(".")[0]))
            patched.setattr(owner, name, None if name == "setup_data" else lambda self, loader: loader)
            sentence = f"lightning {lightning.__version__} has another Trainer.{path} than this Outlast knows; tested: "
            with pytest.raises(OutlastError, match=sentence):
                outlast.lightning.attach(made, batch=BATCH)
    monkeypatch.delattr(made._logger_connector, "_current_fx")
    with pytest.raises(OutlastError, match=r"has another Trainer._logger_connector._current_fx than"):
        outlast.lightning.attach(made, batch=BATCH)


def test_the_world_of_a_trainer_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outlast.lightning.world() == {}
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert outlast.lightning.world() == {"devices": 2, "num_nodes": 3, "strategy": "ddp"}


def test_the_batch_is_reported_before_a_world_that_cannot_share_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Env.STATE, str(tmp_path))
    made = trainer(tmp_path / "out", attached=False)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(Trainer, "num_devices", 3)
    with pytest.raises(OutlastError, match=rf"a global batch of {BATCH} samples cannot be shared equally among 3 ranks"):
        outlast.lightning.attach(made, batch=BATCH)
    record = progress_file.read(tmp_path, 0)
    assert (record.phase, record.batch) == ("started", BATCH)


def test_micro_batches_and_validation_follow_from_the_world(tmp_path: Path) -> None:
    """With another accumulation, as in another world, the position is the same number of optimizer steps."""
    counts: list[Any] = []
    note = Kill("on_train_batch_start", 6, lambda made: counts.append((made.accumulate_grad_batches, made.val_check_batch)))
    killed = trainer(tmp_path, Kill("on_train_batch_start", 5), val_check_interval=0.5)
    with pytest.raises(Killed):
        fit(killed)
    last, net, train = trainer(tmp_path, note, val_check_interval=0.5), Net(), loader(batch_size=2)
    last.fit(net, train, DataLoader(Data(), batch_size=10))
    assert counts[0] == (4, 8)
    assert last.global_step == 12
    resumed = last._outlast.position._saved["step"]
    assert 0 < resumed <= 5
    assert [step for step, _ in net.logged] == [step for step in (2, 4, 4, 6, 8, 8, 10, 12, 12) if step >= resumed]
    assert len(train.dataset.read) == (12 - resumed) * BATCH
    assert last.fit_loop.epoch_loop.batch_progress.total.ready == 12 * 4
