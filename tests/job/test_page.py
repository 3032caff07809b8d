"""The page of a run: whatever a job is called and logs stays text, and long runs make small pages in little time and memory."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import browsers
from accounts import Story, training
from browsers import HOSTILE, Read
from outlast.job import contract, ledger, spec
from outlast.job.logs import LogLine
from outlast.job.report import comparison, goodput, history, page, series
from outlast.job.report.goodput import Segment
from outlast.job.report.steps import Bucket
from outlast.job.status import JobStatus
from outlast.local.backend import LocalBackend

TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "p", "noscript", "dl", "div", "dt", "dd", "section", "h2", "ul"),
    *("li", "i", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "pre", "footer", "script"),
}
MOST_S = 30
"""Seconds of a processor that the page of a month may take on a slow machine; here it takes a third of that."""


def undisturbed() -> Story:
    return training().steps(60, 0.5, 0.02).save(0.1, 0.4).steps(60, 0.5).save(0.1, 0.3).finished(0.5)


def ten_kills() -> Story:
    story = training()
    for kill in range(10):
        story.steps(40, 0.25).save(0.05, 0.2).steps(5, 0.25).failure(0.3, worker=kill % 2)
        story.events[-2] |= {"traceback": f"ValueError: kill {kill}", "log_tail": "the last line"}
        story.world(0.2, (0, 1)).session(1).restored(story.step - 5, 0.3)
    return story.steps(40, 0.25).finished()


def failed() -> Story:
    return training().steps(7).failure(0.5, reason=HOSTILE).finished(1, "Failed")


def many_workers() -> Story:
    story = training()
    story.steps(10).failure(worker=40).world(0.5, tuple(n for n in range(64) if n != 40)).session(1).restored(10)
    return story.steps(20).say("worker", worker=40).world(1, tuple(range(64))).session(1).restored(30).steps(30).finished()


def thirty_days() -> Iterator[dict[str, Any]]:
    """A step every 10 seconds, a checkpoint every 10 minutes, a failure every day."""
    for day in range(30):
        story = training() if not day else Story()
        story.at, story.generation, story.step = max(story.at, day * 86_400), day + 1, day * 8600
        if day:
            story.world(1).session(2).restored(story.step)
        for _ in range(142):
            story.steps(60, 10, 0.01).save(0.2, 5)
        yield from (story.finished() if day == 29 else story.failure(0.5)).events


RUNS: dict[str, Callable[[], Story]] = {
    "undisturbed": undisturbed,
    "ten kills": ten_kills,
    "failed": failed,
    "64 workers": many_workers,
    "empty": Story,
}


def metrics(events: list[dict[str, Any]], *names: str) -> Iterator[str]:
    for event in events:
        if event["kind"] == "step":
            yield json.dumps({"step": event["step"], "time": event["t"], **dict.fromkeys(("loss", *names), 1 / event["step"])})


def a_page(story: Story, *names: str, **fields: Any) -> str:
    given = {"name": "digits", "metrics": lambda: metrics(story.events, *names), "job_file": lambda: "kind: ElasticJob\n"}
    return page.run(page.Run(run="r1", events=story.events, active=False, **{**given, "log": lambda worker: (), **fields}))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ("ten kills", "empty") else pytest.mark.slow) for n in RUNS])
def test_a_run_becomes_one_page_whose_policy_allows_only_its_own_two_scripts(name: str) -> None:
    story = RUNS[name]()
    text = a_page(story, "accuracy")
    assert len(text) < 1 << 20
    assert text.isascii()
    read = Read(text)
    plots = {attributes["id"] for tag, attributes in read.tags if attributes.get("class") == "plot"}
    packed = json.loads(gzip.decompress(base64.b64decode(read.scripts[1])))
    assert plots == set(packed["items"][0]["roots"].values())
    assert {"timeline", "goodput"} <= plots
    assert ({"metric-0", "metric-1", "steps"} <= plots) == bool(story.step)
    assert ("lost" in plots) == (name in ("ten kills", "64 workers"))
    assert "goodput" in read.text
    assert ("ValueError: kill 9\n\nthe last line" in read.text) == (name == "ten kills")
    (policy,) = (a["content"] for tag, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    library, _, script = read.scripts
    texts = [script.encode(), gzip.decompress(base64.b64decode(library))]
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts]
    assert str(policy).split("; ")[:2] == ["default-src 'none'", f"script-src {' '.join(digests)}"]
    assert not [value for _, attributes in read.tags for name, value in attributes.items() if name in ("src", "href")]


def test_texts_of_a_job_never_become_markup() -> None:
    story = training().steps(3).failure(reason=HOSTILE)
    story.events[-2] |= {"traceback": HOSTILE}
    story.say("damaged", path=HOSTILE, reason=HOSTILE).world(1).session().restored(0).steps(3).finished(1, HOSTILE)
    session = next(event for event in story.events if event["kind"] == "session")
    session |= {"versions": {HOSTILE: HOSTILE}}
    read = Read(
        a_page(
            story,
            HOSTILE,
            name=HOSTILE,
            job_file=lambda: HOSTILE,
            log=lambda worker: [LogLine(worker, HOSTILE)],
            status=JobStatus(name=HOSTILE, run=HOSTILE, output=HOSTILE),
        )
    )
    assert {tag for tag, _ in read.tags} <= TAGS
    assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on")]
    assert read.text.count(HOSTILE.replace("\ud800", "\ufffd")) >= 12
    assert "49" not in read.text.replace("49 ", "")
    rows = comparison.compared([comparison.run(HOSTILE, story.account(), story.events, ())] * 2)
    assert {tag for tag, _ in Read(page.comparison(rows, [(), ()])).tags} <= TAGS


def test_a_damaged_ledger_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = [json.dumps(event) for event in undisturbed().events]
    lines[3:3] = ["[" * 100_000, '{"t": 1, "kind": "world", "generation": "x"}', "\x00\xff", '{"t": NaN, "kind": "step"}', "7"]
    lines.append(lines[-1][:20])
    (tmp_path / "launcher.jsonl").write_text("\n".join(lines), errors="replace")
    logged = ['{"step": 1, "loss": 2}', '{"step": 2, "lo', "[]", '{"step": "x"}']
    read = Read(page.run(page.Run("digits", "r1", ledger.read(tmp_path), False, lambda: logged, str, lambda worker: ())))
    assert "6 lines of the ledger, 3 lines of metrics.jsonl" in read.text
    assert "120 kept" in read.text


def test_the_page_of_several_runs_compares_them() -> None:
    stories = [undisturbed() for _ in range(3)]
    for workers, story in enumerate(stories, 1):
        next(event for event in story.events if event["kind"] == "world")["workers"] = list(range(workers))
    runs = [comparison.run(f"w{n}", story.account(), story.events, ()) for n, story in enumerate(stories, 1)]
    read = Read(page.comparison(comparison.compared(runs), [list(metrics(story.events)) for story in stories]))
    assert [a["id"] for _, a in read.tags if a.get("class") == "plot"] == ["times", "speedups", "losses"]
    assert "33.3 %" in read.text


def test_a_submission_says_which_code_it_is(tmp_path: Path) -> None:
    job = {"metadata": {"name": "digits"}, "spec": {"script": "train.py", "output": str(tmp_path / "out")}}
    (tmp_path / "job.yaml").write_text(json.dumps({"apiVersion": contract.API_VERSION, "kind": contract.KIND, **job}))
    digests = []
    for text in ("a = 1", "a = 2", "a = 1"):
        (tmp_path / "train.py").write_text(text)
        place = LocalBackend(tmp_path / f"state-{len(digests)}", start=lambda *_, **__: None)
        place.submit(spec.load(tmp_path / "job.yaml"), source=tmp_path / "job.yaml", fresh=True)
        past = history.History(place.events("digits"))
        assert len(list(past)) == 1
        assert past.unusable == 0
        digests.append(past.code)
    assert digests[0] == digests[2] != digests[1]


def test_a_long_series_keeps_the_extremes_and_the_last_value_of_its_buckets() -> None:
    found = series.Series(buckets=4)
    for n in range(1000):
        found.add(n, {500: 99.0, 700: float("nan"), 701: float("inf"), 900: -5.0}.get(n, n % 7))
    assert (len(found.x) <= 8, found.count, found.per) == (True, 1000, 128)
    assert (max(found.high), min(found.low), found.x[-1], found.last[-1]) == (99.0, -5.0, 999, 999 % 7)
    (row,) = found.rows(1)
    assert row == (999, -5.0, 99.0, 999 % 7)


def test_of_many_periods_the_longest_are_drawn() -> None:
    training_, save = Bucket.TRAINING, Bucket.CHECKPOINT
    given = [Segment(0, 9, training_), Segment(9, 10, save), Segment(10, 18, training_), Segment(18, 23, save)]
    assert history.longest(given, 4) == given
    assert history.longest(given, 3) == [Segment(0, 23, training_)]
    restore = Segment(23, 23.1, Bucket.RESTORE)
    last = Segment(23.1, 30, training_)
    assert history.longest([*given, restore, last], 5) == [Segment(0, 23, training_), restore, last]
    assert history.longest([], 3) == []


def test_workers_are_where_they_are_said_to_be() -> None:
    story = many_workers()
    recorded = history.History(story.events)
    told = goodput.buckets(recorded, None)
    found = history.stays(recorded, told, told.segments)
    trained = [(start, end, len(who)) for (start, end, what), who in found.items() if what == "training"]
    assert [count for *_, count in sorted(trained)] == [2, 63, 64]
    assert [40 in who for (*_, what), who in sorted(found.items()) if what == "training"] == [False, False, True]
    assert sum(end - start for start, end, _ in trained) == pytest.approx(told.seconds[Bucket.TRAINING])


MEASURE = """
import resource, sys, time
from pathlib import Path
from outlast.job import ledger
from outlast.job.report import page
place = Path(sys.argv[1])
with (place / "metrics.jsonl").open("rb") as lines:
    text = page.run(page.Run("digits", "r1", ledger.read(place / "ledger"), False, lambda: lines, str, lambda worker: ()))
