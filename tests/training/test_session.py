"""Worlds of one to three processes, killed, told to leave, resized, left without disk: what they compute stays the same."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import worlds
from outlast.base.errors import OutlastError
from outlast.job import contract, ledger
from outlast.job.report import goodput
from outlast.job.workerfiles import notice_file, progress_file
from outlast.local import state_dir
from outlast.storage import checkpoints
from outlast.training import Batch, Stream, collective_calls, ddp, metrics, session
from outlast.training.state import checkpoint_file
from ranks import resumed, same
from worlds import LAST, Calm, Training, damage, hashes, world


def records(output: Path) -> list[dict[str, Any]]:
    """What every rank of every generation wrote about its steps."""
    return [json.loads(line) for path in sorted(output.glob("consumed-*")) for line in path.read_text().splitlines()]


# The same bits


@pytest.mark.parametrize(
    ("ranks", "net", "optimizer", "microbatch"),
    [
        (2, "conv", "adamw", None),
        pytest.param(2, "mlp", "sgd", 5, marks=pytest.mark.slow),
        (3, "plain", "adamw", 4),
    ],
)
def test_a_killed_and_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, calm: Calm, ranks: int, net: str, optimizer: str, microbatch: int | None
):
    plan = Training(net, optimizer, microbatch=microbatch)
    before = calm(plan, ranks)
    killed = world(Training(net, optimizer, microbatch=microbatch, kill_at=13, hasty=True), tmp_path, ranks)
    assert killed.codes == [-9] * ranks
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "lo')  # the last line of a killed process
    again = world(plan, tmp_path, ranks, generation=2)
    [resumed] = {result["resumed"] for result in again.results}
    assert resumed in (5, 10, 11, 12), "a save that is due while another is under way comes after it"
    assert hashes(again) == hashes(before)
    assert len(hashes(again)) == (ranks if net == "conv" else 1)  # only batch norm's averages differ between ranks
    assert again.results[0]["losses"] == before.results[0]["losses"][resumed:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, LAST + 1)), "each step once, however often it ran"
    assert [line["loss"] for line in lines][resumed:] == again.results[0]["losses"]
    assert state_dir.newest_metrics(tmp_path) == {"step": LAST, "loss": again.results[0]["losses"][-1]}
    assert state_dir.newest_metrics(tmp_path / "nowhere") == {}
    assert {line["generation"] for line in lines} == {1, 2}


def test_a_planned_leave_saves_the_very_step_and_exits_with_75(tmp_path: Path, calm: Calm):
    left = world(Training(leave_at=7), tmp_path, 2)
    assert left.codes == [contract.Exit.INTERRUPTED] * 2
    assert [c.step for c in left.checkpoints] == [5, 7]
    assert left.kinds("interrupted") == [{"kind": "interrupted", "generation": 1, "step": 7, "reason": "saved step 7"}]
    worlds.again(left)
    again = world(Training(), tmp_path, 2, generation=2)
    assert [result["resumed"] for result in again.results] == [7, 7]
    assert hashes(again) == hashes(calm(Training(), 2))


def test_ranks_draw_different_numbers_but_make_the_same_model(tmp_path: Path):
    one, other = worlds.ran(draws, tmp_path, 2).results
    assert one["model"] == other["model"]
    assert not set(one["drawn"]) & set(other["drawn"])


def draws() -> None:
    import random

    import numpy as np

    with session.open(seed=5) as run:
        model = nn.Linear(2, 2)
        run.resume({"model": model})
        drawn = [random.random(), np.random.random(), torch.rand(()).item()]
        result = {"model": model.weight.tolist(), "drawn": drawn}
        (run.output / f"rank-{run.rank}.json").write_text(json.dumps(result))


# Worlds of other sizes


def test_another_batch_in_every_world_consumes_every_sample_once_an_epoch(tmp_path: Path):
    plan = functools.partial(Training, schedule=False, epochs=2)
    for generation, (ranks, batch, leave_at) in enumerate([(1, 32, 3), (3, 20, 9), (2, 64, 0)], start=1):
        end = world(plan(batch=batch, leave_at=leave_at), tmp_path, ranks, generation=generation)
        assert set(end.codes) == {75 if leave_at else 0}, end.errors
        worlds.again(end)
    consumed = [(record["epoch"], index) for record in records(tmp_path) for index in record["indices"]]
    assert Counter(consumed) == Counter((epoch, index) for epoch in range(2) for index in range(150))
    # 96 samples in 3 steps of 32, 54 + 60 in 6 of 20 or fewer, then 90 in 2 of 64 or fewer
    assert end.results[0]["step"] == 11
    assert "outlast: batch is 64 from step 9 on, it was 20; the run has 11 steps instead of 14" in end.errors[0]
    shown = progress_file.read(tmp_path / "workers" / "0", 0)
    assert (shown.step, shown.steps) == (11, 11)


def test_sharded_models_resume_in_worlds_of_other_sizes(tmp_path: Path, calm: Calm):
    """FSDP2: a checkpoint of two ranks is put back into two and into one."""
    plan = Training("plain", "adamw", sharded=True, epochs=2)
    left = world(dataclasses.replace(plan, leave_at=3), tmp_path / "left", 2)
    assert left.codes == [75, 75], left.errors
    worlds.again(left)
    for ranks in (2, 1):
        again = world(plan, shutil.copytree(left.output, tmp_path / str(ranks)), ranks, generation=2)
        assert resumed(again) == 3
        assert again.results[0]["losses"] == pytest.approx(calm(plan, 2).results[0]["losses"][3:], rel=1e-4)
        assert ranks == 1 or same(again, calm(plan, 2))


# Damage


def test_damaged_checkpoints_are_reported_skipped_and_kept(tmp_path: Path, calm: Calm):
    killed = world(
        Training(kill_at=18), tmp_path, 2, **{contract.Env.CHECKPOINT_KEEP: "9", contract.Env.CHECKPOINT_EVERY: "3 steps"}
    )
    steps = [c.step for c in killed.checkpoints]
    assert len(steps) >= 3
    damage(killed.checkpoints[-1].path)
    (killed.checkpoints[-2].path / "COMMIT").write_text("{")
    again = world(Training(), tmp_path, 2, generation=2, **{contract.Env.CHECKPOINT_EVERY: "3 steps"})
    assert hashes(again) == hashes(calm(Training(), 2))
    assert again.results[0]["resumed"] == 12
    reasons = [(Path(e["path"]).name, e["reason"]) for e in again.kinds("damaged")]
    assert [name for name, _ in reasons] == ["step-00000018", "step-00000015"]
    assert "has crc32" in reasons[0][1]
    assert reasons[1][1].startswith("COMMIT cannot be read")
    assert again.errors[0].count("is damaged and skipped") == 2
    assert again.errors[1] == ""
    assert len(list(tmp_path.glob("checkpoints/*.replaced-0"))) == 2  # moved aside when their steps were saved again


# No room


def test_a_full_disk_ends_no_training_and_is_reported(tmp_path: Path, calm: Calm):
    plan = Training(limit_at=9, unlimited_at=14, limited=1)  # rank 0's is full in the test after this
    end = world(plan, tmp_path, 2, **{contract.Env.CHECKPOINT_KEEP: "9"})
    assert hashes(end) == hashes(calm(Training(), 2))
    assert [c.step for c in end.checkpoints] == [5, 15, 20]
    assert end.kinds("save_failed") == [{"kind": "save_failed", "step": 10, "reason": "rank 1: File too large"}]
    assert end.errors[0].strip() == (
        "outlast: step 10 could not be saved: rank 1: File too large; the newest checkpoint is that of step 5"
    )
    assert end.errors[1] == ""
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {".lock", "FENCE", *(f"step-{step:08d}" for step in (5, 15, 20))}


def test_a_save_that_fails_while_leaving_says_what_is_lost(tmp_path: Path):
    end = world(Training(limit_at=6, leave_at=8), tmp_path, 2)
    assert end.codes == [75, 75]
    sentence = "step 8 could not be saved; the run goes on from step 5, 3 steps are lost"
    assert end.kinds("interrupted") == [{"kind": "interrupted", "generation": 1, "step": 8, "reason": sentence}]
    assert f"outlast: leaving: {sentence}" in end.errors[0]
    warned = progress_file.read(tmp_path / "workers" / "1", 0)
    assert (warned.phase, warned.step, warned.committed) == ("save", 8, 5)
    assert warned.warning == "step 8 could not be saved: rank 0: File too large"


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(contract.Env.OUTPUT, str(tmp_path / "file" / "out"))
    with pytest.raises(
        OutlastError, match=r"output .*/file/out cannot be written: Not a directory; make room or name another directory"
    ):
        session.open().__enter__()
    assert not dist.is_initialized()


# Zombies


def test_a_generation_that_was_replaced_commits_nothing_and_stops(tmp_path: Path):
    processes = worlds.started(functools.partial(worlds.train, Training(epochs=100, pause_s=0.01)), tmp_path, 2)
    while not checkpoints.list_(tmp_path / "checkpoints"):
        time.sleep(0.01)
        assert all(process.is_alive() for process in processes)
    checkpoints.acquire(tmp_path / "checkpoints", "r", 2)
    committed = checkpoints.list_(tmp_path / "checkpoints")
    end = worlds.ended(processes, tmp_path)
    assert end.codes == [1, 1]
    assert "Superseded: generation 1 may not commit step" in end.errors[0]
    assert "generation 2 of run r owns" in end.errors[1]
    assert end.checkpoints == committed


# What others see


def test_a_rank_that_raises_ends_with_its_own_error(tmp_path: Path):
    processes = worlds.started(functools.partial(worlds.train, Training(raise_at=6, hasty=True)), tmp_path, 2)
    processes[1].join(60)
    processes[0].kill()  # as its agent does; it may wait for rank 1 as long as the process group's timeout
    end = worlds.ended(processes, tmp_path)
    assert end.codes[1] == 1
    assert "ValueError: a bug of the user's" in end.errors[1]
    assert [c.step for c in end.checkpoints] == [5]  # the save that was in flight


def test_the_ledger_tells_the_story_of_a_run(calm: Calm):
    end = calm(Training(), 2)
    story = [(e["kind"], e.get("step"), e["source"]) for e in end.events if e["kind"] not in ("step", "staged")]
    assert story[:5] == [
        *sorted([("session", None, "rank-0"), ("session", None, "rank-1")], key=lambda entry: story.index(entry)),
        ("restoring", None, "rank-0"),
        ("restored", 0, "rank-0"),
        ("saving", 5, "rank-0"),
    ]
    for each in ("saving", "committed"):
        assert [step for kind, step, _ in story if kind == each] == [5, 10, 15, 20]
    assert end.steps == list(range(1, LAST + 1))
    assert all(e["stall_s"] < 5 for e in end.kinds("staged"))
    last = end.kinds("committed")[-1]
    assert last["bytes"] == end.checkpoints[-1].bytes > 10_000


def test_progress_tells_phase_steps_and_the_committed_step(calm: Calm):
    output = calm(Training(), 2).output
    for rank in range(2):
        record = progress_file.read(output / "workers" / str(rank), 0)
        assert (record.generation, record.rank, record.phase, record.step, record.steps) == (1, rank, "done", LAST, LAST)
        assert (record.committed, record.warning) == (LAST, "")
        assert (record.stepped, record.stalls, record.saves) == (LAST - 1, 4, 4 if rank == 0 else 0)
        assert 0 < record.stalled_s < record.stepped_s + record.stalled_s < 60


def test_logged_values_are_printed_now_and_then_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    screen = metrics.Screen(quiet=False)
    for step, values in [(1, {"loss": 2.30258}), (2, {"loss": 2.0}), (3, {}), (4, {"accuracy": 0.5}), (5, {"loss": 1e-9})]:
        now[0] += metrics.Screen.EVERY_S / 4
        screen.show(step, values, lambda: 5)
    screen.show(6, {"loss": math.nan}, lambda: None)
    screen.flush()
    screen.flush()
    metrics.Screen(quiet=True).show(1, {"loss": 1.0}, lambda: 5)
    assert capsys.readouterr().err == (
        "outlast: step 1 of 5: loss 2.303\noutlast: step 5 of 5: loss 1e-09, accuracy 0.5\noutlast: step 6: loss nan\n"
    )


# A world of one, in this process


def test_a_plain_python_script_is_a_world_of_one_and_resumes(plain: Path):
    for generation in (1, 2, 3):
        with session.open() as run:
            assert (run.rank, run.world_size, run.generation, run.data) == (0, 1, generation, None)
            net = run.ddp(nn.Linear(2, 2))
            step = run.resume({"net": net})
            assert step == generation - 1
            assert run.gather("me") == ["me"]
            assert run.log(step + 1, loss=torch.tensor(0.5), reduce=True) == {"loss": 0.5}
            assert not run.interrupted()
            assert not run.due(step + 1)  # every 5 minutes
            run.save(step + 1)
    assert [c.step for c in checkpoints.list_(plain / "out" / "checkpoints")] == [1, 2, 3]
    assert not dist.is_initialized()


def test_what_is_logged_before_the_first_step_is_no_step(plain: Path):
    with session.open() as run:
        stream = Stream(torch.zeros(3, 1), batch=1)
        step = run.resume({"stream": stream})
        run.log(step, val_loss=1.0)
        for _ in stream:
            step += 1
            run.log(step)
    account = goodput.buckets(ledger.read(plain / "out" / "ledger"), None)
    assert (account.steps_kept, account.steps_replayed) == (3, 0)


def test_what_was_logged_before_the_first_checkpoint_is_logged_once(plain: Path):
    for generation in (1, 2):
        with contextlib.suppress(ZeroDivisionError), session.open() as run:
            run.resume({"model": nn.Linear(1, 1)})
            run.log(0, val_loss=1.0)
            if generation == 1:
                raise ZeroDivisionError
        if generation == 1:
            dist.destroy_process_group()  # as the end of the process does
    lines = [json.loads(line) for line in (plain / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["generation"]) for line in lines] == [(0, 2)]


def test_short_steps_share_a_vote_and_a_checkpoint_by_steps_does_not_wait_for_it(plain: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collective_calls.Pace, "interval", lambda *_: 4)
    monkeypatch.setenv(contract.Env.CHECKPOINT_EVERY, "6 steps")
    monkeypatch.setenv(contract.Env.NOTICE, str(plain / "notice"))
    voted = list[int]()

    def train() -> None:
        with session.open() as run:
            run.resume({"net": nn.Linear(2, 2)})
            for step in range(1, 30):
                monkeypatch.setattr(run._saves, "late", lambda _, step=step: bool(voted.append(step)))
                if step == 7:
                    notice_file.write(plain / "notice", "scale", "asked", time.time() + 60)
                run.boundary(step)
                run._saver.wait(10)

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == contract.Exit.INTERRUPTED
    assert voted == [1, 5, 6, 10]
    assert [c.step for c in checkpoints.list_(plain / "out" / "checkpoints")] == [6, 10]


@pytest.mark.parametrize(
    ("vote_s", "step_s", "steps"),
    [(0.002, 0.013, 16), (0.002, 0.2, 1), (0.002, 0.1, 2), (0.0001, 0.02, 1), (0.003, 0.0, 1), (9.0, 0.013, 19), (9.0, 9.0, 1)],
)
def test_votes_take_a_hundredth_of_the_steps_and_come_four_times_a_second(vote_s: float, step_s: float, steps: int):
    assert collective_calls.interval(vote_s, step_s) == steps


def test_saving_the_same_step_twice_saves_it_once(plain: Path):
    with session.open() as run:
        run.resume({"net": nn.Linear(2, 2)})
        for _ in range(3):
            run.save(1)
    assert [c.step for c in checkpoints.list_(plain / "out" / "checkpoints")] == [1]


def test_a_save_rests_only_until_the_next_one_is_due(plain: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(contract.Env.CHECKPOINT_EVERY, "2 steps")
    monkeypatch.setattr(checkpoint_file, "_PAUSE", 1e6)  # some minutes
    with session.open() as run:
        run.resume({"net": nn.Linear(1200, 1200)})
        run.save(1)
        assert not run.due(1)
        assert run._saver.busy
        assert not run.due(2)
        run._saver._thread.join(60)
        assert not run._saver.busy
        assert run.due(3)


@pytest.mark.parametrize(
    ("save_s", "set_s", "saved"), [(None, 0.0, [1, 2]), (100.0, 0.0, [1]), (4.0, 120.0, [1, 2]), (100.0, -120.0, [1])]
)
def test_a_save_that_does_not_fit_into_the_time_left_is_skipped_and_a_clock_that_is_set_changes_nothing(
    plain: Path, monkeypatch: pytest.MonkeyPatch, save_s: float | None, set_s: float, saved: list[int]
):
    path, wall = plain / contract.NOTICE, time.time
    monkeypatch.setenv(contract.Env.NOTICE, str(path))

    def leaves() -> None:
        with session.open() as run:
            run.resume({"net": nn.Linear(2, 2)})
            assert (run.interrupted(), run.seconds_left) == (False, math.inf)
            run.save(1)
            run._saves.settle(run._saver.wait())
            notice_file.write(path, "leave", "spot", time.time() + 75.0)
            monkeypatch.setattr(time, "time", lambda: wall() + set_s)
            assert run.interrupted()
            assert 60.0 < run.seconds_left <= 75.0
            run._saver.least_s = save_s
            run.save(2)

    with pytest.raises(SystemExit, match="75"):
        leaves()
    assert [c.step for c in checkpoints.list_(plain / "out" / "checkpoints")] == saved
    [said] = [each["reason"] for each in ledger.read(plain / "out" / "ledger") if each["kind"] == "interrupted"]
    late = r"step 2 is not saved: a save takes about 100 s, and \d+ s are left; the run goes on from step 1, 1 steps are lost"
    assert re.fullmatch(late if saved == [1] else "saved step 2", said)


def test_what_steps_wait_for_data_is_in_the_ledger(plain: Path):
    class Late(list[int]):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.02 if index >= 4 else 0.0)
            return super().__getitem__(index)

    with session.open(quiet=True) as run:
        stream = Stream(Late(range(8)), 2, shuffle=False)
        step = run.resume({"stream": stream})
        for _ in stream:
            step += 1
            run.log(step)
    told = [event.get("waited_s", 0.0) for event in ledger.read(plain / "out" / "ledger") if event["kind"] == "step"]
    assert sum(told) == pytest.approx(stream.waited_s, abs=1e-5)
    assert sum(told) >= 0.08


def test_steps_are_told_although_nothing_is_logged(plain: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(contract.Env.STATE, str(plain))
    with session.open() as run:
        step = run.resume({"net": nn.Linear(2, 2)})
        for told in (1, 2):
            run.due(step + told)
            assert progress_file.read(plain, 0).step == told
        run.save(3)
    assert progress_file.read(plain, 0).step == 3


def test_saves_are_due_by_the_clock_but_never_while_one_is_in_flight(plain: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(contract.Env.CHECKPOINT_EVERY, "0.001s")
    with session.open() as run:
        run.resume({"net": nn.Linear(500, 500)})
        deferred = 0
        for step in range(1, 200):
            busy = run._saver.busy
            if run.due(step):
                assert not busy
                run.save(step)
            else:
                deferred += busy
            time.sleep(0.001)
    assert deferred > 0
    assert len(checkpoints.list_(plain / "out" / "checkpoints")) == 3


def test_saves_by_steps_come_at_the_next_step_when_one_was_in_flight(plain: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(contract.Env.CHECKPOINT_EVERY, "4 steps")
    with session.open() as run:
        run.resume({"net": nn.Linear(2, 2)})
        due = []
        for step in range(1, 15):
            if run.due(step):
                due.append(step)
                if step != 4:  # it was in flight
                    run.save(step)
                    run._saver.wait()
    assert due == [4, 5, 8, 12]


# The last step

X = torch.arange(96.0).reshape(48, 2) / 96


def trained(way: str) -> list[int]:
    """Train for six steps in some way, and say which checkpoints there are then."""
    with session.open() as run:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        stream = Stream((X,), 8)
        state = {"net": net, "optimizer": optimizer, **({} if way in ("no stream", "not given") else {"stream": stream})}
        step = run.resume(state) if way != "no resume" else 0
        for batch in {"no stream": range(6), "nothing": []}.get(way, stream):
            if isinstance(batch, Batch):
                for (x,), share in batch.split(net):
                    (net(x).square().mean() * share).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if way in ("log", "save", "not given") or (way == "first logs" and run.rank == 0):
                run.log(step, loss=0.5)
            elif way == "no resume":
                run.interrupted()
            elif way not in ("unnamed", "first logs") and (run.interrupted() or run.due(step)):
                run.save(step)
            if way in ("break", "one raises") and step == 4:
                break
        if way == "one raises" and run.rank == run.world_size - 1:
            raise ZeroDivisionError
        if way == "save":
            run.save(step)
    return [c.step for c in checkpoints.list_(run.output / contract.CHECKPOINTS)]


@pytest.mark.parametrize(
    ("way", "saved"),
    [(way, 6) for way in ("due", "log", "no stream", "save")]
    + [("break", 4)]
    + [(way, 0) for way in ("not given", "no resume", "nothing", "unnamed")],
)
def test_the_last_step_is_saved_once_although_no_save_was_due(
    plain: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, way: str, saved: int
):
    assert trained(way) == ([saved] if saved else [])
    told = f"outlast: the last step, {saved}, is saved in out/checkpoints/step-0000000{saved}\n"
    assert capsys.readouterr().err.count(told) == (saved > 0)
    unsaved = {"unnamed": "call run.due(step) after each step, or run.save(step)", "not given": "add the Stream to what resume()"}
    assert caplog.text.count("after step 0 is not saved; " + unsaved.get(way, "")) == (way in unsaved)
    events = [event["kind"] for event in ledger.read(plain / "out" / contract.LEDGER)]
    assert events.count("committed") == (saved > 0)


def test_a_session_that_an_exception_leaves_saves_nothing_and_one_without_new_steps_neither(
    plain: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(ZeroDivisionError):
        trained("one raises")
    assert not checkpoints.list_(plain / "out" / contract.CHECKPOINTS)
    dist.destroy_process_group()  # as the end of the process does
    assert trained("due") == trained("due") == [6]
    assert capsys.readouterr().err.endswith(
        "outlast: goes on from step 6 of 6 (out/checkpoints/step-00000006); without out/checkpoints it begins anew\n"
    )


@pytest.mark.parametrize(("way", "saved"), [("first logs", [6]), ("one raises", [])])
def test_all_ranks_save_the_last_step_or_none_does(tmp_path: Path, way: str, saved: list[int]):
    raises, seldom = way == "one raises", {contract.Env.CHECKPOINT_EVERY: "300s"}
    end = worlds.ran(functools.partial(trained, way), tmp_path, 2, code=int(raises), **seldom)
    assert ("ZeroDivisionError" in end.errors[1]) == raises
    assert [c.step for c in end.checkpoints] == saved


def test_ddp_leaves_the_model_as_it_was(plain: Path):
    with session.open() as run:
        model = worlds.network("conv")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        net = run.ddp(model)
        assert "forward" not in vars(model)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
        net.device_ids = [0]  # as on a GPU, to which DDP moves the arguments of a call
        ddp.settle(net)
        net(torch.zeros(2, 3, 8, 8)).sum().backward()
        with pytest.raises(OutlastError, match="static_graph"):
            run.ddp(model, static_graph=True)


def test_the_diff_in_the_readme_makes_a_script_that_leaves_a_checkpoint_and_a_model(plain: Path):
    readme = Path(__file__).parents[2] / "README.md"
    *_, diff = re.findall(r"```diff\n(.*?)```", readme.read_text(), re.DOTALL)
    loop = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    model = nn.Linear(3, 2)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": (torch.randn(200, 3), torch.zeros(200, dtype=torch.int64)),
        "F": nn.functional,
    }
    exec(loop, names)
    assert [c.step for c in checkpoints.list_(plain / "out" / "checkpoints")] == [20]
    assert torch.load(plain / "out" / "model.pt", weights_only=True)["weight"].equal(model.weight)


def test_the_script_in_the_guides_trains_and_resumes(plain: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(contract.Env.CHECKPOINT_EVERY, "10 steps")
    guide = Path(__file__).parents[2] / "docs" / "guide"
    pages = (guide / "exact-resume.md").read_text() + (guide / "checkpoints.md").read_text()
    train, best, read = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    compile(best, "checkpoints.md", "exec")
    for generation in (1, 2):
        names: dict[str, Any] = {}
        exec(train + read, names)
        assert names["run"].generation == generation
        assert names["step"] == names["stream"].total_steps == 48
        assert names["newest"].step == 48
        names["model"].load_state_dict(torch.load(plain / "out" / "model.pt", weights_only=True))


def test_metrics_are_cut_after_the_restored_step(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics.truncate_after(path, 3)  # there is none
    for step in range(1, 6):
        metrics.append(path, {"step": step})
    metrics.truncate_after(path, 3)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    metrics.truncate_after(path, 0)
    metrics.truncate_after(path, 0)
    assert path.read_text() == ""
