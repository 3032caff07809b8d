"""Speed and validation loss of `outlast.recipes.gpt` beside nanoGPT's train.py, and of experts beside a dense model.

    git clone https://github.com/karpathy/nanoGPT
    python bench/gpt.py --nanogpt nanoGPT [--quick]     # tiny, on the CPU, characters and a BPE of 4,096 tokens
    python bench/gpt.py --moe [--quick]                 # 2 of 8 experts and a dense model with as many operations a token
    python bench/gpt.py --nanogpt nanoGPT --gpu         # 124M in bfloat16 on one GPU

Both train on the same files (the standard library's text), with the same model, learning rates and tokens a step, as many threads
and in turn. A step is the time between two lines of the log as they arrive here, so neither's own clock counts; lines beside an
evaluation do not count, nor does the first fifth of a run. Validation losses are those of the log: of random blocks (nanoGPT) or
of evenly spread ones (ours), and the samples come in another order, so curves agree in a band. Prints medians and ratios, and
appends them to results/<date>-gpt.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pickle
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ITERATION = re.compile(r"iter (\d+): loss", re.IGNORECASE)
EVALUATION = re.compile(r"step (\d+): train loss ([\d.]+), val loss ([\d.]+)")
SETTLED = 0.2
"""Fraction of a run that does not count, because kernels are chosen, the GPU warms up, and a model is compiled."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of a training for both systems, with nanoGPT's names."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128
    batch_size: int = 12
    gradient_accumulation_steps: int = 1
    max_iters: int = 600
    eval_interval: int = 100
    eval_iters: int = 40
    learning_rate: float = 1e-3
    min_lr: float = 1e-4
    warmup_iters: int = 50
    weight_decay: float = 0.1
    beta2: float = 0.99
    dtype: str = "float32"
    compile: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return self.block_size * self.batch_size * self.gradient_accumulation_steps

    def values(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "lr_decay_iters": self.max_iters, "log_interval": 1, "always_save_checkpoint": True}


GPU = Plan(
    n_layer=12,
    n_head=12,
    n_embd=768,
    block_size=1024,
    gradient_accumulation_steps=4,
    max_iters=120,
    eval_interval=60,
    eval_iters=10,
    learning_rate=6e-4,
    min_lr=6e-5,
    beta2=0.95,
    dtype="bfloat16",
)
QUICK: dict[str, Any] = {"max_iters": 100, "eval_interval": 50, "eval_iters": 10, "warmup_iters": 10}


@dataclasses.dataclass
class Run:
    """Output of one process."""

    seconds: list[float]
    """Seconds of each step that counts."""
    losses: dict[int, float]
    """Validation loss by step."""


def shown(command: Sequence[object], cwd: Path, env: Mapping[str, str]) -> Run:
    """Run a training to its end, and time its lines."""
    said, times, losses, ended = [], [], {}, 0.0
    with subprocess.Popen(
        list(map(str, command)), cwd=cwd, env={**os.environ, "PYTHONUNBUFFERED": "1", **env}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        for line in process.stdout:
            now = time.perf_counter()
            said.append(line)
            if found := EVALUATION.match(line):
                losses[int(found[1])] = float(found[3])
                ended = 0.0
            elif ITERATION.match(line):
                if ended:
                    times.append(now - ended)
                ended = now
    if process.returncode:
        sys.exit(f"{command[-1]} ended with {process.returncode}:\n{''.join(said[-20:])}")
    return Run(times[int(len(times) * SETTLED) :], losses)


def nanogpt(source: Path, data: Path, plan: Plan, device: str, work: Path, env: Mapping[str, str]) -> Run:
    """nanoGPT's train.py, which reads data/NAME below its directory; the clone stays as it is."""
    root = work / "nanogpt"
    shutil.rmtree(root, ignore_errors=True)
    (root / "data" / "text").mkdir(parents=True)
    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(source / name, root)
    for name in ("train.bin", "val.bin"):
        (root / "data" / "text" / name).symlink_to(data / name)
    if vocabulary := size(data):
        (root / "data" / "text" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))
    values = {**plan.values(), "max_iters": plan.max_iters, "dataset": "text", "device": device, "out_dir": "out"}
    return shown([sys.executable, "-W", "ignore", "train.py", *(f"--{k}={v}" for k, v in values.items())], root, env)


