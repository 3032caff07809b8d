"""What is printed can change nothing on the terminal of whoever reads it."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
import typer
import yaml
from rich.text import Text

import fake
from outlast import cli
from outlast.base.errors import OutlastError
from outlast.cli import commands, live_panel, run_view, status_page, tables, terminal
from outlast.job import contract
from outlast.job.failure import Failure
from outlast.job.logs import LogLine
from outlast.job.status import CheckpointStatus, JobStatus, State, WorkerStatus

TITLE = "\x1b]0;owned\x07"
"""Gives the terminal another title."""
EVIL = f"{TITLE}\x1b[2J\x9b1;1Hgone\rover\x7f\u202eabc"
"""The same, and clears the screen, goes to its begin by C1, draws over itself, and turns text round."""
SHOWN = "^[]0;owned^G^[[2J\\x9b1;1Hgone^Mover^?\\u202eabc"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def evil(tmp_path: Path) -> fake.FakeBackend:
    """A job that others have given everything that is text in it."""
    backend = fake.FakeBackend(tmp_path)
    status = JobStatus(
        name="job",
        run=EVIL,
        state=State.FAILED,
        reason=f"{EVIL}\nnext  Succeeded",
        output=str(tmp_path / "job"),
        submitted=time.time(),
        finished=time.time(),
        warnings=[EVIL],
        checkpoint=CheckpointStatus(step=1, path=EVIL, time=1.0),
        failure=Failure(worker=0, code=1, reason=EVIL, log_tail=EVIL, step=3),
        workers=[WorkerStatus(index=0, state=EVIL, pod=EVIL, node=EVIL, reason=EVIL)],
    )
    events = [{"t": 1.0, "kind": "submitted", "source": "cli"}, {"t": 2.0, "kind": "failure", "source": "x", "reason": EVIL}]
    backend.runs["job"] = fake.Run(status, [LogLine(0, EVIL)], events)
    return backend


def printed(capsys: pytest.CaptureFixture[str], backend: fake.FakeBackend | None, *words: str) -> str:
    """What a command writes on both streams, byte for byte."""
    with pytest.raises(SystemExit):
        cli.main(words, backend=backend)
    out, err = capsys.readouterr()
    return str(out + err)


@pytest.mark.parametrize("words", [
    ["list"], ["status"], ["status", "-w"], ["why"], ["report"], ["logs"], ["logs", "--worker", "0"], ["checkpoints", "list"],
    ["status", f"no{EVIL}"], ["logs", "--grep", f"({EVIL}"], ["validate", f"no{EVIL}.yaml"], [f"no{EVIL}"],
    ["list", f"--no{EVIL}"],
], ids=" ".join)  # fmt: skip
def test_no_command_passes_on_what_others_wrote(evil: fake.FakeBackend, words: list[str], capsys, monkeypatch) -> None:
    said = printed(capsys, evil, *words)
    assert said.strip()
    assert not CONTROL.search(said)
    assert "\nnext" not in said, "no line is made up"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not CONTROL.search(re.sub(r"\x1b\[[0-9;]*m", "", printed(capsys, evil, *words)))


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_data_is_as_it_is(evil: fake.FakeBackend, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, evil, "status", "-o", output)
    assert not CONTROL.search(said)
    assert (json.loads if output == "json" else yaml.safe_load)(said)["reason"] == evil.runs["job"].status.reason


def test_every_way_to_print_is_guarded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that knows nothing of terminals prints what is safe: it cannot be forgotten."""

    def naive() -> None:
        print(EVIL)
        print(EVIL, file=sys.stderr)
        sys.stdout.write(EVIL)
        sys.stderr.writelines([EVIL])
        typer.echo(EVIL)
        typer.secho(EVIL, err=True)
        terminal.console().print(Text(EVIL))
        terminal.console(stderr=True).print(EVIL, markup=False)
        with pytest.raises(AttributeError, match="take text"):
            sys.stdout.buffer.write(EVIL.encode())
        raise typer.BadParameter(EVIL)

    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(naive)
    monkeypatch.setattr(commands, "app", app)
    monkeypatch.setattr(commands, "command", commands.command.__wrapped__)  # built anew, of this app
    said = printed(capsys, None)
    assert not CONTROL.search(said)
    assert said.count("owned") == 9


