"""Exact, elastic resume for transformers' Trainer, and for the trainers built on it (TRL's SFTTrainer, PEFT models).

    import outlast.hf
    trainer = Trainer(model, args, train_dataset=data)
    outlast.hf.attach(trainer, batch=64)
    trainer.train()

A killed run continues from its newest state with the same samples and the same global batch. With the same number of ranks, the
results are bit-identical. `save_steps`, `load_best_model_at_end` and `push_to_hub` still use Hugging Face's own folders. Design:
docs/decisions/0060.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from outlast.base.errors import OutlastError
from outlast.storage import checkpoints
from outlast.training import Session, ddp, libraries, session
from outlast.training.samples import seeded
from outlast.training.state import checkpoint, weights

TESTED = "4.56, 4.57 and 5.23"
_HOOKS: dict[str, tuple[str, ...]] = {
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "get_train_dataloader": (),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_scaler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "_evaluate": ("trial", "ignore_keys_for_eval"),
    "_maybe_log_save_evaluate": ("tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time"),
}
"""Trainer methods that we override or call, with the parameters that we rely on."""
_ONLINE = ("GRPO", "RLOO", "PPO", "OnlineDPO", "XPO", "NashMD")
"""Name prefixes of trainers that generate samples during training."""
_STATE = "trainer_state.json"
_RANK = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")
"""Trainer attributes that differ between ranks. In transformers 4, the summed loss is not an attribute."""


_FLAGS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")
"""Flags of the Trainer's control that say which work remains at the end of a step."""


def attach(trainer: Trainer, batch: int) -> None:
    """Make `trainer.train()` resume exactly where it stopped after every failure, and in every world that `batch` allows.

    `batch` is the number of samples per optimizer step, over all ranks; micro-batches have at most `per_device_train_batch_size`
    samples, and `gradient_accumulation_steps` is set accordingly. The order of samples depends only on `args.seed`. Unless
    `dataloader_drop_last` is set, an epoch's last batch is filled up with the epoch's first samples. Raises OutlastError if the
    trainer cannot resume exactly.
    """
    if problem := _unsupported(trainer):
        raise OutlastError(f"outlast.hf.attach: {problem}")
    attachment = _Attachment(trainer, batch)
    attachment.plan()
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_Attached, kind), {"__module__": kind.__module__})
    cast(Any, trainer)._outlast = attachment


def _unsupported(trainer: Trainer) -> str:
    if not isinstance(trainer, Trainer):
        return f"a {type(trainer).__name__} is no Trainer of transformers"
    if isinstance(trainer, _Attached):
        return "this trainer is attached already; remove the second call"
    if trainer.is_in_train or trainer.state.global_step:
        return "training has begun already; attach before trainer.train()"
    if name := libraries.missing(Trainer, _HOOKS):
        return f"transformers {transformers.__version__} has another Trainer.{name} than this Outlast knows; tested: {TESTED}"
    return _unsupported_arguments(trainer) or _unsupported_data(trainer)


def _unsupported_arguments(trainer: Trainer) -> str:
    args, accelerator = trainer.args, trainer.accelerator
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    handler = getattr(accelerator, "ddp_handler", None)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    split = libraries.split(accelerator)
    cases = {
        "auto_find_batch_size begins again with another batch; leave it out": args.auto_find_batch_size,
        "DeepSpeed keeps checkpoints of its own, which only it can load; use DDP or FSDP2": trainer.is_deepspeed_enabled,
        "FSDP1 numbers the optimizer's state; use FSDP2: fsdp_config={'fsdp_version': 2}": trainer.is_fsdp_enabled
        and getattr(plugin, "fsdp_version", 1) != 2,
        "enable_jit_checkpoint also saves on SIGTERM; leave it out": getattr(args, "enable_jit_checkpoint", False),
        libraries.STATIC_GRAPH: handler is not None and handler.static_graph,
        split: split,
        "several GPUs in one process: start one process for each GPU": args.n_gpu > 1,
        f"{ranks} processes train models of their own, since there is no process group; without GPUs set use_cpu=True": ranks > 1
        and not dist.is_initialized(),
        "the optimizer has no state_dict; give Trainer one of torch": trainer.optimizer is not None
        and not hasattr(trainer.optimizer, "state_dict"),
    }
    return next((sentence for sentence, holds in cases.items() if holds), "")