def ours(data: Path, plan: Plan, more: Sequence[str], work: Path, env: Mapping[str, str], processes: int = 1) -> Run:
    """Run the recipe in one process, or in several processes with one thread each."""
    root = work / "ours"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    flags = [f"--{k}={v}" for k, v in plan.values().items()]
    python, alone = [sys.executable, "-m"], {"OMP_NUM_THREADS": "1"}
    if processes > 1:
        python = [*python, "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    command = [*python, "outlast.recipes.gpt", f"--data={data}", "--output_dir=out", *flags, *more]
    return shown(command, root, env if processes == 1 else {**env, **alone})


def size(data: Path) -> int:
    """Return the size of the vocabulary; 0 without a vocabulary, for which both sides use GPT-2's size."""
    file = data / "meta.pkl"
    return int(pickle.loads(file.read_bytes())["vocab_size"]) if file.exists() else 0


def prepared(work: Path, tokenizer: str) -> Path:
    """Prepare the standard library's text as tokens."""
    outlast, text, to = Path(sys.executable).with_name("outlast"), work / "text", work / tokenizer
    if not text.exists():
        subprocess.run([outlast, "data", "get", "python-stdlib", "--to", text], check=True, stdout=subprocess.DEVNULL)
    more = [] if tokenizer == "char" else ["--vocab-size", "4096"]
    command = [outlast, "data", "prepare", "text", text, "--to", to, "--tokenizer", tokenizer, *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return to


def apart(one: Sequence[Run], other: Sequence[Run]) -> float:
    """Return the mean absolute difference of the validation losses, averaged over runs, at the same steps of the second half."""
    steps = sorted(set(one[0].losses) & set(other[0].losses))
    means = [[statistics.mean(run.losses[step] for run in runs) for step in steps] for runs in (one, other)]
    pairs = list(zip(*means, strict=True))
    return statistics.mean(abs(a - b) for a, b in pairs[len(pairs) // 2 :])


def table(runs: Mapping[str, Sequence[Run]], tokens: int, against: str) -> list[str]:
    """Return a table with the medians over the runs of each system, and the ratio to one system."""
    each = {name: [statistics.median(run.seconds) for run in several] for name, several in runs.items()}
    base = statistics.median(each[against])
    lines = [f"| system | tokens/s: median (range) | a step | / {against} | last val loss |", "|---|---|---|---|---|"]
    for name, seconds in each.items():
        middle = statistics.median(seconds)
        low, high = tokens / max(seconds), tokens / min(seconds)
        loss = statistics.mean(list(run.losses.values())[-1] for run in runs[name])
        speed = f"{tokens / middle:,.0f} ({low:,.0f} – {high:,.0f})"
        lines.append(f"| {name} | {speed} | {middle * 1e3:.1f} ms | {base / middle:.2f} | {loss:.3f} |")
    return lines


def beside_nanogpt(options: argparse.Namespace, work: Path, env: Mapping[str, str]) -> list[str]:
    """Run the recipe and nanoGPT alternately."""
    plan = dataclasses.replace(GPU, compile=True, batch_size=options.batch_size) if options.gpu else Plan()
    device = "cuda" if options.gpu else "cpu"
    if options.quick:
        plan = dataclasses.replace(plan, **QUICK)
    lines = []
    for tokenizer in ("bpe",) if options.gpu else ("char", "bpe"):
        data = prepared(work, tokenizer)
        if options.gpu:  # GPT-2's 50,304 tokens, which both take without a vocabulary
            data = bare(data, work)
        turns: list[tuple[str, Callable[[], Run]]] = [
            ("nanoGPT", lambda data=data: nanogpt(options.nanogpt.resolve(), data, plan, device, work, env)),
            ("outlast", lambda data=data: ours(data, plan, (), work, env)),
        ]
        if (cores := int(options.threads)) > 1 and not options.gpu:
            apiece = f"outlast, {cores} processes of a thread"
            turns.append((apiece, lambda data=data: ours(data, plan, (), work, env, cores)))
        runs: dict[str, list[Run]] = {name: [] for name, _ in turns}
        for number in range(1 if options.quick else options.repeats):
            for name, turn in turns if number % 2 == 0 else reversed(turns):
                runs[name].append(turn())
        lines += ["", f"{tokenizer}, a vocabulary of {size(data) or 50304}, {described(plan)}.", ""]
        lines += table(runs, plan.tokens, "nanoGPT")
        difference = apart(runs["outlast"], runs["nanoGPT"])
        lines += ["", f"Validation losses in the second half of the run differ by {difference:.3f} nats in the mean."]
    return lines


def bare(data: Path, work: Path) -> Path:
    """Copy the tokens without their vocabulary."""
    to = work / "bare"
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for name in ("train.bin", "val.bin"):
        (to / name).symlink_to(data / name)
    return to


def experts_beside_dense(options: argparse.Namespace, work: Path, env: Mapping[str, str]) -> list[str]:
    """Compare 2 of 8 experts of half the width with a dense model with as many multiplications per token."""
    plan = dataclasses.replace(GPU, batch_size=options.batch_size) if options.gpu else Plan()
    if options.quick:
        plan = dataclasses.replace(plan, **QUICK)
    data = prepared(work, "bpe")
    experts = f"--use-moe --num-experts=8 --num-experts-per-tok=2 --static-experts=0 --expert-hidden={2 * plan.n_embd}".split()
    runs: dict[str, list[Run]] = {"dense": [], "2 of 8 experts": []}
    for number in range(1 if options.quick else options.repeats):
        for name, more in list(zip(runs, ((), experts), strict=True))[:: 1 if number % 2 == 0 else -1]:
            runs[name].append(ours(data, plan, more, work, env))
    return ["", f"bpe, a vocabulary of {size(data)}, {described(plan)}.", "", *table(runs, plan.tokens, "dense")]


def described(plan: Plan) -> str:
    """Describe a plan."""
    model = f"{plan.n_layer} layers, {plan.n_head} heads, width {plan.n_embd}, {plan.dtype}{', compiled' if plan.compile else ''}"
    step = f"{plan.gradient_accumulation_steps} x {plan.batch_size} blocks of {plan.block_size} tokens a step"
    return f"{model}; {step}, {plan.max_iters} steps"


def machine(threads: str) -> str:
    """Describe the machine."""
    import torch

    from outlast.training import device

    name = device.of(device.computing()).name()
    what = name if torch.cuda.is_available() else f"{name}, {os.cpu_count()} cores, {threads} threads"
    return f"{what}; Python {platform.python_version()}, torch {torch.__version__}. Load before: {os.getloadavg()[0]:.2f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a clone of github.com/karpathy/nanoGPT")
    parser.add_argument("--moe", action="store_true", help="experts beside dense, without nanoGPT")
    parser.add_argument("--gpu", action="store_true", help="124M in bfloat16, on a GPU")
    parser.add_argument("--batch-size", type=int, default=16, help="with --gpu: blocks of a micro-batch")
    parser.add_argument("--threads", default=str(os.cpu_count()), help="OMP_NUM_THREADS of every process")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    parser.add_argument("--quick", action="store_true", help="one run of each, 100 steps")
    options = parser.parse_args()
    if not (options.moe or options.nanogpt):
        parser.error("give --nanogpt DIR (git clone https://github.com/karpathy/nanoGPT), or --moe")
    text = f"\n## {time.strftime('%H:%M')}: {'experts' if options.moe else 'beside nanoGPT'}\n\n{machine(options.threads)}\n"
    with tempfile.TemporaryDirectory() as directory:
        measure = experts_beside_dense if options.moe else beside_nanogpt
        text += "\n".join(measure(options, Path(directory), {"OMP_NUM_THREADS": options.threads})) + "\n"
    print(text)
    with (HERE / "results" / f"{time.strftime('%Y-%m-%d')}-gpt.md").open("a") as file:
        file.write(text)


if __name__ == "__main__":
    main()
