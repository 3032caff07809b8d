"""`outlast simulate`: from reports and files to a table, JSON, a picture and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Outlast = Callable[..., tuple[int, str, str]]
JOB = """
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: big}
spec: {module: outlast.recipes.cifar10, workers: {min: 1, replicas: 4, max: 4}, checkpoint: {every: 50 steps}}
"""
CLUSTER = """
name: train
region: us-west-2
nodeGroups:
- {name: spot, instanceTypes: [p3.2xlarge], capacity: spot, max: 3}
- {name: od, instanceTypes: [p3.2xlarge], max: 1}
"""
PRICES = "p3.2xlarge: {on-demand: 4.0, spot: 1.0}\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    report = {
        "name": "big",
        "workers": [4],
        "step_median_s": 0.5,
        "steps_kept": 20_000,
        "saves": 4,
        "seconds": {"checkpoint": 2.0},
    }
    trace = "seconds,available\n0,3\n3600,1\n7200,3\n40000,3\n"
    texts = {"job.yaml": JOB, "cluster.yaml": CLUSTER, "prices.yaml": PRICES, "report.json": json.dumps(report), "t.csv": trace}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_fleet_is_played_through_a_trace_and_compared_with_others(outlast: Outlast, files: Path) -> None:
    how = ("--report", "report.json", "--cluster", "cluster.yaml", "--prices", "prices.yaml", "--trace", "t.csv")
    code, out, err = outlast("simulate", "job.yaml", *how, "--within", "5h", "--plot", "fleet.svg")
    assert code == 0, err
    heading, *rows = out.splitlines()
    assert [row.split("  ")[0] for row in rows] == ["as given", "spot only", "on-demand only", "cheapest", "fastest"]
    assert heading.split()[5] == "COST"
    assert all("$" in row for row in rows)
    assert "not measured, assumed: more workers shorten a step in proportion" in err
    assert (files / "fleet.svg").read_text().count("machine") > 0
    code, out, _ = outlast("simulate", "job.yaml", *how, "-o", "json")
    found = {each["name"]: each for each in json.loads(out)["choices"]}
    given = found["as given"]
    assert (given["spot"], given["on_demand"], given["sizes"], given["checkpoint_every_s"]) == (3, 1, [1, 2, 3, 4], 25.0)
    assert (given["reclaims"], given["losses"], given["again_s"]) == (2, 0, 0), "the notice is long enough to save"
    assert found["cheapest"]["cost"] <= given["cost"]
    assert found["fastest"]["wall_s"] <= given["wall_s"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "say how fast the job is: --report FILE of a run, or --step SECONDS with --workers N"),
        (("--step", "1"), "--step 1 needs the number of workers that it was measured with; add --workers N"),
        (("--step", "1", "--workers", "2", "--spot", "2"), "how long is the training? add --steps N"),
        (("--report", "job.yaml"), "job.yaml is no report; make it with outlast report NAME -o json"),
        (
            ("--report", "report.json", "--cluster", "cluster.yaml", "--group", "x"),
            "cluster.yaml has no group x; it has spot, od",
        ),
        (("--report", "report.json", "--spot", "2", "--prices", "prices.yaml"), "add --instance TYPE or --cluster FILE"),
        (
            ("--report", "report.json", "--spot", "2", "--prices", "prices.yaml", "--instance", "c5.large"),
            "prices.yaml has no spot price of c5.large; add it",
        ),
        (
            ("--report", "report.json", "--spot", "2", "--trace", "none.csv"),
            "--trace none.csv cannot be read: No such file or directory",
        ),
        (("--report", "report.json", "--spot", "2", "--boot", "soon"), "--boot soon: is not a duration"),
        (("--report", "report.json"), "the fleet has no machines; add --spot N, --on-demand N or --cluster FILE"),
    ],
)
def test_what_is_missing_or_wrong_is_said(outlast: Outlast, files: Path, words: tuple[str, ...], problem: str) -> None:
    code, out, err = outlast("simulate", "job.yaml", *words)
    assert (code, out) == (2, "")
    assert problem in " ".join(err.replace("│", " ").split())