def _unsupported_data(trainer: Trainer) -> str:
    args, kind, data = trainer.args, type(trainer), trainer.train_dataset
    online = [each.__name__ for each in kind.__mro__ if each.__name__.startswith(_ONLINE)]
    if online:
        return f"{online[0]} generates samples while it trains, which are no part of the state; it cannot continue exactly"
    if data is None:
        return "the trainer has no train_dataset"
    if problem := libraries.unordered(data):
        return problem
    for name in ("get_train_dataloader", "_get_train_sampler"):
        if getattr(kind, name) is not getattr(Trainer, name):
            return f"{kind.__name__}.{name} chooses the samples itself; remove it, or make the order part of the dataset"
    strategy = getattr(args, "train_sampling_strategy", "random")
    if getattr(args, "group_by_length", False) or strategy not in ("random", "sequential"):
        return "samples are grouped by length, which depends on the batch of a rank; leave it out"
    return ""


class _Order(libraries.Order):
    """An epoch's micro-batches. The Trainer skips the micro-batches before the resumed step, so these are empty lists."""

    stopped = False

    def __iter__(self) -> Iterator[list[Any]]:
        yield from ([] for _ in range(self.step * self.accumulate))
        if not self.stopped:
            yield from super().__iter__()

    @property
    def batch_sampler(self) -> _Order:
        """Return `self`, because the Trainer looks for `set_epoch` one level below the loader's batch sampler."""
        return self


