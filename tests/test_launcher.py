"""What the launcher decides by itself: GPUs, and which of several failures is the cause."""

from __future__ import annotations

import pytest

from outlast.backends import workers
from outlast.errors import OutlastError
from outlast.rendezvous import decider
from outlast.status import Failure


@pytest.mark.parametrize(
    ("shown", "count", "index", "expected"),
    [
        (["0", "1"], 0, 1, []),
        ([], 2, 0, []),
        (["0", "1"], 1, 1, ["1"]),
        (["0", "1", "2", "3"], 2, 1, ["2", "3"]),
        (["GPU-a", "GPU-b"], 2, 0, ["GPU-a", "GPU-b"]),
    ],
)
def test_every_worker_sees_gpus_of_its_own(shown: list[str], count: int, index: int, expected: list[str]):
    assert workers.devices(shown, count, index) == expected


def test_too_few_gpus_are_refused_and_not_shared():
    with pytest.raises(
        OutlastError, match=r"this machine shows 2 GPUs, 3 workers need 3; lower workers.replicas or resources.gpu"
    ):
        workers.devices(["0", "1"], 1, 2)


def test_the_gpus_shown_are_those_that_the_user_left_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-a")
    assert workers.gpus() == ["5", "GPU-a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert workers.gpus() == []


def a_failure(code: int = 1, *, time: float = 0.0) -> Failure:
    return Failure(worker=0, code=code, reason="", time=time)


def test_the_cause_is_a_kill_before_an_error_and_an_error_before_its_echoes():
    killed, bug, aborted = a_failure(137, time=3.0), a_failure(1, time=1.0), a_failure(134, time=2.0)
    echo = a_failure(1, time=0.0)
    pending = [(True, echo), (False, aborted), (False, bug), (False, killed)]
    assert [failure for _, failure in sorted(pending, key=decider.cause_first)] == [killed, bug, aborted, echo]
