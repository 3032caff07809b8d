"""Public API for reading a run's checkpoints: `list_` returns those in a directory, `latest` the newest of a run."""

from outlast.storage.checkpoints import Checkpoint, Metric, Retention, latest, list_, named, ranked

__all__ = ["Checkpoint", "Metric", "Retention", "latest", "list_", "named", "ranked"]