@pytest.mark.parametrize("words", [["list"], ["logs"], ["--help"], ["report", "-o", "json"]], ids=" ".join)
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_under_the_output_is_one_sentence(evil, words: list[str], buffered: bool, monkeypatch, capsys) -> None:
    with (
        open("/dev/full", "wb", buffering=-1 if buffered else 0) as full,
        io.TextIOWrapper(full, write_through=not buffered) as out,  # which is closed without an error
    ):
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as ended:
            cli.main(words, backend=evil)
    said = "Error: cannot write a file or the output: No space left on device; make room there\n"
    assert (ended.value.code, capsys.readouterr().err) == (1, said)


def test_an_output_that_is_closed_or_lacks_characters_ends_no_command(evil: fake.FakeBackend, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert printed(capsys, evil, "logs") == ""
    sys.stdout.close()
    evil.runs["job"].status.reason = "from 1 \u2192 2"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), encoding="ascii", write_through=True))
    assert printed(capsys, evil, "status") == ""
    assert b"from 1 \\u2192 2" in written.getvalue()


def test_nothing_prints_beside_the_guard() -> None:
    """What would: the descriptors, the streams of before, a console of rich's own. Only the guard has to."""
    source = Path(cli.__file__).parent
    beside = re.compile(r"__std(out|err)__|std(out|err)\.buffer|os\.write|\bConsole\(|_raw\(")
    assert {path.name for path in source.glob("*.py") if beside.search(path.read_text())} == {"terminal.py"}


def test_a_workers_colours_are_kept_within_their_line() -> None:
    assert terminal.logged("\x1b[31mred\x1b[0m") == "\x1b[31mred\x1b[0m"
    assert terminal.logged("\x1b[38;2;1;2;3mred") == "\x1b[38;2;1;2;3mred\x1b[0m"
    assert terminal.logged(f"\x1b[1mbold{TITLE}\x1b[2K") == "\x1b[1mbold^[]0;owned^G^[[2K\x1b[0m"
    assert terminal.logged("\x1b[31mred", colour=False) == "red"
    assert terminal.logged("\x1b]8;;http://evil\x1b\\link") == "^[]8;;http://evil^[\\link"


def test_a_line_that_draws_over_itself_is_its_last_drawing_on_a_terminal_and_all_of_them_elsewhere() -> None:
    assert [*terminal.drawn("1 %\r2 %\r", terminal=True)] == ["2 %"]
    assert [*terminal.drawn("1 %\r2 %\r", terminal=False)] == ["1 %", "2 %"]
    assert [*terminal.drawn("", terminal=False)] == [""]
    bars = "\r  0%|   | 0/60 [?]\r  5%|#  | 3/60 [?]\r        \r{'loss': 1}\r 17%|#  | 10/60 [?]\r 18%|# | 11/60 [?]Warning"
    assert terminal.drawn(bars, terminal=False) == ["{'loss': 1}", " 18%|# | 11/60 [?]Warning"]
    two = terminal.drawn("0%|| 0/9 []late\rA:  0%|| 0/9 []\rA: 99%|| 9/9 []\x1b[A", terminal=False)
    assert two == ["0%|| 0/9 []late", "A: 99%|| 9/9 []"]


