"""`outlast convert`: printing the job file of a document of Kubeflow."""

from __future__ import annotations

from pathlib import Path

from outlast.base.errors import OutlastError
from outlast.cli import terminal
from outlast.cli.find_job import FileArgument


def convert(file: FileArgument) -> None:
    """Print the job file of a TrainJob or PyTorchJob of Kubeflow.

    Fields that are assumed or dropped are said on standard error, a line each; a document that cannot be honoured is refused with
    one sentence. run, submit and render accept such documents as they are, and say the same. - reads from standard input.

    \b
    Examples:
      outlast convert trainjob.yaml > job.yaml
      outlast convert pytorchjob.yaml | outlast submit -
      kubectl get trainjob train -o yaml | outlast convert -
    """
    from outlast.job import spec
    from outlast.kubernetes import kubeflow

    here = Path(file).parent
    converted = kubeflow.convert(spec.text(file), source=str(file), directory=here)
    if converted is None:
        raise OutlastError(f"{file} is no document of Kubeflow; outlast submit takes job files as they are")
    document, sentences = converted
    for sentence in sentences:
        terminal.say(sentence)
    print(spec.dump(spec.anchor(spec.of(document), here)), end="")