print(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, len(text))
"""


@pytest.mark.slow
def test_a_month_makes_a_page_in_seconds_and_little_memory(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    with (tmp_path / "ledger" / "one.jsonl").open("w") as told, (tmp_path / "metrics.jsonl").open("w") as logged:
        for event in thirty_days():
            told.write(json.dumps(event) + "\n")
            for line in metrics([event], "accuracy", "lr"):
                logged.write(line + "\n")
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    seconds, mebibytes, size = map(float, done.stdout.split())
    assert (seconds < MOST_S, mebibytes < 256, size < 2 << 20) == (True, True, True), done.stdout


SEEN = """() => {
  const inside = (root) => [...root.querySelectorAll("*")].flatMap((e) => [e, ...(e.shadowRoot ? inside(e.shadowRoot) : [])]);
  const pixels = (canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const painted = (e) => e.tagName == "CANVAS" && e.width && pixels(e).some((value) => value);
  return {
    plots: [...document.querySelectorAll(".plot")].map((e) => [e.id, inside(e).some(painted)]),
    wide: document.documentElement.scrollWidth > innerWidth,
    hit: typeof hit,
  };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsers.chromium() as found:
        yield found


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.parametrize("name", [*RUNS, "30 days", "several"])
def test_a_browser_draws_every_plot_on_a_phone_in_light_and_dark(name: str, browser: Any, tmp_path: Path) -> None:
    if name == "several":
        runs = [comparison.run(HOSTILE, story.account(), story.events, ()) for story in (undisturbed(), undisturbed())]
        text = page.comparison(comparison.compared(runs), [list(metrics(undisturbed().events))] * 2)
    elif name == "30 days":
        events = list(thirty_days())
        text = page.run(page.Run(name, "r1", events, False, lambda: metrics(events), str, lambda worker: ()))
    else:
        text = a_page(RUNS[name](), HOSTILE, name=HOSTILE, log=lambda worker: [LogLine(worker, HOSTILE)])
    file = tmp_path / "page.html"
    file.write_text(text)
    for scheme in ("light", "dark"):
        shown = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
        told: list[str] = []
        shown.on(
            "console", lambda message, told=told: told.append(message.text) if message.type in ("error", "warning") else None
        )
        shown.on("pageerror", lambda error, told=told: told.append(str(error)))
        shown.goto(file.as_uri())
        shown.locator(f"body[data-drawn={scheme}]").wait_for(timeout=60_000)
        shown.wait_for_function("() => Bokeh.documents.every((each) => each.is_idle)", timeout=60_000)
        seen = shown.evaluate(SEEN)
        assert seen["plots"], text[:2000]
        assert [plot for plot, painted in seen["plots"] if not painted] == []
        assert (told, seen["wide"], seen["hit"]) == ([], False, "undefined")
        shown.close()
