"""The settings that a script reports: what is written, what a change says, what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from outlast.base import files
from outlast.base.errors import OutlastError
from outlast.training.state import parameters


def test_settings_are_written_as_json_and_a_change_is_said(tmp_path: Path):
    path = tmp_path / "parameters.json"
    given = {"lr": 0.1, "data": Path("/data"), "layers": (1, 2), "of": {"width": np.int64(8), "best": None}, "on": True}
    plain = parameters.plain(given)
    assert parameters.write(path, plain) == ""
    assert json.loads(path.read_text()) == {
        "lr": 0.1, "data": "/data", "layers": [1, 2], "of.width": 8, "of.best": None, "on": True
    }  # fmt: skip
    before = path.stat()
    assert parameters.write(path, plain) == "", "the same on resume"
    assert path.stat().st_ino == before.st_ino, "not written again"
    assert parameters.write(path, plain | {"lr": 0.2, "new": 1}) == "lr 0.1 → 0.2"
    assert files.mapping(path)["lr"] == 0.2
    path.write_text("{half")
    assert parameters.write(path, plain) == ""
    assert files.mapping(path) == plain


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, r"run.parameters\(\) got int 3 and needs names \(.*\); write run.parameters\({'lr': 0.1}\), or for a dataclass "),
        ({"net": object}, r"parameter net \(type <class 'object'>\) must be a number, a text, .*; give its value or its name"),
        ({"a": [[1]]}, r"parameter a \(list \[1\]\) must be"),
    ],
)
def test_what_is_no_setting_is_refused(given: object, said: str):
    with pytest.raises(OutlastError, match=said):
        parameters.plain(given)


def test_no_number_of_json_is_a_text():
    assert parameters.plain({"limit": float("inf")}) == {"limit": "inf"}


def test_a_session_writes_them_and_logs_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from outlast.training import session

    monkeypatch.setenv("OUTLAST_OUTPUT", str(tmp_path))
    for lr in (0.1, 0.1, 0.2):
        with caplog.at_level(logging.WARNING), session.open(quiet=True) as run:
            run.parameters({"lr": lr})
            run.parameters({"batch": 8})
    assert files.mapping(tmp_path / "parameters.json") == {"lr": 0.2, "batch": 8}
    assert [record.message for record in caplog.records] == [
        "outlast: the run goes on with other parameters than before: lr 0.1 → 0.2"
    ]
