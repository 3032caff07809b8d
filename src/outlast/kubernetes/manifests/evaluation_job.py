"""A one-pod Job that evaluates a job's model. Its pod is a worker's pod with another command."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from outlast.job.contract import Env, Label, Pod
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import names
from outlast.kubernetes.manifests.render_request import Document
from outlast.kubernetes.manifests.scheduling import gang

COMPONENT = "evaluation"
_TTL_S = 3600


def _identifies_workload(label: str) -> bool:
    return label in (Label.WORKER, gang.GROUP_LABEL, "controller-uid", "job-name") or label.startswith("batch.kubernetes.io/")


def document(job: str, template: Document, args: Sequence[str], *, unique: str) -> Document:
    """Return the Job that evaluates a model. `template` is the pod template of the workers, and `unique` makes the Job's name
    unique."""
    name = names.fit(f"{job}-evaluation-{unique}", names.MAX_LENGTH - 6)
    pod: dict[str, Any] = copy.deepcopy(template)
    labels = {**pod["metadata"]["labels"], "app.kubernetes.io/component": COMPONENT}
    pod["metadata"]["labels"] = {key: value for key, value in labels.items() if not _identifies_workload(key)}
    pod["metadata"].get("annotations", {}).pop(gang.GROUP_ANNOTATION, None)
    pod["spec"] = {key: value for key, value in pod["spec"].items() if key not in ("subdomain", "hostname", "schedulingGates")}
    if pod["spec"].get("schedulerName") in gang.SCHEDULERS.values():
        del pod["spec"]["schedulerName"]  # it would wait for the rest of the gang
    pod["spec"]["restartPolicy"] = "Never"
    for container in pod["spec"]["containers"]:
        if container["name"] in Pod.AGENT:
            container["command"] = [*container["command"][:-1], "evaluation", "--", *args]
            removed = (Env.WORKER, Env.RENDEZVOUS, Env.RENDEZVOUS_KEY, Env.STAY)
            kept = [each for each in container["env"] if each["name"] not in removed]
            container["env"] = [*kept, {"name": Env.WORKER, "value": "0"}]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe", "args"):
                container.pop(probe, None)
    meta = {"name": name, "labels": {Label.JOB: job, "app.kubernetes.io/component": COMPONENT}}
    return kinds.JOB.document(meta, spec={"backoffLimit": 0, "ttlSecondsAfterFinished": _TTL_S, "template": pod})
