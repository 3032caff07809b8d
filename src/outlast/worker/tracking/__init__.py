"""Metrics forwarded to TensorBoard, MLflow and Weights & Biases, by a process beside the training.

    run.log ──► metrics.jsonl ──► python -m outlast follower ──► event files, server, ...

`metrics.jsonl` is the one truth and the buffer. Rank 0's session starts the follower (`process`); it reads what is new
(`lines`), sends it to each tracker in a thread of its own (`forwarding`), and asks the tracker itself where to go on, so it
may be killed at any moment and started anywhere. A tracker that is away or slow never touches a step. Foreign libraries are
imported in the module that is named after them, when a job asks for them. Docs: docs/decisions/0028-tracking.md.
"""

from outlast.worker.tracking.process import Trackers, end

__all__ = ["Trackers", "end"]
