"""Fixtures of tests of the command line."""

from apiserver import again_soon  # noqa: F401
