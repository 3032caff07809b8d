"""What Outlast does in a Trainer's loops: subclasses of their classes that call an `Attachment`."""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler

from outlast.base.errors import OutlastError
from outlast.lightning import supported
from outlast.lightning.position import Position
from outlast.training import Session, ddp, libraries, session
from outlast.training.libraries import Order
from outlast.training.state import checkpoint, weights

log = logging.getLogger("outlast")


class _Order(Order):
    @property
    def sampler(self) -> _Order:
        """Itself: the fit loop looks for `set_epoch` at the sampler of the loader's batch sampler."""
        return self


class Attachment:
    """What a trainer has besides its own attributes."""

    def __init__(self, trainer: Any, batch: int, seed: int) -> None:
        self.trainer, self.batch, self.seed = trainer, batch, seed
        self.run: Session | None = None
        self.stack = contextlib.ExitStack()
        self.position = Position(trainer)
        self.order: _Order | None = None
        self.owing = False
        """Whether the step that the run continues from has work left: its validation, and the end of its epoch."""
        self.generators: dict[str, Any] = {}
        self.leavable = False
        """Whether all ranks take part in the validation in progress with as many batches."""

    def begin(self, ckpt_path: Any) -> bool:
        """Open the session, and learn the position. Returns whether there is a state to continue from."""
        trainer = self.trainer
        problem = supported.callback_problem(trainer)
        if not trainer.lightning_module.automatic_optimization:
            problem = "manual optimization takes steps that the loop does not count; use automatic optimization"
        if problem:
            raise OutlastError(f"outlast.lightning: {problem}")
        output = Path(trainer.default_root_dir) / "out"
        self.run = self.stack.enter_context(session.attach(self.seed, output=output, quiet=True))
        if step := self.run.peek({"trainer": self.position}):
            self.owing = True
            self.position.put_callbacks()
            if ckpt_path and self.run.rank == 0:
                log.warning("outlast: ckpt_path is not read, since the run continues from step %d", step)
        return self.owing

    def loader(self, theirs: Any) -> Any:
        """The user's loader of training samples, with our order and seeded samples."""
        trainer, several = self.trainer, self.order is not None
        if problem := "there are several loaders of training samples; give one" if several else supported.loader_problem(theirs):
            raise OutlastError(f"outlast.lightning: {problem}")
        libraries.plan(self.batch, trainer.world_size, theirs.batch_size)
        self.order = _Order(
            len(theirs.dataset), self.batch, rank=trainer.global_rank, ranks=trainer.world_size, most=theirs.batch_size,
            seed=self.seed, drop_last=theirs.drop_last,
            shuffle=getattr(theirs.sampler, "shuffle", isinstance(theirs.sampler, RandomSampler)),
        )  # fmt: skip
        trainer.accumulate_grad_batches = self.order.accumulate
        return libraries.Loader(theirs, self.order, self.seed)

    def count_steps(self) -> None:
        """Validate after as many optimizer steps in every world: `val_check_batch` counts micro-batches of a rank."""
        trainer, every = self.trainer, self.trainer.val_check_interval
        if self.order is None or not isinstance(every, int | float):
            return
        epoch = self.order.steps_per_epoch
        steps = every if isinstance(every, int) else max(1, int(epoch * every))
        if steps > epoch and trainer.check_val_every_n_epoch is not None and trainer.enable_validation:
            raise OutlastError(
                f"outlast.lightning: val_check_interval={steps} counts optimizer steps, of which an epoch has {epoch}; "
                "make it smaller, or set check_val_every_n_epoch=None"
            )
        trainer.val_check_batch = steps * self.order.accumulate

    def resume(self) -> None:
        """Load the newest state, once Lightning has made optimizers and schedules, and has read `ckpt_path` if it does."""
        trainer, strategy, fit = self.trainer, self.trainer.strategy, self.trainer.fit_loop
        if len(strategy.optimizers) != 1:
            raise OutlastError(f"outlast.lightning: {len(strategy.optimizers)} optimizers; configure_optimizers must return one")
        fit.setup_data()
        assert self.run is not None
        assert self.order is not None
        if isinstance(strategy.model, DistributedDataParallel):
            ddp.settle(strategy.model)
        state = {
            "model": weights.trained(trainer.lightning_module),
            "optimizer": strategy.optimizers[0],
            "trainer": self.position,
        }
        if trainer.precision_plugin.state_dict():
            state["precision"] = trainer.precision_plugin
        self.run.resume(state)
        self.generators = checkpoint.generators()
        if self.owing:
            self.position.put_loops()
        epoch, loop = fit.epoch_progress.current, fit.epoch_loop
        batches = loop.batch_progress.current.ready if epoch.ready > epoch.processed else 0
        steps = loop.automatic_optimization.optim_progress.optimizer.step.current.ready
        if not self.owing and batches not in (0, steps * self.order.accumulate):
            raise OutlastError(
                f"outlast.lightning: the checkpoint at ckpt_path ends within an epoch, {steps} steps of {batches} batches, and "
                f"a step has {self.order.accumulate} batches here; begin with the checkpoint of an epoch's end"
            )
        self.order.seek(epoch.processed * self.order.steps_per_epoch + batches // self.order.accumulate)
        iter(fit._data_fetcher)  # what `setup_data` has made begins with the first batch

    def begin_again(self) -> None:
        """Let the loops go on as if they had not been interrupted."""
        self.owing = False
        fit = self.trainer.fit_loop
        for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
            loop.on_iteration_done()
        checkpoint.set_generators(self.generators)

    def boundary(self) -> None:
        """End an optimizer step: before its validation, and before the end of its epoch."""
        trainer, run = self.trainer, self.run
        assert run is not None
        step, every = trainer.global_step, trainer.log_every_n_steps
        self.position.held = None
        run.log(step, **(self._numbers() if every and step % every == 0 else {}))
        run.boundary(step)
        if trainer.fit_loop.epoch_loop.done:
            self.position.hold()

    def _numbers(self) -> dict[str, Any]:
        values = self.trainer._logger_connector._logged_metrics.items()
        one = {name: value for name, value in values if not isinstance(value, torch.Tensor) or value.numel() == 1}
        return {name: value for name, value in one.items() if name not in ("step", "reduce")}

    @contextlib.contextmanager
    def validating(self, batches: list[Any]) -> Iterator[None]:
        """Validate without a trace in the random numbers of training. A collective, but for validation within a step."""
        trainer, run, before = self.trainer, self.run, checkpoint.generators()
        ended = run is not None and not trainer.sanity_checking and not trainer.fit_loop._should_accumulate()
        if run is not None and ended:
            if self.position.held is None:
                self.position.hold()
            self.leavable = len(set(run.gather(tuple(map(float, batches))))) == 1
        try:
            yield
        finally:
            self.leavable = False
            checkpoint.set_generators(before)
        if run is not None and ended:
            run.log(trainer.global_step, **self._numbers())

    def leave(self) -> None:
        """Save and leave during a validation if a rank is interrupted; the validation is repeated after the resume."""
        if self.run is not None and self.leavable:
            self.run.alive()
            if self.run.interrupted():
                self.save()

    def save(self) -> None:
        """Save the last step as it was at its end."""
        if self.run is not None and self.position.held is not None:
            now = checkpoint.generators()
            checkpoint.set_generators(self.position.held.generators)
            self.run.save(self.trainer.global_step)
            checkpoint.set_generators(now)


# What we override; the names are Lightning's, and `supported` compares their parameters


class _Mixin:
    _outlast: Attachment
    trainer: Any


class _Trainer(_Mixin):
    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: Any = None,
    ) -> None:
        if self._outlast.run is not None:
            raise OutlastError("outlast.lightning: fit() is called a second time; one run trains once")
        with self._outlast.stack:
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)  # type: ignore[misc]

    def _run_stage(self) -> Any:
        result = super()._run_stage()  # type: ignore[misc]
        self._outlast.stack.close()  # before the model leaves the device
        return result


