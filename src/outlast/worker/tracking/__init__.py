"""Forwards metrics to TensorBoard, MLflow and Weights & Biases, in a process beside the training.

    run.log ──► metrics.jsonl ──► python -m outlast follower ──► event files, server, ...

`metrics.jsonl` is both the source of truth and the buffer. Rank 0's session starts the follower (`follower_handle`); it reads
new lines (`missing_points`), sends them to each tracker in a thread of its own (`forwarding`), and resumes from the last step
that the tracker itself has, so it may be killed at any moment and started anywhere. A slow or unreachable tracker never delays
a step. Foreign libraries are imported in the module that is named after them, if a job uses them. Docs:
docs/decisions/0028-tracking.md.
"""

from outlast.worker.tracking.follower_handle import Trackers, end

__all__ = ["Trackers", "end"]
