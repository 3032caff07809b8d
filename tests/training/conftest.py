"""Fixtures of tests of training."""

import os

from ranks import agents, rank  # noqa: F401

collect_ignore = ["test_accelerate.py", "test_hf.py", "test_lightning.py"] if "PYTEST_XDIST_WORKER" in os.environ else []
"""Modules that import large libraries: in a process that holds them, each fork and each garbage collection takes longer."""
