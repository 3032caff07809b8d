"""A job's Prometheus metrics: a table of their names, types, labels and units, and the text format that workers serve.

The operator and the agents expose only the metrics in `TABLE`, from which docs/reference/metrics.md is made. Names follow
Prometheus' conventions: base units, and `_total` for counters. https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PREFIX = "outlast_"
OPERATOR, WORKER = "operator", "worker"
_JOB, _MEMBER = ("namespace", "job"), ("job", "worker")
_RANK, _GPU = (*_MEMBER, "rank"), (*_MEMBER, "gpu")


@dataclass(frozen=True)
class Metric:
    """One metric. `source` is the process that measures and exposes it: the operator, or a worker's agent."""

    name: str
    type: str
    """gauge | counter | histogram | summary. A summary has a sum and a count, but no quantiles."""
    labels: tuple[str, ...]
    help: str
    source: str


def _of(source: str, *rows: tuple[str, str, tuple[str, ...], str]) -> tuple[Metric, ...]:
    return tuple(Metric(*row, source) for row in rows)


TABLE = _of(
    OPERATOR,
    ("outlast_jobs", "gauge", ("state",), "Jobs by state."),
    ("outlast_job_step", "gauge", _JOB, "Steps completed, if the job reports them."),
    ("outlast_job_restarts", "gauge", _JOB, "Restarts after failures so far."),
    ("outlast_goodput_ratio", "gauge", _JOB, "Share of the unsuspended time spent on steps whose results were kept."),
    ("outlast_lost_seconds_total", "counter", (*_JOB, "cause"), "Training time lost, as outlast report counts it."),
    ("outlast_lost_steps_total", "counter", _JOB, "Steps whose result was lost."),
    ("outlast_progress_age_seconds", "gauge", _JOB, "Time since a training job's last step, to within a minute."),
    ("outlast_commit_age_seconds", "gauge", _JOB, "Time since a training job's newest checkpoint was committed."),
    ("outlast_restarts_total", "counter", ("cause",), "Restarts after failures: oom, disk, hang, killed or error."),
    ("outlast_interruptions_total", "counter", ("cause",), "Workers that left without failure: told, node-lost, node-leaving."),
    ("outlast_recovery_seconds", "histogram", ("cause",), "Time from a failure or loss until the next world trains."),
    ("outlast_reconcile_seconds", "histogram", (), "Time of one reconcile pass over a job, including its writes."),
    ("outlast_operator_writes_total", "counter", ("kind", "verb"), "Requests that change something."),
    ("outlast_operator_errors_total", "counter", (), "Reconcile passes and watches that ended in an error."),
    ("outlast_operator_leader", "gauge", (), "1 for the leader, 0 for a standby."),
) + _of(
    WORKER,
    ("outlast_step", "gauge", _MEMBER, "Optimizer steps completed."),
    ("outlast_step_logged", "gauge", _MEMBER, "1 if the step was read from the log of a script that reports none."),
    ("outlast_target_step", "gauge", _MEMBER, "Optimizer step at which the run ends, if known."),
    ("outlast_step_seconds", "summary", _RANK, "Time between the ends of two steps, without stalls for checkpoints."),
    ("outlast_own_step_seconds", "gauge", _RANK, "Median time of a step minus its time in collectives, under DDP."),
    ("outlast_slow_ratio", "gauge", _RANK, "Fraction by which a slow rank's own time exceeds the others'."),
    ("outlast_differing_step", "gauge", _RANK, "Step at which a rank's bits were found to differ from the others'."),
    ("outlast_processes_replaced_total", "counter", _MEMBER, "Times that processes were replaced that could have stayed."),
    ("outlast_data_stall_seconds_total", "counter", _RANK, "Time that steps have spent waiting for data."),
    ("outlast_checkpoint_stall_seconds", "summary", _RANK, "Time that training was stalled by a save."),
    ("outlast_checkpoint_save_seconds", "summary", _RANK, "Time from the start of a save to its commit; on rank 0."),
    ("outlast_checkpoint_upload_seconds", "summary", _MEMBER, "Time to upload a committed checkpoint to the store."),
    ("outlast_committed_step", "gauge", _MEMBER, "Step of the newest committed checkpoint."),
    ("outlast_snapshot_step", "gauge", _MEMBER, "Step of the newest complete snapshot in the memory of the workers."),
    ("outlast_snapshot_every", "gauge", _MEMBER, "Steps between two snapshots."),
    ("outlast_snapshot_age_steps", "gauge", _MEMBER, "Steps since the newest complete snapshot; a failure repeats them."),
    ("outlast_sync_step", "gauge", _MEMBER, "Step of the newest checkpoint in the store."),
    ("outlast_sync_age_seconds", "gauge", _MEMBER, "Time since all output was in the store."),
    ("outlast_sync_failing_seconds", "gauge", _MEMBER, "Time since uploads to the store began to fail; 0 while they succeed."),
    ("outlast_sync_backlog_bytes", "gauge", _MEMBER, "Bytes of committed checkpoints that are not in the store yet."),
    ("outlast_generation", "gauge", _MEMBER, "Generation of this worker's world."),
    ("outlast_worker_progress_age_seconds", "gauge", _MEMBER, "Time since this worker's training last reported progress."),
    ("outlast_done", "gauge", _MEMBER, "1 if this worker's training has succeeded and the worker stays up."),
    ("outlast_failed", "gauge", _MEMBER, "1 if this worker's training has failed and the worker stays up."),
    ("outlast_leaving", "gauge", _MEMBER, "1 while this worker is asked to leave."),
    ("outlast_gpu_use_ratio", "gauge", _GPU, "Share of the time during which the GPU runs a kernel; needs NVML."),
    ("outlast_gpu_memory_used_bytes", "gauge", _GPU, "GPU memory allocated by all processes; needs NVML."),
    ("outlast_gpu_memory_bytes", "gauge", _GPU, "Memory of the GPU; needs NVML."),
)  # fmt: skip
METRICS = {metric.name: metric for metric in TABLE}

Value = float | tuple[float, int]
"""A number, or a summary's sum and count."""
Sample = tuple[str, Mapping[str, object], Value]
"""A metric's name without the prefix, its labels besides the common ones, and its value."""

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def exposition(samples: Iterable[Sample], common: Mapping[str, str]) -> str:
    """Return samples in Prometheus' text format, with the `common` labels added to each sample."""
    lines = []
    for name, of_name in itertools.groupby(sorted(samples, key=lambda sample: sample[0]), key=lambda sample: sample[0]):
        metric = METRICS[f"{PREFIX}{name}"]
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.type}"]
        for _, labels, value in of_name:
            where = ",".join(f'{label}="{str(each).translate(_ESCAPED)}"' for label, each in {**common, **labels}.items())
            parts = zip(("_sum", "_count"), value, strict=True) if isinstance(value, tuple) else [("", value)]
            lines += [f"{metric.name}{suffix}{{{where}}} {_exact(number)}" for suffix, number in parts]
    return "\n".join(lines) + "\n"


def _exact(value: float) -> str:
    """Format a number with all its digits, because step counts of long runs have more than six."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
