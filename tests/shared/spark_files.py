"""Example files of Spark."""

from __future__ import annotations

from pathlib import Path

SPARK = Path(__file__).parents[2] / "examples" / "spark"


PROGRAM = "local:///opt/outlast/outlast-cli.py"
