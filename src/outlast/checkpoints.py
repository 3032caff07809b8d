"""Public API for reading checkpoints: `list_` returns all checkpoints in a directory, `latest` returns a run's newest one."""

from outlast.storage.checkpoints import Checkpoint, Metric, Retention, latest, list_, named, ranked

__all__ = ["Checkpoint", "Metric", "Retention", "latest", "list_", "named", "ranked"]