class _Attachment:
    def __init__(self, trainer: Trainer, batch: int) -> None:
        self.trainer, self.batch, self.most = trainer, batch, trainer.args.per_device_train_batch_size
        output = Path(trainer.args.output_dir or "out") / "outlast"
        self.session = session.attach(trainer.args.seed, output=output, quiet=True, batch=batch)
        self.run: Session | None = None
        self.begun = False
        self.position = _Position(self)
        self.order: _Order | None = None
        self.stub = ""
        """Directory with only the Trainer's own state, from which the Trainer reads its position; empty for a new run."""
        self.generators: dict[str, Any] = {}
        self.evaluation: dict[str, Any] | None = None
        retention = checkpoints.Retention.parse(os.environ)
        self.by = retention.by if retention.best and retention.by.startswith("eval_") else ""
        """The evaluation metric that ranks checkpoints; empty if there is none."""

    def plan(self) -> None:
        """Set the size of micro-batches and the number of them in a step. Raises OutlastError if this world cannot share the
        batch."""
        trainer: Any = self.trainer
        size, accumulate = libraries.plan(self.batch, trainer.args.world_size, self.most)
        trainer.args.per_device_train_batch_size = trainer._train_batch_size = size
        trainer.args.gradient_accumulation_steps = accumulate

    def train(self, original: Callable[..., Any], resume_from_checkpoint: Any, options: Mapping[str, Any]) -> Any:
        trainer = self.trainer
        if self.begun:
            raise OutlastError("outlast.hf: train() is called a second time; one run trains once")
        if options.get("trial") is not None:
            raise OutlastError("outlast.hf: hyperparameter_search trains many times; attach to a Trainer that trains once")
        self.plan()
        self.begun = True
        trainer.add_callback(_Callback(self))
        with contextlib.ExitStack() as stack:
            self.run = stack.enter_context(self.session)
            stack.callback(setattr, self, "run", None)  # evaluations after this are the script's own
            if self.run.peek({"trainer": self.position}):
                directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="outlast-hf-"))
                resume_from_checkpoint = self.stub = self.position.write(Path(directory))
            return original(resume_from_checkpoint=resume_from_checkpoint, **options)

    def loader(self, original: Callable[[], DataLoader[Any]]) -> DataLoader[Any]:
        with seeded.preserved_generators():
            theirs = original()
        args = self.trainer.args
        samples, ranks = len(cast(Any, theirs.dataset)), args.world_size
        shuffle = getattr(args, "train_sampling_strategy", "random") == "random"
        self.order = _Order(
            samples, self.batch, rank=args.process_index, ranks=ranks, most=self.most, seed=args.seed, shuffle=shuffle,
            drop_last=args.dataloader_drop_last,
        )  # fmt: skip
        self.order.seek(self.position.step)
        return libraries.Loader(theirs, self.order, args.seed)

    def resume(self) -> None:
        """Load the newest state, once the model, optimizer and schedule exist, and do the resumed step's remaining work."""
        trainer: Any = self.trainer
        assert self.run is not None
        ddp.settle(trainer.model_wrapped)
        optimizer = trainer.optimizer
        state = {
            "model": weights.trained(trainer.model),
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "schedule": trainer.lr_scheduler,
            "trainer": self.position,
        }
        if trainer.accelerator.scaler is not None:
            state["scaler"] = trainer.accelerator.scaler
        owed = self.position.owed if self.run.resume(state) else {}
        self.generators = checkpoint.generators()
        if owed:
            self.position.put()
            self._do(owed)

    def _do(self, owed: Mapping[str, bool]) -> None:
        """Log, evaluate and save at the resumed step as `owed` says, since its state was saved before this work."""
        trainer: Any = self.trainer
        assert self.order is not None
        for name, value in owed.items():
            setattr(trainer.control, name, value)
        if self.position.at_end and trainer.state.global_step < trainer.state.max_steps:  # the run has been extended
            trainer.control.should_training_stop = False
        whole = trainer.state.global_step % self.order.steps_per_epoch == 0
        epoch = int(trainer.state.epoch)
        tr_loss = getattr(trainer, "_tr_loss", torch.zeros((), device=trainer.args.device))
        for end in (False, True)[: 1 + whole]:
            if end:
                trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            trainer._maybe_log_save_evaluate(tr_loss, None, trainer.model_wrapped, None, epoch, None, None)
            trainer.control._new_step()
        self.order.stopped = trainer.control.should_training_stop

    def boundary(self) -> None:
        """End a step. If an evaluation ranks the step's checkpoint, the checkpoint is saved after the evaluation, with the
        present state."""
        run, state, control = self.run, self.trainer.state, self.trainer.control
        assert run is not None
        assert self.order is not None
        step = state.global_step
        epoch_ends = step % self.order.steps_per_epoch == 0 or control.should_epoch_stop or control.should_training_stop
        follows = control.should_evaluate or (epoch_ends and self.trainer.args.eval_strategy == "epoch")
        self.position.held = None
        run.log(step)
        if libraries.boundary(run, step, measured_later=bool(self.by) and follows):
            self.position.held = copy.deepcopy((self.position.state_dict(), self.position.loader_state()))

    def measured(self, metrics: Mapping[str, Any]) -> None:
        """Save the checkpoint that waits for this evaluation, with its metric."""
        if self.position.held and self.evaluation is not None and self.run is not None and self.by in metrics:
            checkpoint.set_generators(self.evaluation)  # as they were before the evaluation
            self.run.save(self.trainer.state.global_step, metric=metrics[self.by])
            self.position.held = None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with checkpoint.kept_generators() as self.evaluation:
            yield
        self.evaluation = None

    def leave(self) -> None:
        """If a rank is interrupted during an evaluation, save and leave. The evaluation is repeated after resuming."""
        run, before = self.run, self.evaluation
        if run is None or before is None:
            return
        run.alive()
        if run.interrupted():
            checkpoint.set_generators(before)
            run.save(self.trainer.state.global_step, metric=math.nan if self.by else None)


class _Attached:
    _outlast: _Attachment

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        options |= dict(zip(("trial", "ignore_keys_for_eval"), args, strict=False))
        return self._outlast.train(super().train, resume_from_checkpoint, options)  # type: ignore[misc]

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self._outlast.loader(super().get_train_dataloader)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        if resume_from_checkpoint != self._outlast.stub:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint != self._outlast.stub:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: Any) -> None:
        if checkpoint != self._outlast.stub:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint_: Any) -> None:
        if checkpoint_ == self._outlast.stub:
            checkpoint.set_generators(self._outlast.generators)
        else:
            super()._load_rng_state(checkpoint_)  # type: ignore[misc]

    def _evaluate(self, *args: Any, **options: Any) -> Any:
        with self._outlast.evaluating():
            return super()._evaluate(*args, **options)  # type: ignore[misc]


