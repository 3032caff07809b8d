"""The working directory in the output: which of its files are results, which are finished, and whose count."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.status import SavedStatus
from outlast.job.workerfiles import guessed_progress, progress_file
from outlast.job.workerfiles.guessed_progress import Logged
from outlast.storage import store
from outlast.storage.runs.output import skipped
from outlast.storage.sync import push_and_pull
from outlast.worker.launch import script_files
from outlast.worker.prepare import workdir

LONG_AGO = time.time() - 1000


def write(path: Path, text: str = "x", *, at: float | None = LONG_AGO) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if at is not None:
        os.utime(path, (at, at))
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """With a working directory that holds the code train.py and lib/net.py."""
    directory = tmp_path / "output" / "work"
    code = {name: write(directory / name) for name in ("train.py", "lib/net.py")}
    workdir.note_code(directory, {name: workdir.fingerprint(path) for name, path in code.items()})
    return directory.parent


@pytest.mark.parametrize(
    ("path", "skipped"),
    [
        ("work/checkpoint.pt", False),
        ("work/out/last.pt", False),
        ("work/train.py", True),
        ("work/lib/net.py", True),
        ("work/.outlast-files", True),
        ("work/.cache/a.bin", True),
        ("work/lib/__pycache__/net.cpython-312.pyc", True),
        ("model.pt", False),  # of the output, not of the working directory
    ],
)
def test_all_but_code_and_what_is_hidden_is_a_result(output: Path, path: str, skipped: bool) -> None:
    assert workdir.Results(output).skipped(path) is skipped


def test_a_file_of_code_that_the_job_has_written_is_a_result(output: Path) -> None:
    results = workdir.Results(output)
    write(output / "work" / "train.py", "changed", at=None)
    assert not results.skipped("work/train.py")


def test_code_behind_a_link_is_no_result(output: Path, tmp_path: Path) -> None:
    (output / "work" / "data").symlink_to(tmp_path)
    workdir.note_code(output / "work", {"data": None})
    results = workdir.Results(output)
    assert results.skipped("work/data/big.bin")
    assert results.skipped("work/data")
    assert results.skipped("work/train.py")  # noted before


def test_what_is_being_written_waits_and_what_was_renamed_does_not(output: Path) -> None:
    results = workdir.Results(output)
    write(output / "work" / "quiet.pt")
    write(output / "work" / "log.txt", at=None)
    big = write(output / "work" / "big.pt", "x" * (2 << 20), at=None)
    held = results.unfinished()
    assert [held(f"work/{name}") for name in ("quiet.pt", "log.txt", "big.pt")] == [False, True, True]
    with big.open("a") as file:
        file.write("more")
    held = results.unfinished()
    assert not held("work/log.txt")  # small, and held back once
    assert held("work/big.pt")  # it grows
    (output / "work" / "new.tmp").write_text("x")
    written = time.time() - 0.05
    os.utime(output / "work" / "new.tmp", (written, written))
    (output / "work" / "new.tmp").rename(output / "work" / "new.pt")
    assert not held("work/new.pt")


def test_a_checkpoints_directory_goes_when_all_of_it_is_quiet(output: Path) -> None:
    write(output / "work" / "out" / "checkpoint-140" / "model.safetensors")
    held = workdir.Results(output).unfinished()
    assert not held("work/out/checkpoint-140/model.safetensors")
    write(output / "work" / "out" / "checkpoint-140" / "optimizer.pt", at=None)
    held = workdir.Results(output).unfinished()
    assert held("work/out/checkpoint-140/model.safetensors")


def test_only_checkpoints_that_a_later_one_has_replaced_go_from_the_store(output: Path) -> None:
    write(output / "work" / "out" / "checkpoint-160" / "optimizer.pt")
    write(output / "work" / "step_200.pt")
    results = workdir.Results(output)
    gone = ["out/checkpoint-140/optimizer.pt", "step_100.pt"]
    stays = ["out/checkpoint-160/model.bin", "out/checkpoint-180/model.bin", "best.pt", "elsewhere/checkpoint-1/model.bin"]
    assert [results.expired(f"work/{path}") for path in [*gone, *stays]] == [True] * 2 + [False] * 4
    assert not results.expired("step_100.pt")  # its directory holds no later one


class Disk:
    """A pod's disk with its working directory, and an uploader; the store is shared."""

    def __init__(self, directory: Path, url: str) -> None:
        self.output, self.state = directory / "output", directory / "state"
        self.state.mkdir(parents=True)
        write(directory / "code" / "train.py")
        self.environ = {
            Env.OUTPUT: str(self.output),
            Env.CODE: str(directory / "code"),
            Env.STATE: str(self.state),
            Env.RUN: "first",
            Env.RENDEZVOUS: "kubernetes://job",
        }
        self.place = store.open_(url)
        self.said: list[str] = []

    def start(self) -> None:
        """As an agent does before the training."""
        self.environ[Env.CODE] = str(Path(self.environ[Env.CODE]))
        workdir.enter(self.environ, self.said.append, threading.Event())
        workdir.fetch(self.output, self.place, self.said.append, threading.Event())

    def train(self, generation: int, rank: int, **wrote: str) -> None:
        """As a process of that rank, which writes these files."""
        writer = progress_file.Writer(self.state, 0)
        writer.write(progress_file.Progress(generation, rank, "started"))
        writer.close()
        if rank == 0:
            (self.output / "work" / contract.WORKED).write_text(str(generation))
        for name, text in wrote.items():
            write(self.output / "work" / f"{name}.pt", text)

    def push(self) -> None:
        results = workdir.Results(self.output)
        is_rank0 = workdir.is_rank0(self.output, self.place, self.environ)
        skip = lambda path: skipped(path) or (results.skipped(path) if is_rank0 else path.startswith("work/"))  # noqa: E731
        manifest, held = self.output / ".push" / "manifest", results.unfinished()
        push_and_pull.push(
            self.output, self.place, manifest, push_and_pull.Options(skip=skip), leave=held, expired=results.expired
        )

    def holds(self) -> dict[str, str]:
        """The files of the working directory that people see."""
        found = (path for path in (self.output / "work").iterdir() if not path.name.startswith("."))
        return {path.name: path.read_text() for path in found}


