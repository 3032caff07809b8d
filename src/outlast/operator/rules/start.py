"""A job is new, its specification has changed, or it cannot be read. Pure."""

from __future__ import annotations

from outlast import contract
from outlast.errors import InvalidJob
from outlast.kube import wire
from outlast.manifests import gang
from outlast.operator import desired
from outlast.operator.reconcile import Look
from outlast.status import End, State


def unreadable(look: Look) -> None:
    """The API server has let something through that makes no sense; it may be mended while nothing runs. What cannot even be read
    has failed, unless it was different when its pods were made."""
    if look.seen.job is not None:
        return
    if wire.UNREADABLE in look.seen.document and look.memory.started is None and not look.seen.pods:
        look.know(observed=look.seen.generation)
        reason = f"the job cannot be read: {look.seen.problem}"
        return look.finish(State.FAILED, reason, contract.Exit.MISCONFIGURED, End.INVALID)
    look.over = True
    look.say(State.PENDING, f"the job cannot be understood: {look.seen.problem}", "InvalidJob", warning=True)
    look.know(observed=look.seen.generation)


def changed_or_new(look: Look) -> None:
    """What its pods need beside them is made, and follows the specification; or no pod can be made of it."""
    known, generation = look.memory, look.seen.generation
    if known.observed == generation and known.started is not None:
        return
    look.know(observed=generation)
    try:
        if known.started is None:
            if look.seen.refused and look.seen.refused != known.reason:  # it is tried again when that is said
                look.over = True
                return look.say(State.PENDING, look.seen.refused, "FailedCreate", warning=True)
            if no_gang := gang.missing(look.seen.gang, look.seen.found.groups):
                look.over = True
                return look.say(State.PENDING, f"no pods can be made: {no_gang}", "NoGang", warning=True)
            look.setup = desired.setup(look.seen)
            look.know(started=look.now, formed=False, gang="" if look.seen.gang == "none" else look.seen.gang)
        else:
            look.apply = desired.changed(look.seen)
    except InvalidJob as error:
        look.over = True
        look.say(State.PENDING, f"no pods can be made: {error}", "InvalidJob", warning=True)
