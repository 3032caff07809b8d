"""Fixtures of tests of this machine."""

from bare_pods import pods  # noqa: F401
from here import here  # noqa: F401