def test_in_pods_the_files_of_rank_0_are_pushed_and_a_new_pod_gets_them(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    first, second, third = (Disk(tmp_path / name, url) for name in ("first", "second", "third"))
    first.start()
    second.start()
    assert first.environ[Env.CODE] == str(first.output / "work")
    first.train(1, 0, checkpoint="of rank 0")
    second.train(1, 1, checkpoint="of rank 1")
    write(first.output / "trainer" / "checkpoint-20" / "optimizer.pt", "of rank 0")  # $OUTLAST_OUTPUT/trainer
    second.push()
    first.push()
    assert {entry.key for entry in first.place.entries()} >= {"work/checkpoint.pt"}
    assert "work/train.py" not in {entry.key for entry in first.place.entries()}
    third.start()
    assert third.holds() == {"train.py": "x", "checkpoint.pt": "of rank 0"}
    assert (third.output / "trainer" / "checkpoint-20" / "optimizer.pt").read_text() == "of rank 0"
    assert third.said == ["fetched 2 files that the script has written"]
    third.train(2, 0, checkpoint="newer")
    third.push()
    write(first.output / "work" / "checkpoint.pt", "of a zombie")
    first.push()  # it has not heard of the second generation
    assert first.place.get("work/checkpoint.pt") == b"newer"
    first.start()  # its container is started again, and what lies here is older
    assert first.holds()["checkpoint.pt"] == "newer"
    write(third.output / "work" / "checkpoint.pt", "not pushed yet")
    third.start()
    assert third.holds()["checkpoint.pt"] == "not pushed yet"


def test_larger_code_runs_where_it_lies_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path / "pod", f"file://{tmp_path}/store")
    monkeypatch.setattr(workdir, "_MOST", (0, 0))
    before = disk.environ[Env.CODE]
    disk.start()
    assert disk.environ[Env.CODE] == before
    assert "are lost with this pod; write to $OUTLAST_OUTPUT" in disk.said[0]


