"""`outlast chaos`: harm a running job on purpose."""

from __future__ import annotations

import random
import sys
from typing import Annotated

import typer

from outlast import chaos as harm
from outlast.chance import CHANCE
from outlast.cli import which


def chaos(
    ctx: typer.Context,
    words: Annotated[list[str], typer.Argument(hidden=True)],
    worker: Annotated[int | None, typer.Option(metavar="N", min=0, help="Harm this worker.")] = None,
    random_: Annotated[bool, typer.Option("--random", help="Harm a random worker, as without --worker.")] = False,
    every: Annotated[str | None, typer.Option(metavar="TIME", help="Again and again, so often, until the job ends.")] = None,
    times: Annotated[int | None, typer.Option(metavar="N", min=1, help="With --every: so many times.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same seed harms the same workers again.")] = None,
) -> None:
    """Harm a running job, to see that it outlasts it.

    \b
    Actions:
      kill-process  SIGKILL one training process
      kill-worker   SIGKILL a worker: its agent and all its processes
      stop          SIGSTOP one training process, so that it hangs
      slow          stop and continue one training process for a while
      term          SIGTERM a worker, as a machine that goes away does

    \b
    Examples:
      outlast chaos kill-worker
      outlast chaos cifar10 kill-process --worker 1
      outlast chaos cifar10 kill-worker --random --every 15s --seed 7
    """
    place = which.backend(ctx)
    if worker is not None and random_:
        raise typer.BadParameter("--worker and --random exclude each other")
    if times is not None and every is None:
        raise typer.BadParameter("--times needs --every")
    action = harm.check(words[-1])
    name, _ = which.and_last(place, words, "ACTION")
    if seed is None:
        seed = CHANCE.randrange(10_000)
    rng = random.Random(seed)
    if every is None:
        print(place.chaos(name, action, worker=worker, rng=rng))
        return
    if worker is None:
        print(f"the seed is {seed}", file=sys.stderr)
    for sentence in harm.repeat(place, name, action, worker=worker, every=harm.every(every), times=times, rng=rng):
        print(sentence, flush=True)
