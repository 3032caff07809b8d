"""Exact, elastic resume for torchtitan's Trainer, as two components of its configuration.

    import outlast.torchtitan
    Trainer.Config(
        training=TrainingConfig(local_batch_size=2, global_batch_size=64, ...),
        dataloader=outlast.torchtitan.Loader.Config(make=my_loader, batch=64),
        checkpoint=outlast.torchtitan.CheckpointManager.Config(),
        ...
    )

A killed run continues from its newest state with the same samples and the same global batch. With the same number of ranks, the
results are bit-identical. Design: docs/decisions/0060.
"""

# mypy: allow-untyped-calls, allow-subclassing-any
from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import torchtitan
import tyro
from torch.utils.data import DataLoader

from outlast import order
from outlast.base.errors import OutlastError
from outlast.training import Session, libraries, session
from outlast.training.samples.stream import kind
from outlast.training.state import checkpoint, weights

TESTED = "0.3.0"
_OTHER = f"torchtitan {torchtitan.__version__} has another {{}} than this Outlast knows; tested: {TESTED}"

try:
    from torchtitan.components import checkpointer
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError as problem:
    raise OutlastError(_OTHER.format(problem.name)) from problem

_HOOKS: dict[str, tuple[str, ...]] = {"_load": ("step",), "_save": ("curr_step", "last_step"), "_close": ()}
"""Methods that we override, with the parameters that we rely on."""
_TRAINER = ("config", "dataloader", "metrics_processor", "model_parts", "ntokens_seen", "optimizers", "parallel_dims", "step")


