"""Checkpoints of a run, for reading: `list_` those in its output, take the `latest`."""

from outlast.storage.checkpoints import Checkpoint, Metric, Retention, latest, list_, named, ranked

__all__ = ["Checkpoint", "Metric", "Retention", "latest", "list_", "named", "ranked"]
