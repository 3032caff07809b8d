"""How much memory snapshots may use, and what fits."""

from __future__ import annotations

import pytest

from outlast.storage.snapshots import budget
from outlast.storage.snapshots.budget import Budget, Fit

GIB = 2**30


@pytest.mark.parametrize(
    ("requested", "used", "free", "expected"),
    [
        ("off", 0, 16 * GIB, Budget(0, "checkpoint.memory is off")),
        ("auto", 8 * GIB, 16 * GIB, Budget(4 * GIB, "4.0 GiB, a quarter of 16 GiB")),
        (8 * GIB, 0, 16 * GIB, Budget(8 * GIB, "8.0 GiB, checkpoint.memory")),
        (
            "auto",
            12 * GIB,
            16 * GIB,
            Budget(4 * GIB - 16 * GIB // 10, "2.4 GiB instead of 4.0 GiB, a quarter of 16 GiB: a tenth of the memory stays free"),
        ),
        (
            "auto",
            0,
            2 * GIB,  # the machine has no more, whatever the limit of the worker
            Budget(2 * GIB - 16 * GIB // 10, "410 MiB instead of 4.0 GiB, a quarter of 16 GiB: a tenth of the memory stays free"),
        ),
        ("auto", 15 * GIB, 16 * GIB, Budget(0, "no memory: less than a tenth of 16 GiB is free")),
        (
            20 * GIB,
            0,
            16 * GIB,
            Budget(16 * GIB - 16 * GIB // 10, "14 GiB instead of 20 GiB, checkpoint.memory: a tenth of the memory stays free"),
        ),
    ],
)
def test_snapshots_use_what_was_asked_for_and_leave_a_tenth_free(
    requested: budget.Requested, used: int, free: int, expected: Budget
) -> None:
    assert budget.budget(requested, 16 * GIB, used, free) == expected


def test_the_variable_says_what_the_job_file_says() -> None:
    assert [budget.requested(text) for text in ("", "auto", "off", "1048576")] == ["auto", "auto", "off", 2**20]
    with pytest.raises(ValueError, match="is not a quantity; write 16Gi"):
        budget.requested("much")


@pytest.mark.parametrize(
    ("room", "shared", "unique", "workers", "expected"),
    [
        (2 * GIB, GIB, 0, 8, Fit(True, 0)),
        (6 * GIB, 0, GIB, 8, Fit(True, 2)),
        (4 * GIB, 0, GIB, 2, Fit(True, 1)),  # nobody else could hold another
        (2 * GIB, 0, GIB, 1, Fit(True, 0)),
        (
            5 * GIB,
            0,
            GIB,
            8,
            Fit(True, 1, "snapshots with replicas: 2 take 6.0 GiB, checkpoint.memory is 5.0 GiB; replicas are reduced to 1"),
        ),
        (GIB, GIB, GIB, 8, Fit(False, 0, "snapshots take 4.0 GiB, checkpoint.memory is 1.0 GiB; there are none")),
    ],
)
def test_what_does_not_fit_is_reduced(room: int, shared: int, unique: int, workers: int, expected: Fit) -> None:
    assert budget.fit(room, shared, unique, 2, workers) == expected


@pytest.mark.parametrize("replicas", [0, 1, 3])
def test_the_largest_state_fits_and_a_larger_one_does_not(replicas: int) -> None:
    common, own = budget.largest(GIB, replicas)
    assert budget.fit(GIB, common, 0, replicas, 8) == Fit(True, 0)
    assert budget.fit(GIB, 0, own, replicas, 8) == Fit(True, replicas)
    assert not budget.fit(GIB, common + 1, 0, replicas, 8).held
    assert budget.fit(GIB, 0, own + 1, replicas, 8).replicas < replicas or not replicas


@pytest.mark.parametrize(
    ("requested", "workers", "saved", "expected"),
    [
        ("off", 2, 0, "checkpoint.memory is off"),
        ("auto", 1, 0, "4.0 GiB, a quarter of 16 GiB; a state of 2.0 GiB fits"),
        (
            "auto",
            2,
            GIB,
            "4.0 GiB, a quarter of 16 GiB; a state of 2.0 GiB fits with DDP, 1.0 GiB a worker with FSDP and replicas: 1 "
            "(2 would need 3 workers); that of the newest checkpoint, 1.0 GiB, does",
        ),
        (
            "auto",
            1,
            3 * GIB,
            "4.0 GiB, a quarter of 16 GiB; a state of 2.0 GiB fits; that of the newest checkpoint, 3.0 GiB, does not: "
            "snapshots take 6.0 GiB, checkpoint.memory is 4.0 GiB; there are none",
        ),
        (
            "auto",
            8,
            12 * GIB,
            "4.0 GiB, a quarter of 16 GiB; a state of 2.0 GiB fits with DDP, 683 MiB a worker with FSDP and replicas: 2; "
            "that of the newest checkpoint, 12 GiB, with DDP: snapshots take 24 GiB, checkpoint.memory is 4.0 GiB; there are none"
            " and with FSDP: snapshots with replicas: 2 take 9.0 GiB, checkpoint.memory is 4.0 GiB; replicas are reduced to 0",
        ),
    ],
)
def test_validate_says_what_snapshots_cost_and_what_fits(
    requested: budget.Requested, workers: int, saved: int, expected: str
) -> None:
    assert budget.cost(requested, 2, 16 * GIB, workers, saved) == expected
