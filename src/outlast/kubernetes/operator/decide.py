"""The operator's decisions: an ordered table of rules; a pure function of one snapshot of a job.

    plan = decide(snapshot)

Each rule is named after a situation and writes a sentence, which becomes the status, the Event and the log line. If several rules
write one in a pass, people read the first; all rules may add to the plan. `rendezvous.world.decide` decides which workers train
together, and `rendezvous.failures` whether a failure is restarted, as on one machine.

Invariants: apart from terminating pods there are never more pods than desired, and never two with the same index; no failure is
counted twice; nothing is deleted before the status says why. For a job in a steady state the plan is empty.
"""

from __future__ import annotations

from collections.abc import Callable

from outlast.job import contract
from outlast.kubernetes.operator.plan import Plan
from outlast.kubernetes.operator.reconcile import Reconcile
from outlast.kubernetes.operator.rules import end, failures, kueue, nodes, plain, progress, start, workers, world
from outlast.kubernetes.operator.snapshot import JobSnapshot


def decide(seen: JobSnapshot) -> Plan:
    """The plan of one reconcile pass."""
    if seen.document["spec"].get("managedBy", contract.MANAGED_BY) != contract.MANAGED_BY:
        return Plan()  # another controller makes its pods and writes its status
    if seen.document["metadata"].get("deletionTimestamp"):
        return end.orphans(seen.pods, seen.now, seen.since, seen.limits)
    rec = Reconcile(seen)
    for rule in RULES if seen.plain is None else PLAIN_RULES:
        rule(rec)
        if rec.done:
            break
    if seen.job is not None:
        progress.written(rec)
    return rec.plan()


RULES: tuple[Callable[[Reconcile], None], ...] = (
    end.finished,
    start.unreadable,
    start.changed_or_new,
    kueue.queued,
    end.workers_done,
    failures.repaired,
    workers.ended_workers,
    nodes.lost_workers,
    start.once_elected,
    nodes.cut_off_workers,
    workers.silent_workers,
    nodes.leaving_nodes,
    world.resumed,
    end.too_late,
    world.world_decided,
    workers.mass_silence,
    workers.surplus_workers,
    workers.missing_workers,
)
"""The order matters: rules that observe pods run before the world is decided, and pods are created last."""
PLAIN_RULES: tuple[Callable[[Reconcile], None], ...] = (
    end.finished,
    plain.taken_up,
    end.too_late,
    plain.restarted_containers,
    plain.ended_workers,
    plain.done_workers,
    nodes.lost_workers,
    plain.overdue_workers,
    nodes.leaving_nodes,
    plain.needless_workers,
    plain.missing_workers,
    plain.pods_observed,
)
"""Rules for a job whose workers have no agent: torchrun decides which workers train together."""
