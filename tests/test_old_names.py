"""Processes that an earlier version started find modules by the names that they know (`outlast.runtime`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import outlast

SOURCE = Path(outlast.__file__).parent


@pytest.mark.parametrize("how", [["-m", "outlast.runtime.rank"], ["-m", "outlast.launch.rank"]])
def test_a_rank_runs_under_its_old_name(tmp_path: Path, how: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(__name__, sys.argv[1:])")
    done = subprocess.run(
        [sys.executable, *how, str(script), "--lr", "1"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout == "__main__ ['--lr', '1']\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("backends/launcher.py", "local/launcher.py"),
        ("runtime/agent.py", "agent/agent.py"),
        ("runtime/push.py", "agent/upload.py"),
        ("runtime/shim.py", "launch/shim.py"),
        ("runtime/warm.py", "launch/warm.py"),
        ("runtime/work.py", "prepare/workdir.py"),
    ],
)
def test_what_runs_under_an_old_name_is_what_runs_under_the_new_one(tmp_path: Path, old: str, new: str) -> None:
    """Without what it needs each fails at the same place."""

    def ended(path: str) -> tuple[int, str]:
        how = [str(SOURCE / path)] if "shim" in path else ["-m", "outlast." + path.removesuffix(".py").replace("/", ".")]
        done = subprocess.run(
            [sys.executable, *how], capture_output=True, text=True, cwd=tmp_path, env={"HOME": str(tmp_path)}, timeout=60
        )
        return done.returncode, done.stderr.strip().rpartition("\n")[2]

    code, error = ended(new)
    assert code != 0
    assert ended(old) == (code, error)