def test_code_of_a_newer_image_comes_and_what_the_job_wrote_stays(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "pod", f"file://{tmp_path}/store")
    code = Path(disk.environ[Env.CODE])
    write(code / "config.json", "{}")
    disk.start()
    write(disk.output / "work" / "config.json", json.dumps({"written": "by the job"}), at=None)
    write(code / "train.py", "v2", at=None)
    write(code / "config.json", "{ }", at=None)
    disk.environ[Env.CODE] = str(code)
    disk.start()
    assert disk.holds() == {"train.py": "v2", "config.json": '{"written": "by the job"}'}


def test_a_pod_that_is_killed_as_newer_code_comes_has_it_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path / "pod", f"file://{tmp_path}/store")
    code = disk.environ[Env.CODE]
    disk.start()
    write(Path(code) / "train.py", "v2", at=None)
    write(Path(code) / "new.py", "v2", at=None)

    def killed(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        disk.environ[Env.CODE] = code
        with monkeypatch.context() as patch:
            patch.setattr("shutil.copy2", killed)
            with pytest.raises(KeyboardInterrupt):
                disk.start()
    disk.start()
    assert disk.holds() == {"train.py": "v2", "new.py": "v2"}


def test_a_checkpoint_stays_in_the_store_until_the_one_that_replaced_it_is_there(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "pod", f"file://{tmp_path}/store")
    disk.start()
    disk.train(1, 0)
    work_dir = disk.output / "work"
    old, new = (write(work_dir / name / "model.bin", at=at) for name, at in (("checkpoint-1", LONG_AGO), ("checkpoint-2", None)))
    for left in ("checkpoint-1", "checkpoint-1", "checkpoint-2"):
        disk.push()
        assert [entry.key for entry in disk.place.entries() if "checkpoint" in entry.key] == [f"work/{left}/model.bin"]
        if old.exists():
            old.unlink()
            old.parent.rmdir()
        else:
            os.utime(new, (LONG_AGO, LONG_AGO))


def test_on_a_volume_a_new_run_begins_without_the_files_of_the_one_before(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "pod", f"file://{tmp_path}/store")
    code = disk.environ[Env.CODE]
    disk.start()
    disk.train(1, 0, checkpoint="of the first")
    disk.environ |= {Env.CODE: code, Env.RUN: "second"}
    disk.start()
    assert disk.holds() == {"train.py": "x"}
    assert (disk.output / "previous" / "first" / "work" / "checkpoint.pt").read_text() == "of the first"


# Names and lines


@pytest.mark.parametrize(
    ("name", "looks", "step"),
    [
        ("checkpoint.pt", True, None),
        ("last.pt", True, None),
        ("ckpt.pt", True, None),
        ("checkpoint_last.pt", True, None),
        ("checkpoint-12.pth.tar", True, None),  # an epoch, of timm
        ("epoch=3-step=200.ckpt", True, 200),
        ("step_100.pt", True, 100),
        ("iter_0000100.pt", True, 100),
        ("model.pt", False, None),
        ("model.safetensors", False, None),
        ("timesteps.npz", False, None),
        ("last.txt", False, None),
    ],
)
def test_names_of_files_that_look_like_checkpoints(name: str, looks: bool, step: int | None) -> None:
    assert guessed_progress.step_of_file(name) == (looks, step)


@pytest.mark.parametrize(
    ("name", "step"),
    [("checkpoint-140", 140), ("global_step500", 500), ("iter_0000100", 100), ("checkpoints", None), ("step_100.pt", None)],
)
def test_names_of_directories_that_are_checkpoints(name: str, step: int | None) -> None:
    assert guessed_progress.step_of(name) == step


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("step 120 loss 0.3", (120,)),
        ("Step: 120/2000", (120, 2000)),
        ("step 1,200 of 5,000", (1200, 5000)),
        ("iter 120: loss 2.1, time 30ms", (120,)),
        ("Epoch [3/10], Step [120/2000], Loss: 0.5", (120, 2000, 3)),
        ("epoch 3 iter 20/32 loss 0.5", (20, 32, 3)),
        ("Epoch: [0][ 10/5005] Time 0.3", (10, 5005, 0)),
        ("epoch 0.53 step 120/2000", (120, 2000)),
        ("[120/2000] loss 0.5", (120, 2000)),
        ("[rank 0] step 4", (4,)),
        ('{"step": 4, "loss": 1}', (4,)),
        ('{"epoch": 2, "step": 4, "loss": 1}', (4, None, 2)),
        ("  6%|6         | 120/2000 [00:12<03:00, 9.9it/s]", (120, 2000)),
        ("Epoch 2:  45%|####      | 56/125 [00:05<00:06, 9.9it/s]", (56, 125, 2)),
        ("[rank 0] Epoch 2/9 ━━━━━━━╸      56/125 0:00:05 • 0:00:06 9.9it/s", (56, 125, 2)),
        ("Epoch:  33%|###   | 1/3 [00:12<03:00, 9.9s/it]", None),
        ("   ━━━━━━━━━━ 12.3/45.0 MB 9.9 MB/s", None),
        ("{'loss': 0.5, 'epoch': 1.2}", None),
        ("Epoch [3/10] loss 0.1", None),
        ("Map:   6%|6    | 120/2000 [00:12<03:00, 9.9it/s]", None),
        ("3 steps per second", None),
        ("max_steps=100", None),
        ("steps_per_epoch: 100", None),
        ("timestep 5", None),
        ("step time: 40 ms", None),
        ("step 12.5", None),
        ("\x1b[32mstep 10\x1b[0m loss 0.1", (10,)),
    ],
)
def test_steps_in_lines_of_a_log(line: str, said: tuple[int, ...] | None) -> None:
    assert guessed_progress.step_in(line) == (Logged(*said) if said else None)


