"""A script in place of a job file: `outlast run train.py --steps 100`, and the job file that `outlast init` writes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fake
import small_disks
from outlast import cli
from outlast.base.errors import NotFound, OutlastError
from outlast.cli.train import overrides, script
from outlast.job import spec
from outlast.job.shipping import code_files

PLAIN = "import argparse, torch\nparser.add_argument('--steps')\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "gpus", lambda: 0)
    (tmp_path / "train.py").write_text(PLAIN)
    return tmp_path


class Backend(fake.FakeBackend):
    """Keeps the job that it was given last."""

    job: spec.Job
    command: str

    def submit(self, job: spec.Job, *, command: str, **rest: object) -> str:  # type: ignore[override]
        self.job, self.command = job, command
        return super().submit(job, **rest)  # type: ignore[arg-type]


def outlast(backend: Backend | None, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words, backend=backend)
    return int(ended.value.code or 0)


def job(*words: str, **given: object) -> spec.Job:
    return overrides.load(words[0], words[1:], **given)  # type: ignore[arg-type]


def test_a_script_runs_with_the_words_behind_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = Backend(here)
    words = ["run", "--workers", "2", "--set", "hang.limit=1m", "train.py", "--steps", "100", "-d", "--", "x=$(OUTLAST_OUTPUT)"]
    assert outlast(backend, *words) == 0
    ours = backend.job
    assert (ours.metadata.name, ours.spec.script, ours.spec.code) == ("train", "train.py", str(here))
    assert ours.spec.args == ("--steps", "100", "-d", "--", "x=$(OUTLAST_OUTPUT)")
    assert (ours.spec.workers.allowed(), ours.spec.hang.limit.seconds) == ((2,), 60)
    assert "comes before" not in capsys.readouterr().err
    assert backend.command == "outlast run --workers 2 --set hang.limit=1m train.py --steps 100 -d -- 'x=$(OUTLAST_OUTPUT)'"
    assert outlast(backend, "run", "--fresh", "-m", "--name", "it", "outlast.recipes.smoke") == 0
    assert backend.command == "outlast run --name it -m outlast.recipes.smoke", "--fresh would not go on"


def test_options_of_a_job_file_may_still_come_after_it(here: Path) -> None:
    Path("job.yaml").write_text(script.job_file("train.py", (), module=False, workers=1, name=None, gpus=0, directory=here))
    backend = Backend(here)
    assert outlast(backend, "run", "job.yaml", "--name", "other", "--set", "workers.max=3") == 0
    assert (backend.job.metadata.name, backend.job.spec.workers.max, backend.command) == ("other", 3, "")


def test_an_option_of_ours_behind_the_script_is_said_unless_it_is_the_scripts_own(here: Path, capsys: pytest.CaptureFixture[str]):
    assert outlast(Backend(here), "run", "train.py", "--workers=2", "--steps", "3") == 0
    said = "--workers comes before the script: outlast run --workers=2 train.py --steps 3\n"
    assert f"outlast | train: {said}" in capsys.readouterr().err
    assert outlast(Backend(here), "run", "train.py", "--steps", "3", "--workers", "2") == 0
    assert said.replace("=", " ") in capsys.readouterr().err
    Path("train.py").write_text("parser.add_argument('--workers')")
    assert outlast(Backend(here), "run", "train.py", "--workers=2") == 0
    assert "comes before" not in capsys.readouterr().err


def test_the_file_that_init_writes_is_the_job_that_run_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outlast(None, "init", "--workers", "2", "train.py", "--lr", "3e-3") == 0
    assert capsys.readouterr().out == "wrote job.yaml; train with: outlast run job.yaml\n"
    assert spec.load("job.yaml", code=True) == job("train.py", "--lr", "3e-3", workers=2)
    assert outlast(None, "init", "train.py") == 2
    assert capsys.readouterr().err == "Error: job.yaml exists; --force replaces it, -o writes another file\n"
    assert outlast(None, "init", "--force", "train.py") == 0
    assert spec.load("job.yaml") == job("train.py")
    capsys.readouterr()
    assert outlast(None, "init", "-o", "-", "train.py") == 0
    assert capsys.readouterr().out == Path("job.yaml").read_text()


@pytest.mark.parametrize(
    ("into", "said"),
    [
        ("train.py", "is the name of a script, not of a job file; write another file with -o, such as job.yaml"),
        ("link.yaml", "is the name of a script, not of a job file; write another file with -o, such as job.yaml"),
        (".", "is no regular file; name a file to write or to replace"),
    ],
)
def test_init_overwrites_no_script(here: Path, into: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("link.yaml").symlink_to("train.py")
    assert outlast(None, "init", "--force", "-o", into, "train.py") == 2
    assert (capsys.readouterr().err, Path("train.py").read_text()) == (f"Error: {into} {said}\n", PLAIN)


def test_init_on_a_full_disk_leaves_no_file(here: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_disks.fill(small_disk)
    for _ in range(2):
        assert outlast(None, "init", "-o", str(small_disk / "job.yaml"), "train.py") == 2
        assert "cannot be written: No space left on device; choose another" in capsys.readouterr().err
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_every_line_that_is_commented_out_may_be_brought_back(here: Path) -> None:
    text = script.job_file("train.py", (), module=False, workers=2, name=None, gpus=0, directory=here)
    for line in text.splitlines():
        if ": " in line and line.startswith("  # ") and "To go on" not in line:
            spec.parse(text.replace(line, line.replace("# ", "", 1)))
    both = spec.parse(text.replace("    # m", "    m")).spec.workers
    assert (both.min, both.replicas, both.max) == (1, 2, 4)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
@example(["3e-3", "yes", "null", "--x=a: b", "- a", "", "a#b", "x:", "~", "$(HOME)", "2026-01-01", "a\nb", "é"])
def test_any_argument_arrives_as_it_was_written(words: list[str]) -> None:
    assert job("train.py", *words).spec.args == tuple(words)


@pytest.mark.parametrize(("file", "name"), [
    ("train.py", "train"), ("My_Train v2.py", "my-train-v2"), ("01_pre.py", "job-01-pre"), ("é.py", "job"),
    ("x" * 80 + ".py", "x" * 51),
])  # fmt: skip
def test_a_job_is_named_after_its_script(file: str, name: str) -> None:
    Path(file).write_text("")
    assert script.title(file) == name
    assert job(file).metadata.name == name


def test_a_script_below_the_working_directory_finds_what_it_finds_under_python(here: Path, tmp_path_factory) -> None:
    (here / "src").mkdir()
    (here / "src" / "fit.py").write_text("")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "fit.py"
    elsewhere.write_text("")
    for file, code, name in (("src/fit.py", here, "src/fit.py"), (str(elsewhere), elsewhere.parent, "fit.py")):
        assert (job(file).spec.code, job(file).spec.script) == (str(code), name)
        assert outlast(None, "init", "--force", file) == 0
        assert spec.load("job.yaml", code=True) == job(file)


def test_a_module_runs_too_with_the_code_that_it_is_in(here: Path) -> None:
    (here / "package").mkdir()
    own = job("package.train", "--lr=1", module=True)
    found = (own.spec.module, own.spec.code, own.metadata.name, own.spec.args)
    assert found == ("package.train", str(here), "train", ("--lr=1",))
    assert job("outlast.recipes.smoke", module=True).spec.code is None


def test_the_gpus_of_the_machine_are_shared_by_the_workers() -> None:
    given = {workers: job("train.py", workers=workers, gpus=8).spec for workers in (1, 2, 3, 9)}
    assert {workers: each.resources.gpu for workers, each in given.items()} == {1: 8, 2: 4, 3: 2, 9: 1}
    assert given[2].processes() == 4


def test_the_script_is_code_though_it_takes_the_place_of_the_job_file(here: Path) -> None:
    ours = job("train.py")
    assert code_files.not_code(ours.spec, here, (here / "train.py", here / "job.yaml")) == [here / "job.yaml"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from outlast.training import Stream, session", "continues exactly where it was"),
        ("from outlast import hf", "continues exactly where it was"),
        ("import outlast.accelerate", "continues exactly where it was"),
        ("from transformers import (\n    Trainer)", "outlast.hf.attach(trainer, batch=64) before trainer.train()"),
        ("from accelerate import Accelerator", "outlast.accelerate.attach(accelerator, batch=64, epochs=3)"),
        ("import lightning as L", "outlast.lightning.attach(trainer, batch=64) before trainer.fit()"),
        ("from torchtitan.trainer import Trainer", "checkpoint=outlast.torchtitan.CheckpointManager.Config()"),
        ("import pytorch_lightning as pl", "the newest checkpoint of its Trainer"),
        ("import torch", "the script saves checkpoints"),
    ],
)
def test_the_file_says_what_such_a_script_has_to_do_to_go_on(source: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(source)
    assert outlast(None, "init", "-o", "-", "train.py") == 0
    assert said in capsys.readouterr().out


def test_a_script_that_is_not_there_is_a_sentence(here: Path) -> None:
    with pytest.raises(NotFound, match=r"trian.py: there is no such file; did you mean .*train.py\?"):
        job("trian.py")


def test_commands_of_a_job_file_say_what_to_do_with_a_script() -> None:
    with pytest.raises(OutlastError, match=r"train.py is a Python script, not a job file; `outlast run train.py` trains with it"):
        spec.load("train.py")
