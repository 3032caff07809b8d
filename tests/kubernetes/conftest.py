"""Fixtures of tests of Kubernetes."""

from bare_pods import pods  # noqa: F401
from operators import world  # noqa: F401