class Loader(order.Loader, BaseDataLoader):
    """Yields micro-batches endlessly, in an order that does not depend on the number of ranks.

    The state is the same on all ranks, so a run can continue with another degree of data parallelism, unlike with torchtitan's
    loaders. The loader also works without our `CheckpointManager`.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Configuration of the Trainer's `dataloader`."""

        make: Annotated[Callable[[Any, int], DataLoader[Any]], tyro.conf.Suppress]
        """Function of the tokenizer and `seq_len` that returns a DataLoader, of which we use the dataset, collator, workers,
        `shuffle` and `drop_last`. Samples are pairs `({"input": tokens, ...}, labels)` of tensors of shape (seq_len,), and the
        dataset has a length. Micro-batches have at most `training.local_batch_size` samples."""
        batch: int
        """Number of samples per optimizer step over all ranks, as in `training.global_batch_size`."""
        seed: int = 0
        """Seed of the order and of the samples' random numbers."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, tokenizer: Any, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        theirs = config.make(tokenizer, seq_len)
        if problem := libraries.unordered_loader(theirs):
            raise OutlastError(f"outlast.torchtitan: {problem}")
        dataset: Any = theirs.dataset
        sampler = libraries.Order(
            len(dataset), config.batch, rank=dp_rank, ranks=dp_world_size, most=local_batch_size, seed=config.seed,
            shuffle=libraries.shuffled(theirs), drop_last=theirs.drop_last,
        )  # fmt: skip
        super().__init__(dataset, sampler, theirs.collate_fn)
        self._loader = libraries.Loader(theirs, sampler, config.seed)

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.sampler.seek(self._handed_out // self.sampler.accumulate)
            for batch in self._loader:
                self._handed_out += 1
                yield batch


class CheckpointManager(checkpointer.CheckpointManager):
    """Takes Outlast's snapshots and checkpoints at the end of steps, in addition to torchtitan's own checkpoints.

    Torchtitan's checkpoints are read (`initial_load_path`, `load_step`, an existing `folder`) only if Outlast has saved no state
    of the run. They are still written every `interval` steps and at the end, unless `load_only` is set. Raises OutlastError
    before the first step if training cannot resume exactly.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(checkpointer.CheckpointManager.Config):
        """Configuration of the Trainer's `checkpoint`, with all of torchtitan's options."""

        enable: bool = True

    run: Session | None = None
    """The session; None before and after training."""
    _logged: tuple[int, dict[str, Any]] = (0, {})

    def _load(self, step: int = -1) -> bool:
        trainer, loader = self.states[checkpointer.TRAIN_STATE], self.states[checkpointer.DATALOADER]
        if problem := _unsupported(trainer, loader):
            raise OutlastError(f"outlast.torchtitan: {problem}")
        config = trainer.config
        opened = session.attach(
            config.debug.seed or 0,
            output=Path(config.dump_folder) / "outlast",
            quiet=True,
            batch=loader.sampler.batch // config.training.local_batch_size,  # ranks that can share it have whole micro-batches
        )
        self.run = opened.__enter__()
        self._observe(trainer, self.run)
        groups = {"model": map(weights.trained, trainer.model_parts), "optimizer": trainer.optimizers}
        things = {f"{name}_{n}" if n else name: thing for name, group in groups.items() for n, thing in enumerate(group)}
        position = _Position(trainer, loader.sampler.ranks)
        others = {"schedule": self.states[checkpointer.LR_SCHEDULER], "loader": loader, "trainer": position}
        if not self.run.resume({**things, **others}):
            return bool(super()._load(step))
        if config.validator.enable and trainer.validator.should_validate(trainer.step):
            trainer.validator.validate(trainer.model_parts, trainer.step)  # the step was saved before its validation
        return True

    def _observe(self, trainer: Any, run: Session) -> None:
        """Record each step's metrics, and keep validations from changing the random state or counting as hangs."""
        log = trainer.metrics_processor.logger.log

        def noted(metrics: dict[str, Any], step: int) -> None:
            log(metrics, step)
            self._logged = step, metrics

        trainer.metrics_processor.logger.log = noted
        if not trainer.config.validator.enable:
            return
        validate = trainer.validator.validate

        def validated(*args: Any, **options: Any) -> None:
            with checkpoint.kept_generators(), run.alive():
                validate(*args, **options)

        trainer.validator.validate = validated

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = bool(super()._save(curr_step, last_step))
        if self.run is not None:
            step, metrics = self._logged
            self.run.log(curr_step, **(metrics if step == curr_step else {}))
            try:
                self.run.boundary(curr_step)
            except SystemExit:  # torchtitan's main does not catch it
                self._end()
                raise
        return saved

    def _close(self) -> None:
        super()._close()
        self._end()

    def _end(self) -> None:
        if self.run is not None:
            run, self.run = self.run, None
            run.__exit__(*sys.exc_info())

    def __del__(self) -> None:
        """Release threads without ending the session, which would wait for other ranks."""
        if getattr(self, "enable", False):
            super()._close()


def _unsupported(trainer: Any, loader: Any) -> str:
    if name := libraries.missing(checkpointer.CheckpointManager, _HOOKS):
        return _OTHER.format(f"CheckpointManager.{name}")
    if name := next((name for name in _TRAINER if not hasattr(trainer, name)), ""):
        return _OTHER.format(f"Trainer.{name}")
    if not isinstance(loader, Loader):
        return (
            f"the loader is {kind(loader)}, which fits one number of ranks only; set dataloader=outlast.torchtitan.Loader.Config"
        )
    if loader.sampler.ranks != dist.get_world_size():
        return libraries.SPLIT
    if trainer.parallel_dims.ep_enabled:
        return "expert parallelism is not supported"
    batch = trainer.config.training.global_batch_size
    if batch != loader.sampler.batch:
        return f"the loader's batch is {loader.sampler.batch}, and training.global_batch_size {batch}; make them the same"
    return ""


class _Position:
    """A Trainer's steps and tokens, for any number of ranks, with `state_dict` and `load_state_dict`."""

    def __init__(self, trainer: Any, ranks: int) -> None:
        self._trainer, self._ranks = trainer, ranks

    @property
    def total_steps(self) -> int:
        return int(self._trainer.config.training.steps)

    def state_dict(self) -> dict[str, int]:
        return {"version": 1, "step": self._trainer.step, "tokens": self._trainer.ntokens_seen * self._ranks}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._trainer.step, self._trainer.ntokens_seen = state["step"], state["tokens"] // self._ranks
