"""Outlast: distributed PyTorch training that outlasts its machines."""

import sys

from outlast import _old_names

__version__ = "0.1.0"

sys.meta_path.append(_old_names.Finder)
