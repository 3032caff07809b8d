"""Why a job gets nowhere: from what is seen of it to causes, each with its evidence and a remedy.

    evidence.see(cluster, name) -> Seen      reads documents from a cluster
    causes(seen, now)           -> [Cause]   decides; pure
    here.causes(status, events, now)         the same for a job of this machine
    text(causes, about)                      what `outlast why` prints

A rule is a function from `Seen` to causes; `RULES` is their order: first what ended the job, then what keeps workers from being
made, then from a node, from starting, from training. Several rules may have something to say.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator

from outlast.diagnosis import containers, machines, refused, scheduling, storage, waiting
from outlast.diagnosis.seen import Cause, Seen, phase, together

__all__ = ["RULES", "Cause", "Seen", "causes", "text"]

RULES: tuple[Callable[[Seen, float], Iterator[Cause]], ...] = (
    waiting.given_up,
    waiting.absent,
    waiting.wishes,
    waiting.queues,
    containers.ends,
    machines.lost,
    machines.taken,
    refused.creations,
    storage.claims,
    storage.references,
    scheduling.unschedulable,
    storage.mounts,
    containers.images,
    containers.starts,
    containers.probing,
    waiting.gangs,
    waiting.failing,
    waiting.beginning,
    waiting.others,
)
_FOLLOWS = ("failed", "gang", "others")
"""Rules that tell what follows from other causes: these come first, if there are any."""
_WIDTH = 110


def causes(seen: Seen, now: float) -> list[Cause]:
    """What keeps a job on a cluster from training, most important first; when it trains, that."""
    if done := waiting.finished(seen):
        return [done]
    found = [cause for rule in RULES for cause in rule(seen, now)]
    found.sort(key=lambda cause: cause.rule in _FOLLOWS)
    if any(cause.rule == "suspended" for cause in found):
        found = [cause for cause in found if cause.rule in ("suspended", "deleted")]  # what went before is why, or over
    if any(cause.wrong for cause in found):
        found = [cause for cause in found if cause.wrong or cause.rule not in ("starting",)]
    return found or [_well(seen)]


def _well(seen: Seen) -> Cause:
    if not seen.workload and not seen.pods:
        return Cause(
            "absent", f"there is no job {seen.name} in namespace {seen.namespace}", (), "`outlast list` shows those there are"
        )
    running = [pod for pod in seen.pods if phase(pod) == "Running"]
    if not running:
        return Cause("starting", "no worker has a pod yet, and nobody says why", (), "look again in a few seconds", wrong=False)
    return Cause("training", f"nothing is wrong: {len(running)} of {seen.wanted()} workers run", wrong=False)


def text(causes: Iterable[Cause], *, unseen: Iterable[str] = ()) -> str:
    """One paragraph a cause: the sentence, what was seen, and the remedy."""
    paragraphs = []
    for cause in causes:
        lines = _wrapped(cause.what[:1].upper() + cause.what[1:], "", "")
        for each in cause.evidence:
            if each.startswith(" "):  # of a log: as it is
                lines.append(f"  {each}")
            else:
                lines += _wrapped(each, "  ", "    ")
        if cause.remedy:
            lines += _wrapped(cause.remedy, "  → ", "    ")
        paragraphs.append("\n".join(lines))
    if blind := together(unseen):
        paragraphs.append(f"Not looked at, because you may not: {blind}.")
    return "\n\n".join(paragraphs)


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False, break_long_words=False
    )
