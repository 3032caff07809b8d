"""Exact, elastic resume for Lightning's Trainer.

    import outlast.lightning
    trainer = L.Trainer(max_epochs=3, **outlast.lightning.world())
    outlast.lightning.attach(trainer, batch=64)
    trainer.fit(model, loader)

A killed run continues from its newest state with the same samples and the same global batch. With the same number of ranks, the
results are bit-identical. Loggers, ModelCheckpoint and EarlyStopping work unchanged. Design: docs/decisions/0060.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torchmetrics import Metric

from outlast.base.errors import OutlastError
from outlast.storage import checkpoints
from outlast.training import Session, ddp, libraries, session
from outlast.training.samples.stream import map_tensors
from outlast.training.state import checkpoint, weights

log = logging.getLogger("outlast")

_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx")
_CHECKPOINTS = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes of ModelCheckpoint that its `state_dict` lacks."""
_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
"""Arguments of `self.log` that are saved with a logged value."""
TESTED = "2.6"
_ATTRIBUTES = (
    *(f"_logger_connector.{name}" for name in _LOGGED),
    "fit_loop._data_fetcher",
    "fit_loop.epoch_progress",
    "fit_loop.epoch_loop.batch_progress",
    "fit_loop.epoch_loop._results",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress",
    "fit_loop.on_iteration_done",
)
_CHANGING = (
    callbacks.WeightAveraging, callbacks.StochasticWeightAveraging, callbacks.ModelPruning, callbacks.BaseFinetuning,
    callbacks.GradientAccumulationScheduler, callbacks.BatchSizeFinder, callbacks.LearningRateFinder,
)  # fmt: skip
"""Unsupported callbacks: they keep weights of their own, or change the batch or which weights are trained."""


