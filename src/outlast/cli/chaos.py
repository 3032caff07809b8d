"""`outlast chaos`: harm a running job on purpose."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated

import typer

from outlast import chaos as harm
from outlast.backoff import RANDOM
from outlast.cli import terminal, which
from outlast.cli.which import ContextOption, NamespaceOption


def _completed(incomplete: str) -> list[str]:
    """For the shell's completion: actions, then jobs."""
    return [*(action for action in harm.ACTIONS if action.startswith(incomplete)), *which.names(incomplete)]


def chaos(
    ctx: typer.Context,
    words: Annotated[list[str], typer.Argument(hidden=True, autocompletion=_completed)],
    worker: Annotated[int | None, typer.Option(metavar="N", min=0, help="Harm this worker.")] = None,
    random_: Annotated[bool, typer.Option("--random", help="Harm a random worker, as without --worker.")] = False,
    every: Annotated[str | None, typer.Option(metavar="TIME", help="Again and again, so often, until the job ends.")] = None,
    times: Annotated[int | None, typer.Option(metavar="N", min=1, help="With --every: so many times.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same seed harms the same workers again.")] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="In a cluster: do not ask.")] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Harm a running job, to see that it outlasts it.

    \b
    Actions:
      kill-process  SIGKILL one training process
      kill-worker   SIGKILL a worker: its agent and all its processes
      stop          SIGSTOP one training process, so that it hangs
      slow          stop and continue one training process for a while
      term          SIGTERM a worker, as a machine that goes away does
      evict         as the drain of its node does

    In a cluster kill-worker deletes the worker's pod without grace, term deletes it, and evict asks for its eviction, which a
    PodDisruptionBudget may refuse; processes are harmed by a program that is run in the pod.

    In place of an action a FILE (.yaml) names a schedule, as for outlast run --chaos.

    \b
    Examples:
      outlast chaos kill-worker
      outlast chaos cifar10 kill-process --worker 1
      outlast chaos cifar10 kill-worker --random --every 15s --seed 7
      outlast chaos cifar10 evict -n team-a
      outlast chaos cifar10 chaos.yaml -n team-a --yes
    """
    if worker is not None and random_:
        raise typer.BadParameter("--worker and --random exclude each other")
    if times is not None and every is None:
        raise typer.BadParameter("--times needs --every")
    if len(words) == 2 and words[0] in harm.ACTIONS:
        words = words[::-1]
    action = words[-1]
    strikes = harm.load(Path(action)) if action.endswith((".yaml", ".yml")) else None
    if strikes is None:
        harm.check(action)
    elif worker is not None or random_ or every is not None:
        raise typer.BadParameter(f"{action} says itself whom and when to harm; leave out --worker, --random and --every")
    place = which.place(ctx, which.first(words), namespace, context)
    name, _ = which.and_last(place, words, "ACTION")
    if (there := which.in_cluster(place)) is not None and not yes:
        where = f"{there.cluster.namespace} of {there.cluster.context or there.cluster.server}"
        terminal.confirm(f"{action} harms {name} in namespace {where}", "it may be harmed")
    rng = random.Random(seed := RANDOM.randrange(10_000) if seed is None else seed)
    if strikes is not None:
        said = harm.play(place, name, strikes, harm.seed(strikes), say=_say)
    elif every is None:
        print(place.chaos(name, action, worker=worker, rng=rng))
        return
    else:
        if worker is None:
            print(f"the seed is {seed}", file=sys.stderr)
        said = harm.repeat(place, name, action, worker=worker, every=harm.every(every), times=times, rng=rng, say=_say)
    for sentence in said:
        print(sentence, flush=True)


def _say(sentence: str) -> None:
    print(f"outlast | {sentence}", file=sys.stderr, flush=True)
