"""`outlast convert`: printing a Kubeflow document as a job file."""

from __future__ import annotations

from outlast.cli.find_job import FileArgument


def convert(file: FileArgument) -> None:
    """Print the job file of a TrainJob or PyTorchJob of Kubeflow.

    Standard error has a line for each field that is assumed or dropped. A document that cannot be converted is rejected with one
    sentence. run, submit and render accept Kubeflow documents directly, and print the same lines. The file - is standard input.

    \b
    Examples:
      outlast convert trainjob.yaml > job.yaml
      outlast convert pytorchjob.yaml | outlast submit -
      kubectl get trainjob train -o yaml | outlast convert -
    """
    from outlast.cli.cluster import render
    from outlast.cli.train import overrides

    job = overrides.load(file)
    print(render.text([job.model_dump(mode="json", by_alias=True, exclude_defaults=True)]), end="")
