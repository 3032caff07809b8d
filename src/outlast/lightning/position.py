"""Where a Trainer of Lightning stands at the end of an optimizer step: its loops, callbacks and logged values."""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch.trainer.connectors.logger_connector import result
from torchmetrics import Metric

from outlast.training.state import checkpoint

LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx")
"""Attributes of the logger connector that are saved."""
_CHECKPOINTS = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes of ModelCheckpoint that its own state lacks."""
_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
"""Arguments of `self.log`, as Lightning keeps them."""


class Held(NamedTuple):
    """The position of a step, and the generators at its end."""

    shared: dict[str, Any]
    own: dict[str, Any]
    generators: dict[str, Any]


class Position:
    """The state of a Trainer beside weights, optimizer and schedules, with `state_dict` and `load_state_dict`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.held: Held | None = None
        """The end of the last step, while validation or the end of the epoch changes the Trainer."""
        self._saved: Mapping[str, Any] = {}
        self._rank: Mapping[str, Any] | None = None

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps = self._trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise AttributeError("this run has no last step")
        return int(steps)

    def hold(self) -> None:
        """Keep the present state as the one to save until `held` is None again."""
        self.held = None
        self.held = Held(self.state_dict(), self.loader_state(), checkpoint.generators())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all ranks share."""
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
            "logged": _copied({name: vars(trainer._logger_connector)[name] for name in LOGGED}),
            "results": self._results(),
        }

    def loader_state(self) -> dict[str, Any]:
        """Return the values that only this rank has: the epoch's means of what the module logs, and its metrics."""
        if self.held is not None:
            return self.held.own
        return {"results": self._results(), "metrics": {name: _taken(each) for name, each in self._metrics().items()}}

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Keep the state for `put_callbacks` and `put_loops`."""
        self._saved, self._rank = state, own

    def put_callbacks(self) -> None:
        """Load callbacks and data module, which may act before the first step."""
        trainer = self._trainer
        for each in trainer.callbacks:
            if each.state_key in self._saved["callbacks"]:
                each.load_state_dict(copy.deepcopy(self._saved["callbacks"][each.state_key]))
        for each, attributes in zip(trainer.checkpoint_callbacks, self._saved["checkpoints"], strict=False):
            vars(each).update(attributes)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(self._saved["datamodule"])

    def put_loops(self) -> None:
        """Load loops and logged values, once the module is on its device. In another world, rank 0's means go on."""
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
        """Convert micro-batches of the training loop to optimizer steps, or back; other counts are the same in every world."""
        for tracker in ("total", "current"):
            counts = loops["epoch_loop.batch_progress"][tracker]
            counts.update({name: convert(count, self._trainer.accumulate_grad_batches) for name, count in counts.items()})
        return loops

    def _metrics(self) -> dict[str, Metric]:
        modules = self._trainer.lightning_module.named_modules()
        return {name: module for name, module in modules if isinstance(module, Metric)}

    def _results(self) -> dict[str, Any]:
        """What the module has logged in this epoch, by the keys of Lightning's collection."""
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
    """Return a copy with its tensors on `device`."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {name: _copied(each, device) for name, each in value.items()}
    return [_copied(each, device) for each in value] if isinstance(value, list) else value
