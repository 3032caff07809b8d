"""Every `outlast ...` line of the pages and the examples that can run on this machine does run, from a shell, as typed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import textures
from pages import OUTLAST, ROOT

ELSEWHERE = {
    r"^(install|uninstall|submit|top|operator|node-watch|rdzv|doctor|list -A)\b|\b(-n|--on) |--on$": "a cluster",
    r"s3://|^run examples/from-a-store": "a store",
    r"^fetch\b": "a store; test_weights fetches",
    r"(accelerate_loop|lightning_fit)\.py": "libraries that are not installed here; test_hugging_face runs what is",
    r"--engine spark|--master": "a Java",
    r"^(tensorboard|notebook|ui)\b": "serve until somebody ends them; test_tensorboard, test_notebook and test_ui start them",
    r"https://|^data get (cifar10|kinetics|tiny)|examples/cifar10\.yaml$|^data prepare video": "data that are not here",
    r"\b[A-Z]{3,}\b|\$\d|\.\.\.|^data (get|prepare)$|^run --fresh$": "names of a reader",
    r"^data prepare \w+( --stretch)?$|_[A-Z]+": "the same",
    r" 2500$": "test_hugging_face runs that script",
    r"^(validate|render) examples/": "nothing; test_examples runs them",
}
"""Lines that do not run here, and what they need."""
ON_A_JOB = re.compile(r"^(status|logs|scale|why|suspend|resume|cancel|report|evaluate|chaos|checkpoints \w+|forget)\b")
"""Lines about a job that is there: one for each of these verbs runs."""
SHORT = ["--steps=2"]
DIGITS = ["--set", "args=[--epochs=1, --no-flip]"]
IMAGES = ["--image-size=32", "--stored-size=0", "--epochs=1"]
TINY = ["--model-local-dir=data/llm/model", "--tokenizer-local-dir=data/llm/model", "--local-files-only"]

STORIES: dict[str, list[tuple[str, Sequence[str]]]] = {
    "a script": [
        ("run train.py", ["--fresh", *SHORT]),
        ("run --workers 2 train.py --steps 2000", ["--fresh", *SHORT]),
        ("init --workers 2 train.py --steps 2000", []),
        ("init --workers 4 train.py --steps 2000", ["--force", "--name=long", *SHORT]),
        ("validate job.yaml", []),
        ("render job.yaml --as job", ["--set", "image=i:1", "--set", "workers.replicas=1"]),
        ("render job.yaml --as indexed-job", ["--set", "image=i:1"]),
        ("render job.yaml --as statefulset", ["--set", "image=i:1"]),
        ("render job.yaml --as statefulset --set workers.replicas=64 --set resources.gpu=8", ["--set", "image=i:1"]),
        ("run job.yaml --detach", ["--set", "args=[--steps=100000, --pause=0.01]", "--set", "workers.min=1"]),
        ("why", ["long"]),
        ("scale 3", []),
        ("chaos kill-worker", []),
        ("suspend", ["long"]),
        ("resume", ["long"]),
        ("cancel cifar10", []),
        ("forget NAME", ["--yes"]),
        ("run job.yaml", []),
    ],
    "digits": [
        ("data get", []),
        ("data get digits", []),
        ("run examples/digits.yaml", DIGITS),
        ("run examples/digits.yaml --name calm", DIGITS),
        ("run examples/digits.yaml --name killed --chaos examples/chaos/demo.yaml", []),
        ("status -w", []),
        ("logs -f --worker 1", []),
        ("evaluate digits", []),
        ("checkpoints list", []),
        ("checkpoints verify", []),
        ("checkpoints export", []),
        ("report", []),
        ("run examples/digits.yaml --name digits-1 --set workers.replicas=1 --set workers.min=1", DIGITS),
        ("run examples/digits.yaml --name digits-2", DIGITS),
        ("run examples/digits.yaml --name digits-4 --set workers.replicas=4", DIGITS),
        ("report digits-1 digits-2 digits-4", []),
        (
            "run --workers 2 -m outlast.recipes.cifar10 --setting workshop --epochs=10 --batch-size=128 "
            "--model-file=/efs-shared/cifar10-model.pth /efs-shared/cifar-10-batches-py/",
            ["--epochs=1"],
        ),
    ],
    "text": [
        ("data get python-stdlib", []),
        ("data prepare text data/python-stdlib --to data/python --vocab-size 2048", []),
        ("run examples/gpt.yaml", ["--set", "checkpoint.every=20 steps"]),
        ("evaluate gpt", []),
        ("data prepare text input.txt --to data/mine --tokenizer char", []),
    ],
    "documents": [("data prepare text docs --glob *.jsonl --field text --to data/mine", [])],
    "images": [
        ("run --workers 2 -m outlast.recipes.imagenet --input-path /data/tiny-imagenet-200 --epochs 10", IMAGES),
        ("run --workers 2 -m outlast.recipes.imagenet DIR -a resnet18 -b 64", [*IMAGES, "--num_checkpoints=1"]),
    ],
    "recipes": [
        (
            "run --workers 2 -m outlast.recipes.smoke --epochs 2 --batch 256 --samples 4096 --features 128 --classes 4 "
            "--lr 3e-3 --seed 42",
            [],
        ),
        (
            "run --workers 2 -m outlast.recipes.perceiver --dataset synthetic --batch_size 8 --num_epochs 2 --log_steps 20 "
            "--max_steps 28125 --lr 5e-5",
            ["--size=tiny", "--max_steps=2"],
        ),
        (
            "run --workers 4 -m outlast.recipes.llm --data /data/train.jsonl --output /out/run --epochs 2 --batch 2 "
            "--grad-accum 8 --seq-len 4096 --lora --bf16",
            [*TINY, "--seq-len=32", "--epochs=1"],
        ),
        ("run examples/llm.yaml", []),
    ],
    "examples": [
        ("validate --schema", []),
        ("run examples/smoke.yaml", []),
        ("run examples/own-script.yaml", []),
        ("run examples/torchrun.yaml", []),
        ("run examples/exact-resume.yaml", []),
        ("run examples/imagenet.yaml", []),
        ("run examples/perceiver.yaml", []),
    ],
}
"""Lines of pages in an order in which they run, each with what makes it short: two steps are enough."""
PLACES = {"/data/tiny-imagenet-200": "images", " DIR ": " images ", "/data/train.jsonl": "data/llm/train.jsonl"}
PLACES |= {
    "/efs-shared/cifar-10-batches-py/": "data/digits",
    "/efs-shared/": "",
    "cancel cifar10": "cancel long",
    "forget NAME": "forget long",
}


def lines() -> set[str]:
    return {" ".join(words) for words in OUTLAST}


def test_every_line_of_a_page_runs_or_needs_what_is_not_here() -> None:
    told = {line for story in STORIES.values() for line, _ in story}
    assert told <= lines(), "a story that no page tells any more"
    verbs = {found[1] for line in told if (found := ON_A_JOB.match(line))}
    left = {line for line in lines() - told if not any(re.search(each, line) for each in ELSEWHERE)}
    on_a_job = {line for line in left if (found := ON_A_JOB.match(line)) and found[1] in verbs}
    assert left - on_a_job == set()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the examples, a reader's script, and a little of each kind of data."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "examples" / "train.py", tmp_path)
    textures.write(tmp_path / "images", {"train": 4, "val": 2}, kinds=4, size=36)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.jsonl").write_text("".join(f'{{"text": "to be, or not to be {n}"}}\n' for n in range(2000)))
    (tmp_path / "input.txt").write_text("to be, or not to be\n" * 200)
    return tmp_path


def type_in(line: str, more: Sequence[str], place: Path) -> None:
    """Run a line in a shell that knows `outlast`, with its places moved to `place`; it must succeed."""
    for there, here in PLACES.items():
        line = line.replace(there, here)
    before, script, after = line.partition(" train.py")  # options before a script are ours, and those after it its own
    ours = [word for word in more if script and re.match("--(fresh|force|name)", word)]
    command = " ".join(["outlast", before, *ours, script + after, *(f"'{word}'" for word in more if word not in ours)])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")}
    environ |= {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}", "OUTLAST_CACHE": f"{place}-cache"}
    ran = subprocess.run(["sh", "-c", command], cwd=place, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("story", STORIES)
def test_the_lines_of_the_pages_run_one_after_another(story: str, place: Path) -> None:
    if any("llm" in line for line, _ in STORIES[story]):
        subprocess.run([sys.executable, "-m", "outlast.recipes.llm_tiny", "data/llm"], cwd=place, check=True)
    for line, more in STORIES[story]:
        type_in(line, more, place)
