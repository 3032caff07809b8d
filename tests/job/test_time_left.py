"""The notice to leave, and what fits into the time that is left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from outlast.job.workerfiles import notice_file, time_left


@pytest.mark.parametrize(
    ("left_s", "stored", "upload_s", "training_s"),
    [
        (120, False, None, 118),
        (15, False, None, 13),
        (3, False, None, 1.5),
        (120, True, None, 90),
        (120, True, 4.0, 112),
        (120, True, 100.0, 60),
        (15, True, None, 7.5),
        (15, True, 1.0, 11.5),
        (0, True, 1.0, 0),
    ],
)
def test_the_training_has_what_the_last_upload_does_not_need(
    left_s: float, stored: bool, upload_s: float | None, training_s: float
) -> None:
    assert time_left.for_training(left_s, stored=stored, upload_s=upload_s) == training_s


def test_what_is_assumed_is_said() -> None:
    said = time_left.divided(120, stored=True, upload_s=None)
    assert said == "120 s are left: 90 s for the training to save, 30 s for the last upload (none was measured yet)"
    assert time_left.divided(15, stored=True, upload_s=1.0).endswith("4 s for the last upload (the last one took 1.0 s)")
    assert time_left.divided(15, stored=False) == "15 s are left, 13 s of them for the training to save"


@pytest.mark.parametrize(
    ("left_s", "save_s", "running_s", "why"),
    [
        (15, None, 0, ""),
        (15, 15, 0, ""),
        (15, 16, 0, "a save takes about 16 s, and 15 s are left"),
        (15, 8, 6, ""),
        (15, 8, 8, "a save takes about 8 s, after 8 s for the one in progress, and 15 s are left"),
        (0, 1, 0, "a save takes about 1 s, and 0 s are left"),
    ],
)
def test_a_save_is_skipped_only_if_it_cannot_fit(left_s: float, save_s: float | None, running_s: float, why: str) -> None:
    assert time_left.too_late_to_save(left_s, save_s, running_s) == why


def test_an_upload_that_will_not_be_complete_is_said() -> None:
    assert not time_left.too_late_to_upload(5, None)
    assert not time_left.too_late_to_upload(5, 5)
    assert time_left.too_late_to_upload(5, 9).startswith("the last upload of a checkpoint took 9 s, and 5 s are left")


def test_a_call_neither_replaces_nor_removes_a_leave(tmp_path: Path) -> None:
    notice = tmp_path / "notice.json"
    notice_file.write(notice, "call", "a worker joins", time.time() + 60, generation=3)
    notice_file.write(notice, "leave", "its node goes", time.time() + 30)
    notice_file.write(notice, "call", "another joins", time.time() + 90, generation=4)
    notice_file.end_call(notice)
    assert notice_file.read(notice)["reason"] == "its node goes"
    assert notice_file.left_s(notice) <= 30
    notice.unlink()
    notice_file.write(notice, "call", "another joins", time.time() + 90, generation=4)
    notice_file.end_call(notice)
    assert not notice.exists()
