"""Forwards metrics to TensorBoard, MLflow and Weights & Biases, in a process beside training.

    run.log ──► metrics.jsonl ──► python -m outlast follower ──► event files, server, ...

The follower sends each tracker the new lines of `metrics.jsonl` in a separate thread, and resumes from the tracker's last step,
so it may be killed at any moment and started anywhere. A slow or unreachable tracker never delays a step. See
docs/decisions/0028-tracking.md.
"""

from outlast.worker.tracking.follower_supervisor import Trackers, end

__all__ = ["Trackers", "end"]
