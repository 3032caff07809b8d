"""The shell completes names: at once, and without a word."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

import apiserver
import fake
from outlast import cli
from outlast.cli import commands, completion
from outlast.data import named_datasets
from outlast.job import faults
from outlast.kubernetes.api import kinds

Complete = Callable[[str], list[str]]


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Complete:
    """Offers for the last of these words, in a directory without jobs and without a kubeconfig."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("OUTLAST_STATE_DIR", str(tmp_path / "state"))

    def offers(words: str) -> list[str]:
        monkeypatch.setenv("_OUTLAST_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", f"outlast {words}")
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
        with pytest.raises(SystemExit):
            cli.main()
        out, err = capfd.readouterr()
        assert err == ""
        return out.split()

    return offers


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has run two jobs."""
    from outlast.local import backend

    jobs = fake.FakeBackend(tmp_path)
    for name in ("train", "test"):
        jobs.runs[name] = fake.Run(fake.JobStatus(name=name, run="r", state=fake.State.RUNNING, submitted=1.0))
    monkeypatch.setattr(backend, "LocalBackend", lambda root: jobs)


@pytest.fixture
def team(team: apiserver.ApiServer, monkeypatch: pytest.MonkeyPatch) -> apiserver.ApiServer:
    """With a job in namespace `n`."""
    monkeypatch.setattr(completion, "_TIMEOUT_S", 60.0)  # this machine may be busy
    team.put(kinds.NAMESPACE.document({"name": "team-b"}))
    labels = {"outlast.dev/job": "remote", "app.kubernetes.io/component": "worker"}
    team.put(kinds.JOB.document({"name": "remote", "namespace": "n", "labels": labels}))
    return team


@pytest.mark.parametrize(("words", "offered"), [
    ("status t", ["train", "test"]), ("checkpoints list tr", ["train"]), ("report train te", ["test"]),
    ("tensorboard te", ["test"]), ("scale ", ["train", "test"]), ("chaos t", ["term", "train", "test"]),
    ("chaos ", [*faults.ACTIONS, "train", "test"]), ("data get ", list(named_datasets.NAMES)),
    ("submit --as i", ["indexed-job"]), ("status nothing", []),
])  # fmt: skip
def test_the_shell_completes_jobs_of_this_machine_and_fixed_names(
    words: str, offered: list[str], complete: Complete, local: None
) -> None:
    assert complete(words) == offered


def test_it_completes_what_a_cluster_has(complete: Complete, team: apiserver.ApiServer) -> None:
    assert complete("status --context ") == ["here", "there"]
    assert complete("status -n n re") == ["remote"]
    assert complete("logs -n n --context there ") == ["remote"]
    assert complete("status -n team-b re") == []
    assert complete("render -n team") == complete("operator -n team") == ["team-b"]


def test_kubectl_completes_the_plug_in_by_its_convention(team: apiserver.ApiServer, local: None, monkeypatch, capfd) -> None:
    def offers(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["kubectl_complete-outlast", *words])
        with mock.patch.dict(os.environ):
            cli.kubectl_completion()
        return capfd.readouterr().out.splitlines()

    assert offers("status", "-n", "n", "") == ["remote", ":0"], "and no job of this machine"
    assert offers("status", "") == [":0"]
    assert offers("wai") == ["wait\tWait until a job reaches a step or a state.", ":0"]
    assert offers("agent")[-1] == ":0", "which is a role, and is not played here"
    assert {line.partition("\t")[0] for line in offers("list", "--")} >= {"--all-namespaces", "--selector", "--watch"}


def test_every_name_of_a_job_a_namespace_and_a_context_is_completed() -> None:
    kinds = {"namespace": completion.namespaces, "context": completion.contexts}
    jobs = {"NAME", "[JOB]..."}
    lacking = []

    def look(path: str, command: object) -> None:
        for name, each in getattr(command, "commands", {}).items():
            look(f"{path} {name}", each)
        for parameter in getattr(command, "params", ()):
            job = parameter.param_type_name == "argument" and parameter.metavar in jobs
            if (job or parameter.name in kinds) and parameter._custom_shell_complete is None:
                lacking.append(f"{path} {parameter.name}")

    look("outlast", commands.command())
    assert lacking == []


def test_a_cluster_that_does_not_answer_costs_no_more_than_its_time(complete: Complete, team: apiserver.ApiServer, monkeypatch):
    team.may = lambda _: bool(time.sleep(5))
    monkeypatch.setattr(completion, "_TIMEOUT_S", 0.2)
    complete("status -n")  # modules are imported
    began = time.monotonic()
    assert complete("status -n n re") == []
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("kubeconfig", ["not: [yaml", "contexts: 5", None])
def test_a_damaged_kubeconfig_offers_nothing_and_says_nothing(kubeconfig: str | None, complete: Complete, tmp_path, monkeypatch):
    path = tmp_path / "broken"
    if kubeconfig is not None:
        path.write_text(kubeconfig)
    monkeypatch.setenv("KUBECONFIG", str(path))
    for words in ("status ", "status -n ", "status --context ", "status -n x "):
        assert complete(words) == []
