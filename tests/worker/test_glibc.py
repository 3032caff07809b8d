"""Large copies of training processes bypass the caches, unless the user has set the limit."""

import pytest

from outlast.worker.launch import os_calls

OURS = "glibc.cpu.x86_non_temporal_threshold=0x100000"


@pytest.mark.parametrize(
    ("given", "set_"),
    [
        ("", OURS),
        ("glibc.malloc.check=1", f"glibc.malloc.check=1:{OURS}"),
        ("glibc.cpu.x86_non_temporal_threshold=0x800000", None),
    ],
)
def test_a_limit_is_added_to_what_the_user_has_set(given: str, set_: str | None) -> None:
    assert os_calls.streaming({os_calls.VARIABLE: given} if given else {}).get(os_calls.VARIABLE) == set_