def world(strategy: Any = "ddp") -> dict[str, Any]:
    """Return `devices`, `num_nodes` and `strategy` for a Trainer in the current world, or an empty dict outside a world."""
    if "WORLD_SIZE" not in os.environ:
        return {}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {"devices": local, "num_nodes": int(os.environ["WORLD_SIZE"]) // local, "strategy": strategy}


def attach(trainer: Trainer, batch: int, *, seed: int | None = None) -> None:
    """Make `trainer.fit()` resume exactly where it stopped after every failure, and in every world that `batch` allows.

    `batch` is the number of samples per optimizer step, over all ranks; micro-batches have at most the training loader's
    `batch_size` samples. `accumulate_grad_batches` is set accordingly, and `val_check_interval` counts optimizer steps. The order
    of samples depends only on `seed`, which defaults to the seed of `L.seed_everything`. Unless the loader has `drop_last`, an
    epoch's last batch is filled up with the epoch's first samples. Only the first start of a run reads `fit(ckpt_path=...)`.
    Outside a job, checkpoints are saved in `out` below the Trainer's `default_root_dir`. Raises OutlastError, here or in `fit`,
    if training cannot be resumed exactly.
    """
    if problem := _problem(trainer):
        raise OutlastError(f"outlast.lightning.attach: {problem}")
    attachment = _Attachment(trainer, batch, int(os.environ.get("PL_GLOBAL_SEED") or 0) if seed is None else seed)
    libraries.plan(batch, int(os.environ.get("WORLD_SIZE", "1")), None)
    for path, mixin in _HOOKS.items():
        owner = _at(trainer, path)
        was = type(owner)
        owner.__class__ = type(was.__name__, (mixin, was), {"__module__": was.__module__})
        owner._outlast = attachment


def _at(trainer: Any, path: str) -> Any:
    return operator.attrgetter(path)(trainer) if path else trainer


def _problem(trainer: Any) -> str:
    made = type(trainer)
    if not issubclass(made, Trainer):
        package = made.__module__.partition(".")[0]
        return f"a {made.__name__} of {package} is no Trainer of lightning; write `import lightning.pytorch as pl`"
    if hasattr(trainer, "_outlast"):
        return "this trainer is attached already; remove the second call"
    if name := _missing(trainer):
        return f"lightning {lightning.__version__} has another Trainer.{name} than this Outlast knows; tested: {TESTED}"
    if trainer.training or trainer.fit_loop.epoch_loop.batch_progress.total.ready:
        return "training has begun already; attach before trainer.fit()"
    strategy, ranks = trainer.strategy, int(os.environ.get("WORLD_SIZE", "1"))
    processes, limit = trainer.num_devices * trainer.num_nodes, trainer.limit_train_batches
    options, hook = getattr(strategy, "_ddp_kwargs", {}), getattr(strategy, "_ddp_comm_state", None)
    deepspeed, known = isinstance(strategy, DeepSpeedStrategy), isinstance(strategy, DDPStrategy | SingleDeviceStrategy)
    forks = getattr(strategy, "_start_method", "popen") != "popen"
    cases = {
        "DeepSpeed keeps checkpoints of its own, which only it can load; use strategy='ddp'": deepspeed,
        f"{type(strategy).__name__} is not supported; use strategy='ddp'": not known or forks,
        f"the Trainer is made for {processes} processes, and there are {ranks}; "
        "write L.Trainer(..., **outlast.lightning.world()), and start with outlast run or torchrun": processes != ranks,
        libraries.STATIC_GRAPH: options.get("static_graph"),
        "a communication hook of DDP keeps gradients of its own; leave ddp_comm_state out": hook is not None,
        "limit_train_batches, overfit_batches and fast_dev_run count batches of a rank; leave them out, or give the loader a "
        "torch.utils.data.Subset": isinstance(limit, int) or limit != 1.0,
        "reload_dataloaders_every_n_epochs changes the data; leave it out": trainer.reload_dataloaders_every_n_epochs,
    }
    return next((sentence for sentence, holds in cases.items() if holds), "") or _callback_problem(trainer)


def _missing(trainer: Any) -> str:
    for path, mixin in _HOOKS.items():
        methods = {name: method for name, method in vars(mixin).items() if inspect.isfunction(method)}
        parameters = {name: tuple(inspect.signature(method).parameters)[1:] for name, method in methods.items()}
        if name := libraries.missing(_at(trainer, path), parameters):
            return f"{path}.{name}".lstrip(".")
    paths = (name.rpartition(".") for name in _ATTRIBUTES)
    return next((f"{path}.{name}" for path, _, name in paths if not hasattr(_at(trainer, path), name)), "")


def _callback_problem(trainer: Any) -> str:
    """Return why a callback prevents exact resumption, or an empty string. Called again in `fit`, where a module may add
    callbacks."""
    names = [type(each).__name__ for each in trainer.callbacks if isinstance(each, _CHANGING)]
    return f"{names[0]} changes weights or batches in ways that no state holds; leave it out" if names else ""


class _Order(libraries.Order):
    @property
    def sampler(self) -> _Order:
        """Return `self`, since the fit loop looks for `set_epoch` on the batch sampler's `sampler`."""
        return self


class _Attachment:
    def __init__(self, trainer: Any, batch: int, seed: int) -> None:
        self.trainer, self.batch, self.seed = trainer, batch, seed
        self.session = session.attach(seed, output=Path(trainer.default_root_dir) / "out", quiet=True, batch=batch)
        self.run: Session | None = None
        self.stack = contextlib.ExitStack()
        self.position = _Position(trainer)
        self.order: _Order | None = None
        self.owing = False
        """True if the resumed step has work left, such as its validation or the end of its epoch."""
        self.generators: dict[str, Any] = {}
        self.leavable = False
        """True if ranks may leave the current validation, because all of them have the same number of batches."""
        self.ranked = bool(checkpoints.Retention.parse(os.environ).best)
        """True if the job keeps its best checkpoints. A due checkpoint then waits for its step's validation."""
        self.unmeasured = False

    def begin(self, ckpt_path: Any) -> bool:
        """Open the session and load the position. Returns whether there is a state to continue from."""
        trainer = self.trainer
        problem = _callback_problem(trainer)
        if not trainer.lightning_module.automatic_optimization:
            problem = "manual optimization takes steps that the loop does not count; use automatic optimization"
        if problem:
            raise OutlastError(f"outlast.lightning: {problem}")
        self.run = self.stack.enter_context(self.session)
        if step := self.run.peek({"trainer": self.position}):
            self.owing = True
            self.position.put_callbacks()
            if ckpt_path and self.run.rank == 0:
                log.warning("outlast: ckpt_path is not read, since the run continues from step %d", step)
        return self.owing

    def loader(self, theirs: Any) -> Any:
        trainer = self.trainer
        several = "there are several loaders of training samples; give one" if self.order is not None else ""
        if problem := several or libraries.unordered_loader(theirs):
            raise OutlastError(f"outlast.lightning: {problem}")
        self.order = _Order(
            len(theirs.dataset), self.batch, rank=trainer.global_rank, ranks=trainer.world_size, most=theirs.batch_size,
            seed=self.seed, drop_last=theirs.drop_last,
            shuffle=libraries.shuffled(theirs),
        )  # fmt: skip
        trainer.accumulate_grad_batches = self.order.accumulate
        return libraries.Loader(theirs, self.order, self.seed)

    def count_steps(self) -> None:
        """Make every world validate after the same number of optimizer steps, although `val_check_batch` counts micro-batches."""
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
        """Load the newest state, once Lightning has made the optimizers and schedules and has read `ckpt_path`."""
        trainer, strategy, fit = self.trainer, self.trainer.strategy, self.trainer.fit_loop
        if len(strategy.optimizers) != 1:
            raise OutlastError(f"outlast.lightning: {len(strategy.optimizers)} optimizers; configure_optimizers must return one")
        fit.setup_data()
        assert self.run is not None
        assert self.order is not None
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
        iter(fit._data_fetcher)  # the iterator made by `setup_data` begins with the first batch

    def begin_again(self) -> None:
        self.owing = False
        fit = self.trainer.fit_loop
        for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
            loop.on_iteration_done()
        checkpoint.set_generators(self.generators)

    def boundary(self) -> None:
        """End an optimizer step, before any validation or end of an epoch that follows it."""
        trainer, run = self.trainer, self.run
        assert run is not None
        step, every = trainer.global_step, trainer.log_every_n_steps
        loop = trainer.fit_loop.epoch_loop
        self.position.held = None
        run.log(step, **(self._numbers() if every and step % every == 0 else {}))
        measured_later = self.ranked and loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if libraries.boundary(run, step, measured_later=measured_later):
            self.position.hold()
            self.unmeasured = True
        if loop.done and self.position.held is None:
            self.position.hold()

    def _numbers(self) -> dict[str, Any]:
        values = self.trainer._logger_connector._logged_metrics.items()
        one = {name: value for name, value in values if not isinstance(value, torch.Tensor) or value.numel() == 1}
        return {name: value for name, value in one.items() if name not in libraries.RESERVED}

    @contextlib.contextmanager
    def validating(self, batches: list[Any]) -> Iterator[None]:
        """Keep a validation from changing the random state, then save the checkpoint that waits for it. All ranks must call this
        if the validation follows a step."""
        trainer, run = self.trainer, self.run
        ended = run is not None and not trainer.sanity_checking and not trainer.fit_loop._should_accumulate()
        with checkpoint.kept_generators():
            if run is not None and ended:
                if self.position.held is None:
                    self.position.hold()
                self.leavable = len(set(run.gather(tuple(map(float, batches))))) == 1
            try:
                yield
            finally:
                self.leavable = False
        if run is not None and ended:
            run.log(trainer.global_step, **self._numbers())
            if self.unmeasured:
                self.unmeasured = False
                self.save()

    def leave(self) -> None:
        """If a rank is interrupted during a validation, save and leave. The validation is repeated after resuming."""
        if self.run is not None and self.leavable:
            self.run.alive()
            if self.run.interrupted():
                self.save(metric=math.nan if self.ranked else None)

    def save(self, metric: float | None = None) -> None:
        if self.run is not None and self.position.held is not None:
            with checkpoint.kept_generators():
                checkpoint.set_generators(self.position.held.generators)
                self.run.save(self.trainer.global_step, metric=metric)


# Our overrides, under Lightning's names. `_missing` compares their parameters.


class _Mixin:
    _outlast: _Attachment
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
        """Do nothing, since Lightning's SIGTERM handler broadcasts in the middle of other collectives."""


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
        """Do nothing, since no rank receives SIGTERM alone, and the broadcast would wait for the device in each batch."""


class _ValidationLoop(_Mixin):
    def run(self) -> Any:
        self.setup_data()  # type: ignore[attr-defined]
        with self._outlast.validating(self.max_batches):  # type: ignore[attr-defined]
            return super().run()  # type: ignore[misc]

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)  # type: ignore[misc]
        self._outlast.leave()


