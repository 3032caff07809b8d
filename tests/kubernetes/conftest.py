"""Fixtures of tests of Kubernetes."""

from apiserver import again_soon  # noqa: F401
from bare_pods import pods  # noqa: F401
from kubelets import operated  # noqa: F401
from operators import world  # noqa: F401
