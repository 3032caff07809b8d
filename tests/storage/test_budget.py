"""How much memory snapshots may use, and what fits."""

from __future__ import annotations

import pytest

from outlast.storage.snapshots import budget
from outlast.storage.snapshots.budget import Budget, Fit

GIB = 2**30


TENTH = 16 * GIB // 10
STAYS = ": a tenth of the memory stays free"


@pytest.mark.parametrize(
    ("requested", "used", "free", "bytes_", "why"),
    [
        ("off", 0, 16, 0, "checkpoint.memory is off"),
        ("auto", 8, 16, 4 * GIB, "4.0 GiB, a quarter of 16 GiB"),
        (8 * GIB, 0, 16, 8 * GIB, "8.0 GiB, checkpoint.memory"),
        ("auto", 12, 16, 4 * GIB - TENTH, "2.4 GiB instead of 4.0 GiB, a quarter of 16 GiB" + STAYS),
        ("auto", 0, 2, 2 * GIB - TENTH, "410 MiB instead of 4.0 GiB, a quarter of 16 GiB" + STAYS),  # the machine has no more
        ("auto", 15, 16, 0, "no memory: less than a tenth of 16 GiB is free"),
        (20 * GIB, 0, 16, 16 * GIB - TENTH, "14 GiB instead of 20 GiB, checkpoint.memory" + STAYS),
    ],
)
def test_snapshots_use_what_was_asked_for_and_leave_a_tenth_free(
    requested: budget.Requested, used: int, free: int, bytes_: int, why: str
) -> None:
    assert budget.budget(requested, 16 * GIB, used * GIB, free * GIB) == Budget(bytes_, why)


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


AUTO = "4.0 GiB, a quarter of 16 GiB; a state of 2.0 GiB fits"
TOO_MUCH = "checkpoint.memory is 4.0 GiB; "


@pytest.mark.parametrize(
    ("requested", "workers", "saved", "expected"),
    [
        ("off", 2, 0, "checkpoint.memory is off"),
        ("auto", 1, 0, AUTO),
        ("auto", 2, GIB, f"{AUTO} with DDP, 1.0 GiB a worker with FSDP and replicas: 1 (2 would need 3 workers); "
         "that of the newest checkpoint, 1.0 GiB, does"),
        ("auto", 1, 3 * GIB, f"{AUTO}; that of the newest checkpoint, 3.0 GiB, does not: snapshots take 6.0 GiB, {TOO_MUCH}"
         "there are none"),
        ("auto", 8, 12 * GIB, f"{AUTO} with DDP, 683 MiB a worker with FSDP and replicas: 2; that of the newest checkpoint, "
         f"12 GiB, with DDP: snapshots take 24 GiB, {TOO_MUCH}there are none and with FSDP: "
         f"snapshots with replicas: 2 take 9.0 GiB, {TOO_MUCH}replicas are reduced to 0"),
    ],
)  # fmt: skip
def test_validate_says_what_snapshots_cost_and_what_fits(
    requested: budget.Requested, workers: int, saved: int, expected: str
) -> None:
    assert budget.cost(requested, 2, 16 * GIB, workers, saved) == expected
