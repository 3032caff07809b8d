"""Public API for reading checkpoints: `list_` returns the checkpoints in a directory, `latest` the newest checkpoint of a run."""

from outlast.storage.checkpoints import Checkpoint, Metric, Retention, latest, list_, named, ranked

__all__ = ["Checkpoint", "Metric", "Retention", "latest", "list_", "named", "ranked"]
