"""A job waits in a queue of Kueue. Pure."""

from __future__ import annotations

from outlast.manifests.kueue import Priority
from outlast.operator import desired
from outlast.operator.plan import Document
from outlast.operator.reconcile import Look
from outlast.operator.rules import failures
from outlast.status import State

RECHECK_S = 10.0
"""How often it is looked whether there is by now what Kueue or a job names: nobody tells when it comes."""


def queued(look: Look) -> None:
    """Its queue has not admitted as many workers as are needed, or takes them back."""
    queue, kept = look.seen.queue, look.memory
    if queue is None:
        if look.asked and not look.wanted:
            look.say(State.QUEUED, "it is not known yet what Kueue says", "Queued")
        return look.know(queue="")
    sizes, trains = look.fields.workers.allowed(), kept.world is not None and kept.called is None and kept.closed is None

    def make(name: str, count: int, least: int, priority: Priority) -> Document:
        return desired.workload(look.seen, queue.sight.kind, name, count, least, priority)

    todo = queue.todo(look.asked, sizes, look.using, trains, make, look.now)
    look.apply, look.statuses = (*look.apply, *todo.apply), todo.statuses
    for deletion in todo.deletes:
        look.deletes[deletion.uid] = deletion
    look.know(queue=queue.name)
    if lacking := queue.lacking():
        look.again(look.now + RECHECK_S)
        if not trains and look.asked:
            look.say(State.QUEUED, lacking, "Queued", warning=True)
    if look.asked and not look.wanted:  # all save and leave together, as when it is suspended
        return look.say(State.QUEUED, queue.reason(), "Evicted" if look.alive else "Queued", warning=bool(look.alive))
    for pod in look.alive:
        if queue.refuses(pod.document):
            sentence = f"worker {pod.index} leaves: the queue {queue.name} takes its quota back"
            failures.interrupted(look, pod, "WorkerPreempted", sentence)
            look.delete(pod, sentence)
