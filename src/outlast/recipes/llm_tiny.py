"""Writes a tiny model and questions to fine-tune it on, so that `llm` needs no download.

    python -m outlast.recipes.llm_tiny data/llm

The subdirectory model/ contains a Llama with random weights, and a tokenizer trained on the questions, in Hugging Face's format.
train.jsonl and val.jsonl contain questions about functions of Python's standard library, answered by the functions' docstrings.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outlast.base import files
from outlast.base.errors import OutlastError, importing
from outlast.data.prepare import chat, source_files, tokenizer
from outlast.recipes.shared import results, settings
from outlast.recipes.shared.settings import flag

MODULES = (  # chosen because their docstrings consist of sentences
    "argparse", "ast", "calendar", "configparser", "datetime", "difflib", "fractions", "inspect", "json", "logging", "os",
    "pathlib", "random", "shutil", "statistics", "string", "textwrap", "tokenize",
)  # fmt: skip
QUESTION = "What does {name}({arguments}) of {module} do?"


@dataclass(frozen=True)
class Settings:
    to: str = flag("data/llm", "directory to write", first=True)
    layers: int = flag(2, "decoder layers", least=1)
    width: int = flag(128, "width of the residual stream; heads are 32 wide", least=32)
    vocab_size: int = flag(1024, "tokens", least=300)
    positions: int = flag(512, "maximum length of a sample in tokens", least=16)
    kind: str = flag("llama", "llama or qwen2")
    seed: int = flag(0, "seed of the weights")


def questions() -> Iterator[dict[str, Any]]:
    """Yield conversations about the standard library of the running Python, always in the same order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in MODULES:
        path = library / f"{module}.py" if (library / f"{module}.py").exists() else library / module / "__init__.py"
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and (about := ast.get_docstring(node)):
                sentence = " ".join(about.partition("\n\n")[0].split())
                if 15 <= len(sentence) <= 200:
                    question = QUESTION.format(
                        name=node.name, arguments=", ".join(each.arg for each in node.args.args), module=module
                    )
                    yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": sentence}]}


def model(kind: str, vocab_size: int, *, layers: int, width: int, positions: int, seed: int, **more: Any) -> Any:
    """Return a model with random weights. Raises OutlastError if `kind` is neither llama nor qwen2."""
    transformers = _library()
    kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}
    if kind not in kinds:
        raise OutlastError(f"--kind {kind} is none of {', '.join(kinds)}; give one of these")
    heads = max(1, width // 32)
    about = {
        "vocab_size": vocab_size, "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2), "max_position_embeddings": positions,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": True,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(kinds[kind](**about | more), dtype=torch.float32)


def _library() -> Any:
    with importing("a tiny model", "llm"):
        import transformers
    return transformers


def trained_tokenizer(texts: Sequence[str], size: int) -> Any:
    """Train a byte-level BPE tokenizer on the given texts, and wrap it for transformers."""
    made = tokenizer.library().Tokenizer.from_str(tokenizer.train(texts, size))
    wrapped = _library().PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=tokenizer.SEPARATOR, pad_token=tokenizer.SEPARATOR
    )
    wrapped.chat_template = chat.TEMPLATE
    return wrapped


def main(argv: Sequence[str] | None = None) -> None:
    """Write the model and the questions."""
    s = settings.parse(Settings, argv, __doc__)
    to = Path(s.to)
    records = list(questions())
    lines = [json.dumps(record) for record in records]
    parts = {
        "val": [line for line in lines if source_files.hash_fraction(line) < 0.1],
        "train": [line for line in lines if source_files.hash_fraction(line) >= 0.1],
    }
    transformers = _library()
    words = trained_tokenizer([m["content"] for record in records for m in record["messages"]], s.vocab_size)
    made = model(
        s.kind, len(words), layers=s.layers, width=s.width, positions=s.positions, seed=s.seed, eos_token_id=words.eos_token_id
    )
    to.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    made.save_pretrained(str(to / "model"))
    words.save_pretrained(str(to / "model"))
    for part, some in parts.items():
        files.replace(to / f"{part}.jsonl", "\n".join(some) + "\n", durable=True)
    count = sum(p.numel() for p in made.parameters())
    train, val = len(parts["train"]), len(parts["val"])
    print(f"{to}: a {s.kind} of {count / 1e6:.1f}M parameters, {train} questions to train on, {val} to measure")


if __name__ == "__main__":
    results.run(main)