def test_the_last_line_counts_and_a_shorter_bar_is_another_one() -> None:
    assert guessed_progress.last_step("step 1/20\nstep 2/20\nloss", None) == Logged(2, 20)
    bars = " 10%|# | 3/20 [00:01<00:02]\r 50%|# | 2/4 [00:01<00:02]\r"
    assert guessed_progress.last_step(bars, Logged(1, 20)) == Logged(3, 20)
    assert guessed_progress.last_step("step 7\n", Logged(3, 20)) == Logged(7, 20)
    assert guessed_progress.last_step("nothing", Logged(3, 20)) == Logged(3, 20)


def test_a_counter_that_falls_is_one_of_an_epoch_from_then_on() -> None:
    fell = guessed_progress.last_step("step 1/32", Logged(31, 32))
    assert fell == Logged(1, 32, guessed_progress.UNNAMED)
    assert guessed_progress.last_step("step 9/32", fell) == Logged(9, 32, guessed_progress.UNNAMED)
    assert guessed_progress.last_step("epoch 3 iter 1/32", Logged(31, 32, 2)) == Logged(1, 32, 3)


def test_an_empty_bar_is_no_first_step() -> None:
    assert guessed_progress.first_step("  0%|  | 0/400 [00:00<?]\r 35%|# | 141/400 [00:01<00:02]\r") == Logged(141, 400)
    assert guessed_progress.first_step("hello\nstep 0/400\nstep 1/400") == Logged(0, 400)


@pytest.mark.parametrize(
    ("reached", "now", "first", "warns"),
    [
        (Logged(106), Logged(0), Logged(0), True),
        (Logged(106), Logged(0), None, True),  # the launcher has not seen the first
        (Logged(300), Logged(100), Logged(100), True),  # of a log with a line every 100 steps
        (Logged(106), Logged(100), Logged(0), False),
        (Logged(150), Logged(100), Logged(0), False),
        (Logged(5), Logged(5), Logged(0), False),
        (Logged(10, 32, 3), Logged(0, 32, 0), Logged(0, 32, 0), True),
        (Logged(10, 32, 3), Logged(0, 32, 1), Logged(0, 32, 1), True),
        (Logged(10, 32, 3), Logged(0, 32, 3), Logged(0, 32, 0), False),  # it goes on at the start of an epoch
        (Logged(10, 32, 1), Logged(0, 32, 1), None, False),  # the first epoch, or not
        (Logged(10, 32, 0), Logged(0, 32, 0), Logged(0, 32, 0), True),
        (Logged(10, 32, guessed_progress.UNNAMED), Logged(0, 32), Logged(0, 32), False),
        (Logged(10, 32, 3), Logged(0), Logged(0), False),
    ],
)
def test_a_script_that_begins_again_is_noticed_by_its_own_log(reached: Logged, now: Logged, first: Logged | None, warns: bool):
    saved = SavedStatus(name="ckpt/epoch1.pt", time=LONG_AGO)
    for before, there in [
        (None, ": have it save checkpoints and load"),
        (saved, ", although ckpt/epoch1.pt was there: have it load"),
    ]:
        said = guessed_progress.begun_anew(before, reached, now, first)
        assert (there in said, "the script began again at " in said) == (warns, warns)


