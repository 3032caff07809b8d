"""Records to tokens by a tokenizer of Hugging Face: a directory with `tokenizer.json` and, for chats, its template.

The one module besides the recipe that knows transformers. `messages` are rendered by the tokenizer's chat template, and what the
assistant says is learned, with the token that ends its turn. `prompt` and `completion`, and `text`, are taken as they are: the
tokenizer's first token before them, its end token after them. A tokenizer without a template gets `TEMPLATE`.
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

from outlast.base.errors import OutlastError

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""A chat for tokenizers that have none: a marker of the role, a newline, the content."""
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""What decides how a tokenizer encodes."""
NOT_LEARNED = -100
"""What torch's cross entropy ignores by default."""
Sample = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Tokens and labels, both int32 of shape (t,)."""


class Refused(OutlastError):
    """A record that the chat template cannot render; the sentence lacks the file and the line."""


def digest(directory: Path) -> str:
    """What tells two tokenizers apart: a hash of the files that decide how they encode. Raises OutlastError if there is none."""
    if not (directory / FILES[0]).is_file():
        raise OutlastError(
            f"{directory} has no tokenizer.json; name a directory of Hugging Face that has one (--tokenizer-local-dir)"
        )
    found = hashlib.sha256()
    for name in FILES:
        if (directory / name).is_file():
            found.update(f"{name}\0".encode() + (directory / name).read_bytes())
    return found.hexdigest()


@functools.lru_cache(maxsize=1)
def load(directory: Path, digest: str) -> Any:
    """The tokenizer in a directory, with a chat template; one per process. `digest` tells versions apart. Raises OutlastError."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that texts are longer than the model's positions
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise OutlastError("a tokenizer of Hugging Face needs transformers; run: pip install 'outlast[llm]'") from error
    try:
        known = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise anything
        reason = " ".join(str(error).split())[:300]
        raise OutlastError(
            f"{directory} has no tokenizer that transformers can read: {reason}; name another directory"
        ) from error
    if not known.is_fast:
        raise OutlastError(f"{directory} has no tokenizer.json, but a tokenizer that is written in Python; convert it to one")
    if known.eos_token_id is None:
        raise OutlastError(f"the tokenizer in {directory} has no eos_token, which ends what is learned; name one in its config")
    if not known.chat_template:
        known.chat_template = TEMPLATE
    return known


def sample(record: Mapping[str, Any], segments: Sequence[tuple[str, str, bool]], known: Any) -> Sample:
    """Tokens and labels of a record. `segments` are its role, text and whether it is learned, as `jsonl.segments` checked them.

    Raises Refused if the template does not render it.
    """
    ids, learned = _chat(record, known) if "messages" in record else _plain(segments, known)
    tokens = np.array(ids, np.int32)
    return tokens, np.where(np.array(learned, bool), tokens, NOT_LEARNED).astype(np.int32)


def _plain(segments: Sequence[tuple[str, str, bool]], known: Any) -> tuple[list[int], list[bool]]:
    """Texts one after the other, each encoded by itself, so that no token is half prompt and half completion."""
    ids = list(_first(known))
    learned = [False] * len(ids)
    for _, text, learn in segments:
        some = known(text, add_special_tokens=False)["input_ids"]
        ids += some
        learned += [learn] * len(some)
    return [*ids, known.eos_token_id], [*learned, True]


def _first(known: Any) -> list[int]:
    """The token that this tokenizer puts before every text, if any."""
    some = known("a")["input_ids"]
    return some[:1] if some and some[0] == known.bos_token_id else []


def _chat(record: Mapping[str, Any], known: Any) -> tuple[list[int], list[bool]]:
    """A conversation as the template renders it; what its `{% generation %}` marks, or else what the assistant's turns add."""
    messages, tools = record["messages"], record.get("tools")
    if "generation %}" in known.chat_template or "generation -%}" in known.chat_template:
        options: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = _rendered(known, messages, tools, **options)
        return list(found["input_ids"]), [bool(each) for each in found["assistant_masks"]]
    whole = _rendered(known, messages, tools, tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            begin = _common(whole, _rendered(known, messages[:i], tools, tokenize=False, add_generation_prompt=True)) if i else 0
            end = _common(whole, _rendered(known, messages[: i + 1], tools, tokenize=False))
            spans.append((begin, begin + len(whole[begin:end].rstrip("\n"))))  # after its end token nobody reads on
    encoded = known(whole, add_special_tokens=False, return_offsets_mapping=True)
    places = encoded["offset_mapping"]
    return encoded["input_ids"], [any(a <= start and end <= b for a, b in spans) and start < end for start, end in places]


def _rendered(known: Any, messages: Any, tools: Any, **options: Any) -> Any:
    try:
        return known.apply_chat_template(messages, tools=tools, **options)
    except Exception as error:  # a template raises what it likes
        reason = " ".join(str(error).split())[:200]
        raise Refused(f"is refused by the tokenizer's chat template: {reason}") from error


def _common(one: str, other: str) -> int:
    """Length of the common beginning: templates render the last turn otherwise than earlier ones, e.g. without its thoughts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