_HOOKS: dict[str, type[_Mixin]] = {
    "": _Trainer,
    "_checkpoint_connector": _Checkpoints,
    "_signal_connector": _Signals,
    "_data_connector": _Data,
    "fit_loop": _FitLoop,
    "fit_loop.epoch_loop": _EpochLoop,
    "fit_loop.epoch_loop.val_loop": _ValidationLoop,
}
"""Mixins for the Trainer and its parts, keyed by attribute path."""


class _Held(NamedTuple):
    shared: dict[str, Any]
    own: dict[str, Any]
    generators: dict[str, Any]


class _Position:
    """A Trainer's state without weights, optimizer and schedules, with `state_dict` and `load_state_dict`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.held: _Held | None = None
        """The state at the end of the last step, which is kept while validation or the end of the epoch changes the Trainer."""
        self._saved: Mapping[str, Any] = {}
        self._rank: Mapping[str, Any] | None = None

    @property
    def total_steps(self) -> int:
        steps = self._trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise AttributeError("this run has no last step")
        return int(steps)

    def hold(self) -> None:
        """Keep the current state for saves until `held` is None again."""
        self.held = None
        self.held = _Held(self.state_dict(), self.loader_state(), checkpoint.generators())

    def state_dict(self) -> dict[str, Any]:
        if self.held is not None:
            return self.held.shared
        trainer = self._trainer
        states = {each.state_key: each.state_dict() for each in trainer.callbacks}
        return {
            "version": 1,
            "step": trainer.global_step,
            "loops": self._converted(trainer.fit_loop.state_dict(), operator.floordiv),
            "callbacks": _copied({key: state for key, state in states.items() if state}),
            "checkpoints": [{name: vars(each).get(name) for name in _CHECKPOINTS} for each in trainer.checkpoint_callbacks],
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "should_stop": trainer.should_stop,
            "schedules": _copied([each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]),
            "groups": _copied([_without_parameters(group) for group in trainer.optimizers[0].param_groups]),
            "logged": _copied({name: vars(trainer._logger_connector)[name] for name in _LOGGED}),
            "results": self._results(),
        }

    def loader_state(self) -> dict[str, Any]:
        """Return this rank's metrics and its means of the values logged in this epoch."""
        if self.held is not None:
            return self.held.own
        return {"results": self._results(), "metrics": {name: _taken(each) for name, each in self._metrics().items()}}

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        self._saved, self._rank = state, own

    def put_callbacks(self) -> None:
        """Restore the callbacks and the data module, which may act before the first step."""
        trainer = self._trainer
        for each in trainer.callbacks:
            if each.state_key in self._saved["callbacks"]:
                each.load_state_dict(copy.deepcopy(self._saved["callbacks"][each.state_key]))
        for each, attributes in zip(trainer.checkpoint_callbacks, self._saved["checkpoints"], strict=False):
            vars(each).update(attributes)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(self._saved["datamodule"])

    def put_loops(self) -> None:
        """Restore the loops and logged values, once the module is on its device. A rank without saved values uses rank 0's."""
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(self._converted(copy.deepcopy(self._saved["loops"]), operator.mul))
        trainer.should_stop = self._saved["should_stop"]
        for config, state in zip(trainer.lr_scheduler_configs, self._saved["schedules"], strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))
        for group, state in zip(trainer.optimizers[0].param_groups, self._saved["groups"], strict=True):
            group.update(state)
        device, metrics = trainer.strategy.root_device, self._metrics()
        vars(trainer._logger_connector).update(_copied(self._saved["logged"], device))
        own = self._rank or {"results": self._saved["results"], "metrics": {}}
        for name, saved in own["metrics"].items():
            _put(metrics[name], saved, device)
        for key, saved in own["results"].items():
            meta = result._Metadata(**saved["meta"])
            meta.sync = result._Sync(trainer.strategy.reduce, **saved["sync"])
            logged = result._ResultMetric(meta, saved["is_tensor"])
            logged.has_reset = saved["has_reset"]
            _put(logged, saved["metric"], device)
            if not logged.is_tensor:
                logged.value = metrics[saved["meta"]["metric_attribute"]]
            trainer.fit_loop.epoch_loop._results[key] = logged

    def _converted(self, loops: dict[str, Any], convert: Any) -> dict[str, Any]:
        """Convert the counts of micro-batches to optimizer steps, or back. Other counts are the same in every world."""
        for tracker in ("total", "current"):
            counts = loops["epoch_loop.batch_progress"][tracker]
            counts.update({name: convert(count, self._trainer.accumulate_grad_batches) for name, count in counts.items()})
        return loops

    def _metrics(self) -> dict[str, Metric]:
        modules = self._trainer.lightning_module.named_modules()
        return {name: module for name, module in modules if isinstance(module, Metric)}

    def _results(self) -> dict[str, Any]:
        return {
            key: {
                "meta": {name: getattr(each.meta, name) for name in _META} | {"reduce_fx": each.meta.reduce_fx.__name__},
                "sync": {"_should": each.meta.sync.should, "rank_zero_only": each.meta.sync.rank_zero_only},
                "is_tensor": each.is_tensor,
                "has_reset": each.has_reset,
                "metric": _taken(each) if each.is_tensor else {"state": {}, "updates": 0, "last": None},
            }
            for key, each in self._trainer.fit_loop.epoch_loop._results.items()
        }


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _taken(metric: Metric) -> dict[str, Any]:
    return {"state": _copied(metric.metric_state), "updates": metric._update_count, "last": _copied(metric._forward_cache)}


def _put(metric: Metric, saved: Mapping[str, Any], device: torch.device) -> None:
    for name, value in _copied(saved["state"], device).items():
        setattr(metric, name, value)
    metric._update_count, metric._forward_cache, metric._computed = saved["updates"], _copied(saved["last"], device), None


def _copied(value: Any, device: torch.device | str = "cpu") -> Any:
    return map_tensors(value, lambda tensor: tensor.detach().to(device, copy=True))