class _Callback(TrainerCallback):
    def __init__(self, attachment: _Attachment) -> None:
        self._attachment = attachment

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._attachment.resume()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._attachment.boundary()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **_: Any) -> None:
        self._attachment.measured(metrics or {})

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        numbers: dict[str, Any] = {
            name: value
            for name, value in (logs or {}).items()
            if isinstance(value, int | float) and name not in libraries.RESERVED
        }
        if self._attachment.run is not None and numbers:
            self._attachment.run.log(state.global_step, **numbers)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._attachment.leave()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        sampler = self._attachment.order
        if sampler is not None and sampler.stopped and state.global_step % sampler.steps_per_epoch == 0:
            control._new_step()  # the epoch whose end stopped the training has been evaluated and saved


class _Position:
    """The Trainer's step, its remaining work, logs and callbacks, with `state_dict` and `load_state_dict`."""

    def __init__(self, attachment: _Attachment) -> None:
        self._attachment = attachment
        self.step = 0
        self.owed: dict[str, bool] = {}
        """The flags at the end of the step: whether to log, evaluate, save and stop."""
        self._saved: Mapping[str, Any] = {}
        self._rank: Mapping[str, Any] = {}
        self.held: tuple[dict[str, Any], dict[str, Any]] | None = None
        """The state and this rank's values at the end of the step, which are kept while a checkpoint waits for an evaluation."""
        self._lines = ""
        self._logged = 0

    @property
    def at_end(self) -> bool:
        """True if the saved step was the last one under the settings at the time of the save."""
        return bool(json.loads(self._saved["state"])["max_steps"] == self.step)

    @property
    def total_steps(self) -> int:
        return int(self._attachment.trainer.state.max_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Only log entries that are new since the last call are encoded."""
        if self.held:
            return self.held[0]
        trainer: Any = self._attachment.trainer
        state, history = trainer.state, trainer.state.log_history
        if self._logged > len(history):
            self._lines, self._logged = "", 0
        for entry in history[self._logged :]:
            self._lines += json.dumps(entry) + "\n"
        self._logged = len(history)
        fields = {each.name: getattr(state, each.name) for each in dataclasses.fields(state) if each.name != "log_history"}
        callbacks = [each.state()["attributes"] for each in self._exportable()]
        own = {
            "step": state.global_step,
            "callbacks": callbacks,
            "owed": {name: getattr(trainer.control, name) for name in _FLAGS},
        }
        ranks = {"ranks": trainer.args.world_size, "rank_0": self.loader_state()}
        return {"version": 1, "state": json.dumps(fields), "log": self._lines, **own, **ranks}

    def loader_state(self) -> dict[str, Any]:
        if self.held:
            return self.held[1]
        trainer = self._attachment.trainer
        values = {name: getattr(trainer, name) for name in _RANK if hasattr(trainer, name)}
        return {name: value.detach().cpu() if isinstance(value, torch.Tensor) else value for name, value in values.items()}

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        same = own is not None and state["ranks"] == self._attachment.trainer.args.world_size
        self._saved, self._rank = state, own if own is not None and same else state["rank_0"]
        self.step, self.owed = state["step"], dict(state["owed"])

    def write(self, directory: Path) -> str:
        history = [json.loads(line) for line in self._saved["log"].splitlines()]
        state = json.loads(self._saved["state"]) | {"log_history": history}
        state["train_batch_size"] = self._attachment.trainer.args.train_batch_size
        (directory / _STATE).write_text(json.dumps(state))
        return str(directory)

    def put(self) -> None:
        """Restore the saved values after the Trainer has read its own state."""
        trainer: Any = self._attachment.trainer
        values = dict(self._rank)
        if not hasattr(trainer, "_tr_loss"):  # the next log is the mean over the steps since this start
            values.pop("_globalstep_last_logged", None)
        for name, value in values.items():
            setattr(trainer, name, value.to(trainer.args.device) if isinstance(value, torch.Tensor) else value)
        for callback, attributes in zip(self._exportable(), self._saved["callbacks"], strict=False):
            vars(callback).update(attributes)

    def _exportable(self) -> list[Any]:
        callbacks: list[Any] = self._attachment.trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]
