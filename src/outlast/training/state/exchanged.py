"""Fixed pickle names of the classes that ranks exchange, since the ranks of a world may run two versions of Outlast.

A pickle names each class's module, so moving a class would break the exchange. Fields must stay, too, and a new field needs a
default.
"""

from __future__ import annotations

import sys
import types

from outlast.storage.checkpoints.on_disk import Commit
from outlast.storage.checkpoints.retention import Metric
from outlast.storage.snapshots.replicas import Place
from outlast.training.metrics import News
from outlast.training.state.background_save import Outcome, Written

NAMES: dict[type, str] = {
    Commit: "outlast.checkpoints.disk.Commit",
    Metric: "outlast.checkpoints.retention.Metric",
    News: "outlast.training.metrics.News",
    Outcome: "outlast.training.saver.Outcome",
    Place: "outlast.snapshots.peers.Place",
    Written: "outlast.training.saver._Written",
}


def keep_names() -> None:
    """Make the classes in `NAMES` pickle and unpickle under the names given there."""
    for kind, name in NAMES.items():
        module, _, attribute = name.rpartition(".")
        kind.__module__, kind.__qualname__ = module, attribute
        setattr(sys.modules.setdefault(module, types.ModuleType(module)), attribute, kind)
