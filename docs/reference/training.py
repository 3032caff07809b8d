"""Writes the reference page of `outlast.training` from its signatures and docstrings:

python docs/reference/training.py > docs/reference/training.md
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from outlast import checkpoints, training
from outlast.training import session
from outlast.training.state import checkpoint

HEAD = """\
# outlast.training

<!-- Written by `python docs/reference/training.py > docs/reference/training.md` from the docstrings in src/outlast/training. -->

What a training script imports. [Exact resume](../guide/exact-resume.md) shows a whole script and says why;
[mistakes](../guide/mistakes.md) lists what is refused. A *collective* is a call that every rank makes, in the same order. An
`OutlastError` is a mistake that the script's author can mend.

The output, `run.output`, is the job's under Outlast, and `out/` in the working directory under `python` and `torchrun`, unless
the environment variable `OUTLAST_OUTPUT` names another. `checkpoints/`, `metrics.jsonl` and exported weights are in it.
"""

ENTRIES: dict[str, Any] = {
    "session.open": session.open,
    "Session": training.Session,
    "Stream": training.Stream,
    "Batch": training.Batch,
    "Shards": training.Shards,
    "Stateful": training.Stateful,
    "checkpoint.restore": checkpoint.restore,
    "outlast.checkpoints.list_": checkpoints.list_,
    "outlast.checkpoints.latest": checkpoints.latest,
    "outlast.checkpoints.Checkpoint": checkpoints.Checkpoint,
} | {name: thing for name, thing in vars(training).items() if name in training.__all__ and inspect.isfunction(thing)}


OURS = {
    *("await_", "ended", "fingerprint", "reading", "remedy", "remote", "sample", "saved_with", "saves", "take", "undealt"),
    "windows",
}
"""Attributes and methods of a Stream and of Shards that are not for scripts."""


def page() -> str:
    """The page, in Markdown."""
    return HEAD + "".join(f"\n## {name}\n\n{entry(name, thing)}" for name, thing in ENTRIES.items())


def entry(name: str, thing: Any) -> str:
    """A function; or a class with its attributes and methods."""
    if not inspect.isclass(thing):
        return f"{called(name, thing)}\n{text(thing.__doc__)}"
    made = thing in (training.Stream, training.Shards, training.Stateful)  # the others are handed out
    said = (called(name, thing) + "\n" if made else "") + text(thing.__doc__)
    rows = [f"| `{field}` | `{kind}` | {doc} |\n" for field, kind, doc in attributes(thing)]
    said += "\n| attribute | type | |\n|---|---|---|\n" + "".join(rows) if rows else ""
    owner = {
        training.Session: "run.",
        training.Batch: "batch.",
        training.Stream: "stream.",
        training.Shards: "shards.",
        training.Stateful: "loader.",
    }.get(thing, "")
    for method, function in vars(thing).items():
        if inspect.isfunction(function) and not method.startswith("_") and method not in OURS:
            said += f"\n### {owner}{method}\n\n{called(owner + method, function)}\n{text(function.__doc__)}"
    return said


def called(name: str, function: Callable[..., Any]) -> str:
    """How it is called, a parameter a line if that is long."""
    signature = inspect.signature(function)
    said = []
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in said:
            said.append("*")
        star = "**" if each.kind is each.VAR_KEYWORD else ""
        default = "" if each.default is each.empty else f" = {each.default!r}"
        if each.name != "self":
            said.append(f"{star}{each.name}: {each.annotation}{default}")
    result = "" if signature.return_annotation in (signature.empty, "None") else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(said)}){result}"
    if len(line) > 120:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in said) + f"){result}"
    return f"```python\n{line}\n```\n"


def attributes(thing: type) -> Iterator[tuple[str, str, str]]:
    """Name, type and docstring of what a class says of its fields, in its body or in `__init__`, and of its properties."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    assert isinstance(body, ast.ClassDef)
    init = [node.body for node in body.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    for nodes in [body.body, *init]:
        for node, after in zip(nodes, [*nodes[1:], None], strict=True):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            field = ast.unparse(target).removeprefix("self.") if target else ""
            doc = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            kind = kind or type(getattr(node, "value", None) and ast.literal_eval(node.value)).__name__ if doc else kind
            if field.isidentifier() and not field.startswith("_") and field not in OURS and (doc or nodes is body.body):
                yield field, kind.replace("|", "\\|"), " ".join(str(doc).split())
    for field, value in vars(thing).items():
        if isinstance(value, property) and not field.startswith("_") and field not in OURS and value.fget:
            yield field, str(value.fget.__annotations__.get("return", "")), " ".join(str(value.__doc__).split())


def text(doc: str | None) -> str:
    """A docstring as Markdown: its references to our own names are code already, blocks of code are fenced."""
    parts = inspect.cleandoc(doc or "").split("\n\n")
    fenced = [f"```python\n{textwrap.dedent(part)}\n```" if part.startswith("    ") else part for part in parts]
    return re.sub(r"\n\n+", "\n\n", "\n\n".join(fenced)) + "\n"


if __name__ == "__main__":
    print(page(), end="")
