"""`outlast why`: the reasons why a job does not train, with remedies."""

from __future__ import annotations

import contextlib
import time

import typer

from outlast.base.errors import OutlastError
from outlast.cli import find_job, tables_and_pages
from outlast.cli.find_job import ContextOption, NameArgument, NamespaceOption
from outlast.cli.tables_and_pages import Output, OutputOption


def why(
    ctx: typer.Context,
    name: NameArgument = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say why a job does not train, and what to do about it.

    Each cause comes with the evidence and a remedy, the most important one first. The command looks at the job, its pods and
    their logs, events, nodes, claims, quotas and queues. The exit code is 0 if the job could be examined.

    \b
    Examples:
      outlast why
      outlast why cifar10 -n team-a
      outlast why cifar10 -o json
    """
    from outlast.kubernetes import diagnosis
    from outlast.kubernetes.diagnosis import gather_evidence, local_job

    place = find_job.place(ctx, name, namespace, context)
    job = find_job.job(place, name)
    forbidden: dict[str, str] = {}
    if (there := find_job.in_cluster(place)) is None:
        causes = local_job.causes(place.status(job), place.events(job), time.time())
    else:
        seen = gather_evidence.job(there.cluster, job)
        causes, forbidden = diagnosis.causes(seen, time.time()), dict(seen.forbidden)
        if not any(each.failed for each in causes):
            with contextlib.suppress(OutlastError):  # agents may not be asked; the other causes are known
                suspicious = list(local_job.suspicious_ranks(place.status(job)))
                causes = suspicious + [each for each in causes if not suspicious or each.name != "training"]
    if output is Output.TABLE:
        print(diagnosis.text(causes, forbidden=forbidden))
        return
    rows = [{"rule": e.name, "what": e.what, "evidence": e.evidence, "remedy": e.remedy, "wrong": e.failed} for e in causes]
    tables_and_pages.data({"causes": rows, "unseen": forbidden}, output)
