"""The guide to security says what tests hold, and a few of those."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from outlast.base import unix_sockets

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(test_\w+)`", GUIDE)))
TESTS = set(re.findall(r"^def (test_\w+)\(", "".join(path.read_text() for path in ROOT.glob("tests/*/test_*.py")), re.MULTILINE))
ROWS = [
    line for line in GUIDE.splitlines() if line.startswith("| ") and not line.startswith(("| |", "| token", "| the ", "| a "))
]


def test_the_guide_names_tests_that_there_are() -> None:
    assert [name for name in NAMED if name not in TESTS] == []


def test_every_row_is_held_by_a_test_or_not_defended() -> None:
    assert len(ROWS) > 30
    assert [row for row in ROWS if "**not defended**" not in row and not re.search(r"`test_\w+`", row)] == []


def test_a_socket_is_its_users_alone(tmp_path: Path) -> None:
    with unix_sockets.listening(tmp_path / "socket"):
        assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) == 0o600


def test_verification_is_switched_off_nowhere() -> None:
    off = re.compile(
        r"CERT_NONE|verify\s*=\s*False|check_hostname\s*=\s*False|_create_unverified_context|allow_invalid_certificates"
    )
    assert [path.name for path in (ROOT / "src").rglob("*.py") if off.search(path.read_text())] == []