def test_the_newest_save_is_found_by_name_and_time(tmp_path: Path) -> None:
    assert guessed_progress.newest(tmp_path / "nowhere", 0) is None
    write(tmp_path / "work" / "pretrained" / "last.pt", at=LONG_AGO - 500)  # before the run
    write(tmp_path / "checkpoints" / "step-00000010" / "a.pt")  # a session's
    assert guessed_progress.newest(tmp_path, LONG_AGO - 100) is None
    write(tmp_path / "work" / "out" / "checkpoint-140" / "optimizer.pt", at=LONG_AGO + 10)
    write(tmp_path / "work" / "checkpoint.pt", at=LONG_AGO + 5)
    assert guessed_progress.newest(tmp_path, LONG_AGO) == SavedStatus(
        name="work/out/checkpoint-140", step=140, time=LONG_AGO + 10
    )


class Shelf(dict[str, bytes]):
    """A TCPStore in memory."""

    set, get = dict.__setitem__, dict.__getitem__

    def check(self, keys: list[str]) -> bool:
        return self.keys() >= set(keys)


def in_pods(state: Path) -> list[dict[str, str]]:
    """The environments of four ranks on two pods, which share a store."""
    pod = {Env.STATE: str(state), Env.OUTPUT: str(state), Env.STORE: "s3://bucket/job", Env.RENDEZVOUS: "kubernetes://job"}
    pod |= {Env.GENERATION: "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5", "GROUP_WORLD_SIZE": "2"}
    return [{**pod, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)} for rank in range(4)]


@pytest.mark.parametrize("wrote", [True, False])
def test_before_a_script_one_process_of_each_other_pod_fetches_what_the_pod_of_rank_0_has_written(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrote: bool
) -> None:
    if wrote:  # on another pod: it is in the store
        write(output / "work" / contract.WORKED, "1")
    shelf, fetched = Shelf(), list[str]()
    monkeypatch.setattr(script_files, "_fetch", lambda _announced, environ, _over: fetched.append(environ["RANK"]))
    ranks = [{**environ, Env.OUTPUT: str(output)} for environ in in_pods(tmp_path)]
    threads = [threading.Thread(target=script_files.share, args=(each, lambda _: shelf)) for each in reversed(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert fetched == (["2"] if wrote else [])
    assert shelf.keys() == {"outlast/files", "outlast/files/0", "outlast/files/1"}
    for alone in ({"GROUP_WORLD_SIZE": "1"}, {Env.STORE: ""}, {Env.RENDEZVOUS: "unix:///here"}):
        script_files.share({**ranks[0], **alone}, lambda _: pytest.fail("connected"))


def test_the_siblings_of_a_process_whose_connection_fails_wait_until_it_begins_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_files, "_TIMEOUT_S", 30.0)
    first, sibling = in_pods(tmp_path)[2:]
    waits = threading.Thread(target=script_files.share, args=(sibling, lambda _: Shelf()))
    waits.start()
    script_files.share(first, Mock(side_effect=RuntimeError("refused")))
    assert waits.is_alive()
    progress_file.Writer(tmp_path, 0).write(progress_file.Progress(2, 2, "started"))  # as `training_process.enter` does
    waits.join(15)
    assert not waits.is_alive()


def test_the_other_pods_hear_at_once_that_rank_0_cannot_request_an_upload(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(output / "work" / contract.WORKED, "1")
    write(output / ".push", "a file in the place of a directory")
    progress_file.Writer(tmp_path, 0).write(progress_file.Progress(1, 0, "started"))
    shelf = Shelf()
    script_files.share({**in_pods(tmp_path)[0], Env.OUTPUT: str(output)}, lambda _: shelf)
    assert shelf["outlast/files"] == b"nothing"
    assert "the other workers continue with their own files: " in capsys.readouterr().out
