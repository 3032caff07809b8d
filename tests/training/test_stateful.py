"""Loaders with a state of their own: exact with as many ranks as saved it, an epoch anew with others."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from outlast.base.errors import OutlastError
from outlast.training import Stateful, Stream, session
from outlast.training.state import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*Vital:UserWarning")


class Numbers(Dataset[float]):
    """Samples with noise, which is drawn in this process."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return index + 0.5 * float(torch.rand(()))


class Flow(IterableDataset[int]):
    """An iterable that knows its position, and no length."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 7:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def a_loader(dataset: Any = None, epochs: int = 3) -> Stateful:
    torch.manual_seed(0)
    shuffled = {} if dataset else {"shuffle": True}
    return Stateful(StatefulDataLoader(dataset or Numbers(), batch_size=3, **shuffled), epochs=epochs)


@pytest.mark.parametrize("dataset", [None, Flow()])
def test_a_loader_goes_on_with_the_very_next_batch_and_disturbs_no_random_number(dataset: Any):
    whole = [(batch.tolist(), float(torch.rand(()))) for batch in a_loader(dataset)]
    for at in range(1, len(whole)):
        first = a_loader(dataset)
        for number, _ in enumerate(first, start=1):
            torch.rand(())
            if number == at:
                break
        state, ours, generator = first.state_dict(), first.loader_state(), torch.get_rng_state()
        second = a_loader(dataset)
        second.load_state_dict(state, ours)
        torch.set_rng_state(generator)
        assert second.step == at
        assert [(batch.tolist(), float(torch.rand(()))) for batch in second] == whole[at:]
        assert second.step == len(whole)


def test_with_another_number_of_ranks_the_epoch_begins_anew_and_a_warning_says_what_comes_again(caplog: pytest.LogCaptureFixture):
    loader = a_loader()
    for _ in loader:
        if loader.step == 6:
            break
    assert (loader.total_steps, len(loader)) == (12, 6)
    state, ours = loader.state_dict() | {"ranks": 2}, loader.loader_state()
    resized = a_loader()
    with caplog.at_level(logging.WARNING):
        resized.load_state_dict(state, ours)
    assert "saved by 2 ranks, and its states do not fit 1: epoch 2 begins anew, and the samples of 2 batches" in caplog.text
    assert (resized.epoch, resized.step, resized.total_steps, len(list(resized))) == (1, 6, 14, 8)
    caplog.clear()
    ended = a_loader()
    ended.load_state_dict(state | {"done": 4}, ours)
    assert (ended.epoch, len(list(ended)), caplog.text) == (2, 4, "")


def test_a_checkpoint_holds_the_state_of_each_ranks_loader():
    loader = a_loader()
    next(iter(loader))
    assert sorted(checkpoint.capture({"loader": loader}, 1, 2)) == ["loader/1", "rng/1"]
    assert sorted(checkpoint.capture({"loader": loader}, 0, 2)) == ["loader", "loader/0", "rng/0"]


def test_what_has_no_state_is_refused_with_what_to_do():
    with pytest.raises(
        OutlastError, match=r"the loader is a list of 2 without state_dict.*torchdata's StatefulDataLoader, or a Stream"
    ):
        Stateful([1, 2])
    with pytest.raises(OutlastError, match=r"give it loader.dataset, or wrap it in Stateful\(loader\)"):
        Stream(StatefulDataLoader(Numbers()), 2)
    assert not hasattr(a_loader(Flow()), "total_steps")


def test_a_session_goes_on_with_the_next_batch_of_a_loader(plain: Path):
    def trained(stop: int = 0) -> tuple[list[list[float]], list[float]]:
        """The batches of a start, which ends after the step `stop`, and its last weights."""
        with session.open(seed=1, quiet=True) as run:
            loader, net, seen = a_loader(), nn.Linear(1, 1), []
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
            step = run.resume({"net": net, "optimizer": optimizer, "loader": loader})
            for x in loader:
                optimizer.zero_grad()
                nn.functional.dropout(net(x[:, None].float()) ** 2, 0.2).mean().backward()
                optimizer.step()
                seen.append(x.tolist())
                step += 1
                run.log(step)
                if step == stop:
                    break
        return seen, [parameter.item() for parameter in net.parameters()]

    first, _ = trained(stop=6)
    rest, weights = trained()
    shutil.rmtree("out")
    assert (first + rest, weights) == trained()
