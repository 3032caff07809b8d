"""The outputs of a step that trains: their names, types and meanings, the same in Argo, Kubeflow Pipelines and `outputs.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Output(NamedTuple):
    """One output."""

    type: Literal["String", "Integer", "Float"]
    """For Kubeflow Pipelines. What may be unknown is a String, since only that may be empty."""
    about: str


OUTPUTS: Mapping[str, Output] = {
    "job": Output("String", "Name of the job"),
    "namespace": Output("String", "Namespace of the job"),
    "run": Output("String", "Id of its run"),
    "state": Output("String", "Succeeded, Failed or Cancelled"),
    "reason": Output("String", "One sentence about the state"),
    "step": Output("Integer", "Steps done"),
    "steps": Output("String", "Steps of the whole run"),
    "restarts": Output("Integer", "Failures that counted"),
    "interruptions": Output("Integer", "Workers that were taken or asked to leave"),
    "seconds": Output("Float", "From submission to the end"),
    "goodput": Output("String", "Share of that time spent on steps that were kept, 0 ... 1"),
    "output": Output("String", "URL of the output in its store, or its directory in the pods"),
    "checkpoint": Output("String", "URL of the newest checkpoint"),
    "checkpoint_step": Output("String", "Its step"),
    "best_checkpoint": Output("String", "URL of the best checkpoint that is kept"),
    "best_step": Output("String", "Its step"),
    "best_metric": Output("String", "Its metric"),
    "best_by": Output("String", "Name of that metric"),
    "loss": Output("String", "Loss: of the evaluation, else the last one that was logged"),
    "accuracy": Output("String", "Accuracy: of the evaluation, else the last one that was logged"),
    "metrics": Output("String", "What was logged last, as JSON"),
}
