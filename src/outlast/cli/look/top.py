"""`outlast top`: the resources of a job's workers and nodes, and how much of them is used."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from outlast.base import units
from outlast.base.errors import Forbidden, NotServed, Unanswered
from outlast.cli import find_job, tables, terminal
from outlast.cli.find_job import ContextOption, NameArgument, NamespaceOption
from outlast.cli.tables import Output, OutputOption
from outlast.job import accelerators, contract

if TYPE_CHECKING:
    from outlast.job.status import JobStatus
    from outlast.kubernetes.jobs.backend import KubernetesBackend

_SAMPLE_S = 0.5


def top(
    ctx: typer.Context,
    name: NameArgument = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the CPU, memory and accelerators that a job uses.

    The rows are the job's workers and their nodes. In a cluster, usage comes from metrics-server; without it, only resource
    requests are shown.

    \b
    Examples:
      outlast top
      outlast top cifar10 -n team-a
    """
    run = find_job.run(ctx, name, namespace, context)
    there = find_job.in_cluster(run.place)
    found = _on_this_machine(run.status) if there is None else _in_pods(there, run.name)
    if output is not Output.TABLE:
        tables.data(found, output)
        return
    for title in ("workers", "nodes"):
        if rows := found[title]:
            print(tables.table([key.upper() for key in rows[0]], [[*map(_cell, row.values())] for row in rows]))
            print()
    if not found["workers"]:
        print(f"{run.name} has no workers now", file=sys.stderr)
    for note in found["notes"]:
        terminal.say(note)


def _on_this_machine(status: JobStatus) -> dict[str, Any]:
    import psutil

    trees: dict[int, list[psutil.Process]] = {}
    for worker in status.workers:
        if worker.pid is not None and psutil.pid_exists(worker.pid):
            agent = psutil.Process(worker.pid)
            trees[worker.index] = [agent, *agent.children(recursive=True)]
    _measured(process for tree in trees.values() for process in tree)
    time.sleep(_SAMPLE_S)
    rows = []
    for index, tree in sorted(trees.items()):
        used = _measured(tree)
        rows.append(
            {
                "worker": index,
                "pid": tree[0].pid,
                "cpu": f"{sum(cpu for cpu, _ in used) / 100:.2f}",
                "memory": units.human_bytes(sum(memory for _, memory in used)),
                "processes": len(used),
            }
        )
    memory = psutil.virtual_memory()
    machine = {
        "node": "this machine",
        "cpu": f"{psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1):.2f}/{psutil.cpu_count()}",
        "memory": f"{units.human_bytes(memory.total - memory.available)}/{units.human_bytes(memory.total)}",
    }
    return {"workers": rows, "nodes": [machine], "notes": []}


def _measured(processes: Iterable[Any]) -> list[tuple[float, int]]:
    """Return the CPU usage in percent since the last measurement, and the memory in bytes, of each process that still exists."""
    import psutil

    usage = []
    for process in processes:
        try:
            usage.append((process.cpu_percent(), process.memory_info().rss))
        except psutil.Error:  # the process has just ended
            continue
    return usage


def _in_pods(place: KubernetesBackend, name: str) -> dict[str, Any]:
    from outlast.kubernetes.api import kinds, pod_status

    running = [pod for pod in place.pods(name) if not pod_status.finished(pod)]
    notes: list[str] = []
    usage = _usage(place, kinds.POD_METRICS, notes, labels=f"{contract.Label.JOB}={name}")
    nodes = sorted({pod["spec"]["nodeName"] for pod in running if pod["spec"].get("nodeName")})
    node_usage = _usage(place, kinds.NODE_METRICS, notes) if nodes else {}
    workers = []
    for pod in running:
        containers = [each.get("resources") or {} for each in pod["spec"]["containers"]]
        requested = {key: pod_status.requested(pod, key) for key in ("cpu", "memory")}
        limit = sum(units.quantity((each.get("limits") or {}).get("memory", 0)) for each in containers)
        workers.append(
            {
                "worker": pod_status.index(pod),
                "pod": pod["metadata"]["name"],
                "node": pod["spec"].get("nodeName"),
                **_shares(usage.get(pod["metadata"]["name"]), requested["cpu"], limit or requested["memory"]),
                "accelerators": _devices(each.get("limits") or {} for each in containers),
            }
        )
    rows = []
    for node in nodes:
        try:
            has = place.cluster.get(kinds.NODE, node)["status"].get("allocatable") or {}
        except Forbidden as error:
            notes.append(str(error))
            break
        rows.append(
            {
                "node": node,
                **_shares(node_usage.get(node), units.quantity(has.get("cpu", 0)), units.quantity(has.get("memory", 0))),
                "accelerators": _devices([has]),
            }
        )
    return {"workers": workers, "nodes": rows, "notes": list(dict.fromkeys(notes))}


def _usage(place: KubernetesBackend, kind: Any, notes: list[str], *, labels: str = "") -> Mapping[str, Mapping[str, float]]:
    """Return the CPU cores and bytes of memory that pods or nodes use, keyed by name, as last measured by metrics-server."""
    try:
        items = place.cluster.list_(kind, labels=labels)
    except (NotServed, Forbidden, Unanswered) as error:
        notes.append(f"usage is not known: {error}")
        return {}
    usage = {}
    for item in items:
        parts = [each["usage"] for each in item["containers"]] if "containers" in item else [item["usage"]]
        usage[item["metadata"]["name"]] = {
            key: sum(units.quantity(part.get(key, 0)) for part in parts) for key in ("cpu", "memory")
        }
    return usage


def _devices(resources: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for has in resources:
        counts.update({name: round(units.quantity(amount)) for name, amount in has.items() if accelerators.is_accelerator(name)})
    return dict(+counts)


def _cell(value: object) -> object:
    return ", ".join(f"{count} {resource}" for resource, count in value.items()) or None if isinstance(value, dict) else value


def _shares(used: Mapping[str, float] | None, cpu: float, memory: float) -> dict[str, str | None]:
    """Return columns of used and available amounts, with entries such as `0.52/2` or `-/2`, or None if neither is known."""
    uses = (f"{used['cpu']:.2f}", units.human_bytes(used["memory"])) if used else (None, None)
    of = (f"{cpu:g}" if cpu else None, units.human_bytes(memory) if memory else None)
    columns = zip(("cpu", "memory"), uses, of, strict=True)
    return {name: f"{use or '-'}/{most or '-'}" if use or most else None for name, use, most in columns}
