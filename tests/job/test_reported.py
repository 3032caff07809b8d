"""`outlast.training.progress`: a script without a session tells its step."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.base.errors import OutlastError
from outlast.job import contract, ledger
from outlast.job.contract import Env
from outlast.job.workerfiles import progress_file
from outlast.training import progress_report


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of a worker, whose process of rank 0 this is."""
    found = {Env.STATE: tmp_path, Env.LEDGER: tmp_path / contract.LEDGER, Env.GENERATION: 3, Env.WORKER: 0}
    for name, value in {**found, "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(progress_report, "_reported", progress_report._Reported())
    return tmp_path


def test_what_a_script_tells_is_in_its_record_and_in_the_ledger(state: Path) -> None:
    progress_report.progress(81, 2000)
    progress_report.progress(100, 2000)
    progress_report.progress(2000, 2000)
    record = progress_file.read(state, 0)
    assert record is not None
    assert (record.phase, record.generation, record.step, record.steps, record.committed) == ("started", 3, 2000, 2000, 0)
    events = [event for event in ledger.read(state / contract.LEDGER) if event["kind"] == "step"]
    assert [(event["step"], event["steps"], event["generation"]) for event in events] == [(81, 1, 3), (2000, 1919, 3)]


def test_other_ranks_write_no_events(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    progress_report.progress(5)
    assert progress_file.read(state, 0).step == 5
    assert not (state / contract.LEDGER).exists()


def test_outside_of_outlast_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(Env.STATE, raising=False)
    progress_report.progress(5, 10)


@pytest.mark.parametrize(("step", "total", "what"), [(1.5, None, "step (1.5)"), (1, "9", "total ('9')")])
def test_what_is_no_whole_number_is_refused(state: Path, step: object, total: object, what: str) -> None:
    with pytest.raises(OutlastError) as refused:
        progress_report.progress(step, total)  # type: ignore[arg-type]
    assert str(refused.value) == f"progress(): {what} must be a whole number; pass int(...)"
