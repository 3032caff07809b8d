"""Ranks of two versions in one world read what the other pickles."""

from __future__ import annotations

import base64
import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest

from outlast.storage.checkpoints.on_disk import Commit
from outlast.storage.checkpoints.retention import Metric
from outlast.storage.snapshots.replicas import Place
from outlast.training.metrics import News
from outlast.training.state import exchanged
from outlast.training.state.background_save import Outcome, Written

METRIC = Metric(0.5, "val_loss", "min")

RECORDED: list[tuple[Any, str]] = [
    (
        Place("10.0.0.1:29400", "node-a", "zone-1"),
        (
            "gASVaAAAAAAAAACMF291dGxhc3Quc25hcHNob3RzLnBlZXJzlIwFUGxhY2WUk5QpgZR9lCiMB2FkZHJlc3OUjA4xMC4wLjAuMToy"
            "OTQwMJSMBG5vZGWUjAZub2RlLWGUjAR6b25llIwGem9uZS0xlHViLg=="
        ),
    ),
    (
        Written("", {"__0_0.distcp": {"size": 12, "crc32": 7}}, 34, METRIC, (Path("/proc/7/fd/8"), "No space left on device")),
        (
            "gASVOQEAAAAAAACMFm91dGxhc3QudHJhaW5pbmcuc2F2ZXKUjAhfV3JpdHRlbpSTlCmBlH2UKIwHcHJvYmxlbZSMAJSMBWZpbGVz"
            "lH2UjAxfXzBfMC5kaXN0Y3CUfZQojARzaXpllEsMjAVjcmMzMpRLB3VzjARzYW1llEsijAZtZXRyaWOUjB1vdXRsYXN0LmNoZWNr"
            "cG9pbnRzLnJldGVudGlvbpSMBk1ldHJpY5STlCmBlH2UKIwFdmFsdWWURz/gAAAAAAAAjAJieZSMCHZhbF9sb3NzlIwEbW9kZZSM"
            "A21pbpR1YowFYXNpZGWUjAdwYXRobGlilIwJUG9zaXhQYXRolJOUKIwBL5SMBHByb2OUjAE3lIwCZmSUjAE4lHSUUpSMF05vIHNw"
            "YWNlIGxlZnQgb24gZGV2aWNllIaUdWIu"
        ),
    ),
    (
        (Outcome(20, True), 1764158400.5, News(3, b'{"step": 3}\n')),
        (
            "gASVxAAAAAAAAACMFm91dGxhc3QudHJhaW5pbmcuc2F2ZXKUjAdPdXRjb21llJOUKYGUfZQojARzdGVwlEsUjAljb21taXR0ZWSU"
            "iIwGcmVhc29ulIwAlIwKc3VwZXJzZWRlZJSJjAllbHNld2hlcmWUaAh1YkdB2km68CAAAIwYb3V0bGFzdC50cmFpbmluZy5tZXRy"
            "aWNzlIwETmV3c5STlCmBlH2UKIwFc3RhcnSUSwOMBWxpbmVzlEMMeyJzdGVwIjogM30KlHVih5Qu"
        ),
    ),
    (
        Commit("run-1", 20, 3, 2, 1764158400.5, {".metadata": {"size": 5, "crc32": 9}}, METRIC),
        (
            "gASVDAEAAAAAAACMGG91dGxhc3QuY2hlY2twb2ludHMuZGlza5SMBkNvbW1pdJSTlCmBlH2UKIwDcnVulIwFcnVuLTGUjARzdGVw"
            "lEsUjApnZW5lcmF0aW9ulEsDjAp3b3JsZF9zaXpllEsCjAR0aW1llEdB2km68CAAAIwFZmlsZXOUfZSMCS5tZXRhZGF0YZR9lCiM"
            "BHNpemWUSwWMBWNyYzMylEsJdXOMBm1ldHJpY5SMHW91dGxhc3QuY2hlY2twb2ludHMucmV0ZW50aW9ulIwGTWV0cmljlJOUKYGU"
            "fZQojAV2YWx1ZZRHP+AAAAAAAACMAmJ5lIwIdmFsX2xvc3OUjARtb2RllIwDbWlulHVidWIu"
        ),
    ),
]
"""Values, and the pickles of the same ones by the version of 2026-11, whose packages had other names."""


@pytest.mark.parametrize(("value", "theirs"), RECORDED, ids=lambda value: type(value).__name__)
def test_pickles_are_those_of_ranks_that_have_the_classes_elsewhere(value: Any, theirs: str) -> None:
    exchanged.keep_names()
    assert pickle.loads(base64.b64decode(theirs)) == value
    assert texts(pickle.dumps(value)) == texts(base64.b64decode(theirs))


def texts(data: bytes) -> set[str]:
    """All texts of a pickle: names of modules, classes and fields, and texts in the values."""
    return {argument for _, argument, _ in pickletools.genops(io.BytesIO(data)) if isinstance(argument, str)}
