"""Fixtures of tests of training."""

from ranks import agents, rank  # noqa: F401
