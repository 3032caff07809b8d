"""`outlast chaos`: injecting faults into a running job."""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from outlast.base.backoff import RANDOM
from outlast.base.errors import OutlastError
from outlast.cli import completion, find_job, terminal
from outlast.cli.find_job import ContextOption, NamespaceOption

_SHORTEST = timedelta(seconds=1)


def chaos(
    ctx: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="ACTION", hidden=True, autocompletion=completion.actions_and_jobs)],
    worker: Annotated[int | None, typer.Option(metavar="N", min=0, help="Inject it into this worker.")] = None,
    random_: Annotated[bool, typer.Option("--random", help="Pick a random worker, as without --worker.")] = False,
    every: Annotated[str | None, typer.Option(metavar="TIME", help="Repeat at this interval until the job ends.")] = None,
    times: Annotated[int | None, typer.Option(metavar="N", min=1, help="With --every: number of times.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same seed picks the same workers.")] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="In a cluster: do not ask.")] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Inject a fault into a running job, to see it recover.

    \b
    Actions:
      kill-process  SIGKILL one training process
      kill-worker   SIGKILL a worker: its agent and all its processes
      stop          SIGSTOP one training process, so that it hangs
      slow          stop and continue one training process for a while
      term          SIGTERM a worker, as when its machine is taken away
      evict         evict a worker's pod, as draining its node does; here: term

    In a cluster, kill-worker deletes the worker's pod without a grace period, term deletes it with one, and evict requests its
    eviction, which a PodDisruptionBudget may refuse. The other actions run a program in the pod.

    A schedule (FILE.yaml), as for outlast run --chaos, may take the place of the action.

    \b
    Examples:
      outlast chaos kill-worker
      outlast chaos cifar10 kill-process --worker 1
      outlast chaos cifar10 kill-worker --random --every 15s --seed 7
      outlast chaos cifar10 evict -n team-a
      outlast chaos cifar10 chaos.yaml -n team-a --yes
    """
    from outlast.job import faults

    if worker is not None and random_:
        raise typer.BadParameter("--worker and --random exclude each other")
    if times is not None and every is None:
        raise typer.BadParameter("--times needs --every")
    if len(words) == 2 and words[0] in faults.ACTIONS:
        words = words[::-1]
    if len(words) == 2 and words[0].isdecimal():
        raise typer.BadParameter(f"{words[0]} is not the name of a job; choose the worker with --worker {words[0]}")
    action = words[-1]
    schedule = faults.load(Path(action)) if action.endswith((".yaml", ".yml")) else None
    if schedule is None:
        faults.check(action)
    elif worker is not None or random_ or every is not None:
        raise typer.BadParameter(f"{action} names the workers and the times; leave out --worker, --random and --every")
    run, _ = find_job.run_and_last(ctx, words, "ACTION", namespace, context)
    place, name = run.place, run.name
    if (schedule or every) and not (status := run.status).state.active:
        raise OutlastError(f"no worker runs now ({name} is {status.state}); start it with: {status.again}")
    if (there := find_job.in_cluster(place)) is not None and not yes:
        where = f"{there.cluster.namespace} of {there.cluster.context or there.cluster.server}"
        terminal.confirm(f"{action} injects faults into {name} in namespace {where}")
    seed = RANDOM.randrange(10_000) if seed is None else seed
    if schedule is not None:
        sentences = faults.play(place, name, schedule, faults.seed(schedule), say=terminal.say)
    elif every is None:
        print(run.chaos(action, worker, seed=seed))
        return
    else:
        rng = random.Random(seed)
        if worker is None:
            print(f"the seed is {seed}", file=sys.stderr)
        fault, interval = faults.Fault(do=action, worker=worker), find_job.duration("--every", every)
        if interval < _SHORTEST:
            raise typer.BadParameter(f"--every {every}: must be at least 1s")
        sentences = faults.repeat(place, name, fault, every=interval, times=times, rng=rng, say=terminal.say)
    for sentence in sentences:
        print(sentence, flush=True)