class _Checkpoints(_Mixin):
    def _restore_modules_and_callbacks(self, checkpoint_path: Any = None, weights_only: Any = None) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING or not self._outlast.begin(checkpoint_path):
            super()._restore_modules_and_callbacks(checkpoint_path, weights_only)  # type: ignore[misc]

    def restore_training_state(self) -> None:
        super().restore_training_state()  # type: ignore[misc]
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._outlast.resume()


class _Signals(_Mixin):
    def register_signal_handlers(self) -> None:
        """Do nothing: Lightning's handler of SIGTERM broadcasts in the middle of other collectives. All ranks agree to leave."""


class _Data(_Mixin):
    def _prepare_dataloader(self, dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
        if mode == RunningStage.TRAINING:
            return self._outlast.loader(dataloader)
        return super()._prepare_dataloader(dataloader, shuffle, mode)  # type: ignore[misc]


class _FitLoop(_Mixin):
    @property
    def done(self) -> bool:
        return not self._outlast.owing and super().done  # type: ignore[misc]

    def setup_data(self) -> None:
        super().setup_data()  # type: ignore[misc]
        self._outlast.count_steps()

    def on_run_end(self) -> None:
        self._outlast.save()  # hooks may load other weights from here on
        super().on_run_end()  # type: ignore[misc]


class _EpochLoop(_Mixin):
    def reset(self) -> None:
        if not self._outlast.owing:
            super().reset()  # type: ignore[misc]

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)  # type: ignore[misc]
        if self._outlast.owing:
            self._outlast.begin_again()
            super().on_advance_end(data_fetcher)  # type: ignore[misc]

    def on_advance_end(self, data_fetcher: Any) -> None:
        if not self._should_accumulate():  # type: ignore[attr-defined]
            self._outlast.boundary()
        super().on_advance_end(data_fetcher)  # type: ignore[misc]

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: no rank receives SIGTERM alone, and this would wait for the device in each batch."""


class _ValidationLoop(_Mixin):
    def run(self) -> Any:
        self.setup_data()  # type: ignore[attr-defined]
        with self._outlast.validating(self.max_batches):  # type: ignore[attr-defined]
            return super().run()  # type: ignore[misc]

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)  # type: ignore[misc]
        self._outlast.leave()


HOOKS: dict[str, type[_Mixin]] = {
    "": _Trainer,
    "_checkpoint_connector": _Checkpoints,
    "_signal_connector": _Signals,
    "_data_connector": _Data,
    "fit_loop": _FitLoop,
    "fit_loop.epoch_loop": _EpochLoop,
    "fit_loop.epoch_loop.val_loop": _ValidationLoop,
}
"""The classes to mix into those of a Trainer and of its parts."""
