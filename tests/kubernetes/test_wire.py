"""Documents as the API server sends them: whatever their authors wrote, they are read within bounds."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.kubernetes.api import document_parsing
from outlast.kubernetes.api.kinds import CONFIG_MAP, ELASTIC_JOB, LEASE, LEGACY_JOB, POD

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside, max_size=3), max_leaves=9)
DOCUMENTS = st.dictionaries(st.text(), VALUES, max_size=3)
FEW = settings(max_examples=settings.default.max_examples * 2 // 5)


def a_job(template: str, *, managed: str = "{}", name: str = "bad") -> bytes:
    """The text of a job with this template, and with these managedFields."""
    meta = f'{{"managedFields":[{managed}],"name":"{name}","namespace":"default","uid":"u-{name}","resourceVersion":"7"}}'
    spec = f'{{"managedBy":"x","template":{template},"workers":{{"replicas":2}}}}'
    return f'{{"apiVersion":"outlast.dev/v1","kind":"ElasticJob","metadata":{meta},"spec":{spec},"status":{{"n":1}}}}'.encode()


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@FEW
@given(DOCUMENTS, st.sampled_from([None, 1, "\t"]))
def test_a_document_is_read_as_it_is_written(document: dict[str, Any], indent: Any) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False).encode()
    assert document_parsing.document(text, ELASTIC_JOB) == document == document_parsing.document(text, POD)


@FEW
@given(st.lists(DOCUMENTS, max_size=3), st.booleans())
def test_a_list_is_read_one_document_at_a_time(documents: list[dict[str, Any]], sorted_: bool) -> None:
    whole = {"kind": "List", "metadata": {"resourceVersion": "7"}, "items": documents, "else": [{}]}
    meta, items = document_parsing.page(json.dumps(whole, sort_keys=sorted_).encode(), POD)
    assert (meta, list(items)) == ({"resourceVersion": "7"}, documents)


@given(st.sampled_from([ELASTIC_JOB, POD]), st.binary() | st.text(alphabet='{}[],:"\\ a1').map(str.encode))
def test_what_is_no_document_is_a_value_error(kind: Any, text: bytes) -> None:
    try:
        found = document_parsing.document(text, kind)
    except ValueError:
        return
    assert found == json.loads(text)


@pytest.fixture
def usual_recursion() -> Iterator[None]:
    """Python's own limit, which test runners raise: below it json reads what is not measured first."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("kind", [ELASTIC_JOB, LEGACY_JOB, CONFIG_MAP])
@pytest.mark.parametrize("depth", [1_100, 9_900, 600_000])
def test_what_is_nested_too_deep_is_left_out_and_said(kind: Any, depth: int, usual_recursion: None) -> None:
    found = document_parsing.document(a_job(nested(depth), managed=f'{{"f":{nested(depth)}}}'), kind)
    assert found[document_parsing.UNREADABLE] == "its spec is nested more than 100 levels deep; make it flatter"
    assert found["metadata"] == {"name": "bad", "namespace": "default", "uid": "u-bad", "resourceVersion": "7"}
    assert (found["spec"], found["status"]) == ({"managedBy": "x"}, {"n": 1})


def test_what_is_not_too_deep_is_read_whole() -> None:
    text = a_job(nested(document_parsing.MAX_DEPTH - 5))
    assert document_parsing.document(text, ELASTIC_JOB) == json.loads(text)


@pytest.mark.parametrize("body", ["{}", "[{}]", "[[{}]]", '{"a":{}}', '"}{]["', "1e9"])
def test_what_is_too_large_is_left_out_and_takes_no_memory(body: str) -> None:
    fat = "[" + f"{body}," * (400_000 // (len(body) + 1)) + "1]"
    text = a_job(fat, managed=f'{{"f":{fat}}}')
    tracemalloc.start()
    found = document_parsing.document(text, ELASTIC_JOB)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        found[document_parsing.UNREADABLE]
        == f"its spec takes {(len(fat) + 51) >> 10} KiB; at most 128 KiB are read: make it smaller"
    )
    assert peak < 2**20, "the text is there already; parsed it takes 10 MiB"


def test_metadata_that_is_too_large_is_read_as_far_as_the_server_has_written_it() -> None:
    labels = ",".join(f'"l{n}":""' for n in range(100_000))
    lease = f'{{"metadata":{{"name":"a","uid":"u","resourceVersion":"7","labels":{{{labels}}}}},"spec":{{}}}}'.encode()
    found = document_parsing.document(lease, LEASE)
    assert found["metadata"] == {"name": "a", "uid": "u", "resourceVersion": "7"}
    assert found[document_parsing.UNREADABLE].startswith("its metadata takes ")


def test_an_event_of_a_watch_is_read_within_the_same_bounds() -> None:
    line = b'{"type":"ADDED","object":' + a_job(nested(1_100)) + b"}"
    type_, found = document_parsing.event(line, ELASTIC_JOB)
    assert (type_, found["metadata"]["name"], document_parsing.UNREADABLE in found) == ("ADDED", "bad", True)
    assert document_parsing.event(b'{"type":"DELETED","object":{"a":1}}', POD) == ("DELETED", {"a": 1})
    for text in (b"[]", b'{"type":"ADDED"}', b'{"type":"ADDED","object":[]}'):
        for kind in (ELASTIC_JOB, POD):
            with pytest.raises(ValueError, match="no "):
                document_parsing.event(text, kind)
