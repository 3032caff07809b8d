"""Phrases that name workers and numbers, for sentences about worlds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

DEAF, HEARS = "this worker does not hear the operator", "this worker hears the operator again"
"""Lines of a worker's log about its watch of the job, which `outlast why` reads."""


def workers(ids: Iterable[int]) -> str:
    """Return a phrase such as `worker 2`, `workers 0, 1 and 2` or `12 workers`."""
    names = [str(id) for id in ids]
    if len(names) == 1:
        return f"worker {names[0]}"
    return f"{len(names)} workers" if len(names) > 8 else f"workers {', '.join(names[:-1])} and {names[-1]}"


def are(ids: Sequence[int]) -> str:
    return "is" if len(ids) == 1 else "are"


def count(number: int, noun: str) -> str:
    """Return a phrase such as `1 worker` or `3 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def was(ids: Sequence[int]) -> str:
    return "was" if len(ids) == 1 else "were"


def cannot_share(size: int) -> str:
    """Return a clause such as `the batch cannot be shared equally among 3 workers`."""
    return f"the batch cannot be shared equally among {count(size, 'worker')}"


def do_not_hear(by: Sequence[int], whom: Sequence[int], *, named: bool = True) -> str:
    """Return a clause such as `workers 0 and 1 do not hear worker 2`."""
    verb, them = "does not hear" if len(by) == 1 else "do not hear", "it" if len(whom) == 1 else "them"
    return f"{workers(by)} {verb} {workers(whom) if named else them}"


def how_lost(all: Sequence[int], lost: Sequence[int], gone: Sequence[int], by: Sequence[int]) -> str:
    """Return a clause that explains how the loss of `all` workers was noticed; empty if none is in `lost` or `gone`.

    `by` are the workers that do not hear the lost workers.
    """
    cut = [id for id in all if id in {*lost, *gone}]
    if not cut:
        return ""
    named = len(cut) < len(all)
    if not lost:
        who = workers(cut) if named else "it" if len(cut) == 1 else "they"
        return f": {who} refuse{'s' if len(cut) == 1 else ''} connections"
    if by:
        return f": {do_not_hear(by, cut, named=named)}"
    who = workers(cut) if named else "it" if len(cut) == 1 else "they"
    return f": {who} {'does' if len(cut) == 1 else 'do'} not hear the others"


def began_again(step: int, held: int) -> str:
    """Return a warning that a run resumes below step `held`, which it had already reached."""
    what = f"training continues from step {step}" if step else "training begins again at step 0"
    return f"{what}, below step {held}, which was saved or in memory and cannot be reached; {held - step} steps are repeated"
