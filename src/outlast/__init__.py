"""Outlast: distributed PyTorch training that outlasts its machines.

The names of the Python API are imported from `outlast.client` when they are first used, because every Outlast process imports
this package but few need the API. Their types are in `__init__.pyi`.
"""

import importlib

__all__ = ["Failed", "Job", "Report", "Run", "find", "runs"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'outlast' has no attribute {name!r}")
    return getattr(importlib.import_module("outlast.client"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
