"""A job's output in a store: which run owns it, and the checkpoints that it has committed there.

    place = store.open_("s3://bucket/runs/digits")
    remote.claim(place, remote.Run(run, job="digits", submitted=now))       a new run; then remote.set_aside(place, run)
    there = remote.Checkpoints(place, run)
    there.take(generation)                                                  fences, and comes before both of
    there.restore(directory, say=print)
    there.push(checkpoint, journals=directory)

`commits` holds the rules, `register` what several writers share, `checkpoints` the files, `run` who owns the place. Agents and
the command line use it; training does not know that there are stores.
"""

from __future__ import annotations

from outlast.remote.checkpoints import Checkpoint, Checkpoints, Damaged, Outcome
from outlast.remote.commits import Latest, Place
from outlast.remote.run import PREVIOUS, RUN, Run, check, claim, end, read, set_aside, update

__all__ = [
    "PREVIOUS", "RUN", "Checkpoint", "Checkpoints", "Damaged", "Latest", "Outcome", "Place", "Run",
    "check", "claim", "end", "read", "set_aside", "update",
]  # fmt: skip
