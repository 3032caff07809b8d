"""Fine-tuning by LoRA: `outlast.recipes.llm` beside the Trainer of Hugging Face with its defaults, in turn on one machine.

    python bench/llm.py --quick                # one run of each on a tiny model, a minute or two
    python bench/llm.py                        # 3 runs of each
    python bench/llm.py --gpu --model DIR      # a model of yours in bfloat16, on a GPU

Same model, data, samples of a micro-batch and of a step, optimizer, LoRA and schedule. Counted are tokens of samples, prompts
included and padding not, per second of the steps after the first few, which warm up. `Trainer` pads each micro-batch to its
longest sample and computes all logits; its type is the default (float32) and also bfloat16 (`bf16=True`), so that it is seen
what the type alone brings. Prints medians and ratios, and appends them to results/<date>-llm.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
SYSTEMS = ("trainer", "trainer bf16", "outlast float32", "outlast")
WARM = 3
"""Number of warm-up steps, which do not count."""


def made(to: Path, options: argparse.Namespace) -> Path:
    """Write a model with random weights, its tokenizer, and conversations of very different lengths, as in real data."""
    from outlast.recipes import llm_tiny

    questions = list(llm_tiny.questions())
    texts = [message["content"] for record in questions for message in record["messages"]]
    known = llm_tiny.trained_tokenizer(texts, options.vocab_size)
    model = llm_tiny.model(
        "llama", options.vocab_size, layers=options.layers, width=options.width, positions=1024, seed=0,
        eos_token_id=known.eos_token_id,
    )  # fmt: skip
    model.save_pretrained(str(to / "model"))
    known.save_pretrained(str(to / "model"))
    return to / "model"


def records(to: Path, count: int) -> Path:
    """Write conversations of 1 to 8 turns, with a long tail of lengths as in instruction sets."""
    from outlast.recipes import llm_tiny

    questions, draw = list(llm_tiny.questions()), random.Random(0)
    with to.open("w") as file:
        for _ in range(count):
            turns = [draw.choice(questions)["messages"] for _ in range(min(8, 1 + int(draw.expovariate(0.6))))]
            file.write(json.dumps({"messages": [message for turn in turns for message in turn]}) + "\n")
    return to


def outlast(model: Path, data: Path, options: argparse.Namespace, output: Path, dtype: str) -> dict[str, float]:
    """Run the recipe. Returns its tokens per second, its last loss and its number of tokens."""
    command = [
        sys.executable, "-m", "outlast.recipes.llm", f"--model-local-dir={model}", f"--data={data}", f"--output={output}",
        f"--batch={options.batch}", f"--grad-accum={options.grad_accum}", f"--max-steps={options.steps}", "--val=none",
        f"--seq-len={options.seq_len}", f"--dtype={dtype}", "--lora", "--lr=2e-4", "--no-epoch-results", "--log-batches=none",
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "OUTLAST_CACHE": str(output)}, stdout=subprocess.DEVNULL)
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    tokens, seconds = (steps[-1][name] - steps[WARM - 1][name] for name in ("tokens", "time"))
    return {"tokens_per_s": tokens / seconds, "loss": steps[-1]["loss"], "tokens": steps[-1]["tokens"]}


def trainer(model: Path, data: Path, options: argparse.Namespace, output: Path, *, bf16: bool) -> dict[str, float]:
    """Run the Trainer in a separate process."""
    plan = {**vars(options), "model": str(model), "data": str(data), "output": str(output), "bf16": bf16, "results": ""}
    subprocess.run([sys.executable, __file__, "--as-trainer", json.dumps(plan)], check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads((output / "trainer.json").read_text()))


def as_trainer(plan: dict[str, Any]) -> None:
    """Train as a user of transformers would: tokenized records, DataCollatorForSeq2Seq, Trainer."""
    import peft
    import torch
    import transformers

    from outlast.data.prepare import chat, jsonl

    known = transformers.AutoTokenizer.from_pretrained(plan["model"])
    samples = []
    for line in Path(plan["data"]).read_text().splitlines():
        record = json.loads(line)
        ids, labels = chat.sample(record, jsonl.segments(record, None, 0), known)  # type: ignore[arg-type]
        samples.append({"input_ids": ids[: plan["seq_len"]].tolist(), "labels": labels[: plan["seq_len"]].tolist()})
    model = transformers.AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32)
    config = peft.LoraConfig(r=16, lora_alpha=16, lora_dropout=0.05, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    times: list[tuple[float, int]] = []
    collate = transformers.DataCollatorForSeq2Seq(known)
    real = 0

    def collated(some: list[dict[str, Any]]) -> Any:
        nonlocal real
        real += sum(len(sample["input_ids"]) for sample in some)
        return collate(some)

    class Times(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **options: Any) -> None:
            times.append((time.monotonic(), real))

    arguments = transformers.TrainingArguments(
        output_dir=plan["output"], per_device_train_batch_size=plan["batch"], gradient_accumulation_steps=plan["grad_accum"],
        max_steps=plan["steps"], learning_rate=2e-4, bf16=plan["bf16"], use_cpu=not plan["gpu"], report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True, seed=42, remove_unused_columns=False, weight_decay=0.05,
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config)
    made = transformers.Trainer(model=adapted, args=arguments, train_dataset=samples, data_collator=collated, callbacks=[Times()])
    made.train()
    (began, before), (ended, after) = times[WARM - 1], times[-1]
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    found = {"tokens_per_s": (after - before) / (ended - began), "loss": losses[-1], "tokens": after}
    Path(plan["output"], "trainer.json").write_text(json.dumps(found))


def machine() -> str:
    """Describe the machine."""
    import torch
    import transformers

    from outlast.training import device

    about = f"{device.find().name()}, {os.cpu_count()} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{about}; {versions}. Load before: {os.getloadavg()[0]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory of Hugging Face; default: a tiny Llama made here")
    parser.add_argument("--gpu", action="store_true", help="on a GPU")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument(
        "--vocab-size", type=int, default=8192, help="of the model; real ones have more, which favours us further"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--grad-accum", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run of each, 10 steps")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--as-trainer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_trainer:
        as_trainer(json.loads(options.as_trainer))
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.quick:
        options.steps, options.repeats = 10, 1
    del options.as_trainer
    where, runs = machine(), {name: [] for name in SYSTEMS}  # type: dict[str, list[dict[str, float]]]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        model = options.model or made(work, options)
        data = records(work / "train.jsonl", options.steps * options.batch * options.grad_accum)
        for number in range(options.repeats):
            for name in SYSTEMS[:: 1 if number % 2 == 0 else -1]:
                output = work / f"{name}-{number}"
                output.mkdir()
                if name.startswith("trainer"):
                    runs[name].append(trainer(model, data, options, output, bf16=name.endswith("bf16")))
                else:
                    runs[name].append(outlast(model, data, options, output, "float32" if name.endswith("32") else "auto"))
    written(options, where, runs)


def written(options: argparse.Namespace, where: str, runs: dict[str, list[dict[str, float]]]) -> None:
    """Print the table, and append it to the results."""
    speed = {name: statistics.median(run["tokens_per_s"] for run in several) for name, several in runs.items()}
    shape = (
        f"{options.layers} layers, width {options.width}, vocabulary {options.vocab_size}"
        if not options.model
        else options.model.name
    )
    step = f"{options.grad_accum} x {options.batch} samples a step, at most {options.seq_len} tokens, {options.steps} steps"
    lines = ["| system | tokens/s: median (range) | / trainer | / trainer bf16 | last loss |", "|---|---|---|---|---|"]
    for name, several in runs.items():
        each = [run["tokens_per_s"] for run in several]
        ratios = " | ".join(f"{speed[name] / speed[peer]:.2f}" for peer in SYSTEMS[:2])
        loss = statistics.mean(run["loss"] for run in several)
        lines.append(f"| {name} | {speed[name]:,.0f} ({min(each):,.0f} – {max(each):,.0f}) | {ratios} | {loss:.3f} |")
    text = f"\n## {time.strftime('%H:%M')}: LoRA\n\n{where}. {shape}; {step}.\n\n" + "\n".join(lines) + "\n"
    print(text)
    day = time.strftime("%Y-%m-%d")
    with (options.results / f"{day}-llm.md").open("a") as file:
        file.write(text)
    document = {"machine": where, "model": shape, "step": step, "quick": options.quick, "runs": runs, "tokens_per_s": speed}
    with (options.results / f"{day}-llm.json").open("a") as file:
        file.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