def test_the_panel_on_a_terminal_shows_what_is_safe(evil: fake.FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", written := io.StringIO())
    monkeypatch.setattr(written, "isatty", lambda: True)
    terminal.guard()
    with live_panel.Terminal() as shown:
        shown.lines([LogLine(0, f"{EVIL}\x1b[31mred")])
        shown.say(EVIL)
        shown.update(evil.runs["job"].status)
    monkeypatch.undo()
    said = written.getvalue()
    assert [evil for evil in ("\x1b]", "\x1b[2J", "\x9b", "\u202e") if evil in said] == []
    assert [safe for safe in ("outlast | ", "^[]0;owned") if safe not in said] == []


@pytest.mark.parametrize(("environment", "tty", "coloured"), [
    ("", True, True), ("", False, False), ("NO_COLOR=1", True, False), ("NO_COLOR=", True, True), ("FORCE_COLOR=1", False, True),
    ("FORCE_COLOR=1 NO_COLOR=1", True, False), ("TERM=dumb", True, False),
])  # fmt: skip
def test_colours_are_where_they_are_wanted(environment: str, tty: bool, coloured: bool, evil, capsys, monkeypatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for variable in ("TERM=xterm", *environment.split()):
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    evil.runs["job"].lines[:] = [LogLine(1, "hello")]
    assert (printed(capsys, evil, "logs") == "\x1b[33mworker-1 | \x1b[0mhello\n") is coloured


def test_a_cell_and_a_field_stay_on_their_line() -> None:
    assert tables.table(("NAME", "REASON"), [("a\nb  Running", EVIL)]).splitlines()[1:] == [f"a\\nb  Running  {SHOWN}"]
    assert tables.fields({"reason": "a\nexit code  0"}) == "reason  a\\nexit code  0"


def test_nothing_is_redrawn_and_nobody_asked_in_a_cell_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
        monkeypatch.delenv("JPY_PARENT_PID", raising=False)
        assert terminal.interactive(stream)
        monkeypatch.setenv("JPY_PARENT_PID", "1")
        assert not terminal.interactive(stream)
    with pytest.raises(OutlastError, match=r"^the job is deleted; add --yes to confirm$"):
        terminal.confirm("the job is deleted")


def test_what_only_echoes_another_ranks_end_is_one_line_below_the_cause() -> None:
    before, cause, after = (LogLine(0, text) for text in ("step 3", "outlast | attempt 1: rank 0 was killed", "step 0"))
    head, *body = (LogLine(1, f"[rank 2] {contract.ECHO}{text}") for text in ("a collective broke", "", "RuntimeError: closed"))
    folded = terminal.Folded()
    assert [*folded.take([before, head, body[0], LogLine(1, "step 3"), body[1], cause, after])] == [
        *(before, LogLine(1, "step 3"), cause, head, after)
    ]
    assert [*folded.take([head, *body, after])] == [after]
    assert (folded.rest(), folded.rest()) == ([head], [])
    again = [LogLine(worker, contract.start_line(2, 0, "lost worker 2")) for worker in (0, 1)]
    assert [*folded.take([LogLine(0, ""), *again])] == [LogLine(0, ""), again[0]], (
        "of all workers that start again, the first says so"
    )


def test_a_goodput_without_reported_steps_is_an_upper_bound_and_steps_of_an_epoch_have_no_total() -> None:
    known = {"step": 20, "epoch": 3, "epoch_steps": 32, "rate": 2.0, "goodput": 0.844}
    status = JobStatus(name="job", run="r", state=State.RUNNING, told="log", **known)
    assert (status_page.goodput(status), status_page.steps(status), status.eta_s) == ("at most 84.4 %", "epoch 3, 20/32", None)
    unnamed = status.model_copy(update={"epoch": -1})
    assert status_page.steps(unnamed) == "in an epoch, 20/32"
    exact = status.model_copy(update={"told": "script", "epoch": None, "steps": 100})
    assert (status_page.goodput(exact), status_page.steps(exact), exact.eta_s) == ("84.4 %", "20/100", 40.0)
    ended = [*run_view.summary(status.model_copy(update={"state": State.SUCCEEDED, "warnings": ["it began again"]}), 60.0)]
    assert ended[0].startswith("epoch 3, 20/32 in 1m00s, ")
    assert ended[-1] == "warning: it began again"
