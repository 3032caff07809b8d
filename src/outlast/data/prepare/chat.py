"""Turns records into tokens with a Hugging Face tokenizer, which is a directory with `tokenizer.json` and, for chats, a template.

The tokenizer's chat template renders `messages`. The loss covers only the assistant's messages, including each turn's end token.
`prompt` and `completion`, or `text`, are encoded between the tokenizer's first token and its end token.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlast.base.errors import OutlastError, importing

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Default chat template for tokenizers without one: role marker, newline, content."""
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""Files that determine how a tokenizer encodes."""
NOT_LEARNED = -100
"""Label that torch's cross entropy ignores by default."""
Sample = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Tokens and labels, both int32 of shape (t,)."""


class Refused(OutlastError):
    """Raised if the chat template cannot render a record. The caller adds file and line to the message."""


def digest(directory: Path) -> str:
    """Return a hash of the tokenizer's FILES. Raises OutlastError if there is no tokenizer.json."""
    if not (directory / FILES[0]).is_file():
        raise OutlastError(
            f"{directory} has no tokenizer.json; name a directory of Hugging Face that has one (--tokenizer-local-dir)"
        )
    hashed = hashlib.sha256()
    for name in FILES:
        if (directory / name).is_file():
            hashed.update(f"{name}\0".encode() + (directory / name).read_bytes())
    return hashed.hexdigest()


@functools.lru_cache(maxsize=1)
def load(directory: Path, digest: str) -> Any:
    """Load the tokenizer with this `digest` from a directory, and add a chat template if it has none. Each process caches the
    last tokenizer. Raises OutlastError."""
    os.environ.setdefault(
        "TRANSFORMERS_VERBOSITY", "error"
    )  # otherwise transformers warns about texts longer than the model's context
    with importing("a tokenizer of Hugging Face", "llm"):
        from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # transformers and tokenizers may raise anything
        reason = " ".join(str(error).split())[:300]
        raise OutlastError(
            f"{directory} has no tokenizer that transformers can read: {reason}; name another directory"
        ) from error
    if not tokenizer.is_fast:
        raise OutlastError(f"{directory} has no tokenizer.json, but a tokenizer that is written in Python; convert it to one")
    if tokenizer.eos_token_id is None:
        raise OutlastError(f"the tokenizer in {directory} has no eos_token, which ends what is learned; name one in its config")
    if not tokenizer.chat_template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def sample(record: Mapping[str, Any], segments: Sequence[tuple[str, str, bool]], tokenizer: Any) -> Sample:
    """Return a record's tokens and labels (int32), given its `jsonl.segments`. Raises Refused if it cannot be rendered."""
    ids, learned = _chat(record, tokenizer) if "messages" in record else _plain(segments, tokenizer)
    tokens = np.array(ids, np.int32)
    return tokens, np.where(np.array(learned, bool), tokens, NOT_LEARNED).astype(np.int32)


def _plain(segments: Sequence[tuple[str, str, bool]], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Encode the texts separately, so that no token spans the prompt and the completion."""
    ids = list(_first(tokenizer))
    learned = [False] * len(ids)
    for _, text, learn in segments:
        some = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += some
        learned += [learn] * len(some)
    return [*ids, tokenizer.eos_token_id], [*learned, True]


def _first(tokenizer: Any) -> list[int]:
    """Return the token that the tokenizer prepends to every text, as a list; empty if there is none."""
    some = tokenizer("a")["input_ids"]
    return some[:1] if some and some[0] == tokenizer.bos_token_id else []


def _chat(record: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return a rendered conversation's tokens, and whether each token is learned. The learned tokens are those in `{% generation
    %}` blocks, or in the assistant's turns if the template has no such block."""
    messages, tools = record["messages"], record.get("tools")
    if "generation %}" in tokenizer.chat_template or "generation -%}" in tokenizer.chat_template:
        options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        rendered = _rendered(tokenizer, messages, tools, **options)
        return list(rendered["input_ids"]), [bool(each) for each in rendered["assistant_masks"]]
    whole = _rendered(tokenizer, messages, tools, tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            begin = (
                _common(whole, _rendered(tokenizer, messages[:i], tools, tokenize=False, add_generation_prompt=True)) if i else 0
            )
            end = _common(whole, _rendered(tokenizer, messages[: i + 1], tools, tokenize=False))
            spans.append((begin, begin + len(whole[begin:end].rstrip("\n"))))  # the turn ends with its end token
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    places = encoded["offset_mapping"]
    return encoded["input_ids"], [any(a <= start and end <= b for a, b in spans) and start < end for start, end in places]


def _rendered(tokenizer: Any, messages: Any, tools: Any, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **options)
    except Exception as error:  # a template may raise anything
        reason = " ".join(str(error).split())[:200]
        raise Refused(f"is refused by the tokenizer's chat template: {reason}") from error


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix: some templates render the last turn differently, e.g. with its reasoning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
