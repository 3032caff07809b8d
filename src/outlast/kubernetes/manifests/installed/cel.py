"""CEL rules by which the API server checks a job's fields. Rules about several fields are in `cel.yaml`.

The API server rejects rules that it estimates to be expensive, so lists are bounded (`BOUNDS`). Fields that define the training
are immutable, because otherwise pods of the old and the new specification would train together.
https://kubernetes.io/docs/reference/using-api/cel/
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#validation-rules
"""

from __future__ import annotations

import functools
from importlib import resources

import yaml

from outlast.job import accelerators, spec

Rule = dict[str, str]

BOUNDS = {  # items of lists, characters of texts
    ("Spec", "data"): 32,
    ("Spec", "models"): 32,
    ("Spec", "volumes"): 32,
    ("Spec", "secrets"): 32,
    ("Workers", "sizes"): 256,
    ("Data", "from"): 1024,
    ("Data", "to"): 256,
    ("Weights", "from"): 1024,
    ("Weights", "name"): 128,
    ("Volume", "to"): 256,
    ("Secret", "name"): 253,
    ("Secret", "to"): 256,
}


def _immutable(name: str, *, within: str = "") -> Rule:
    new, old = (f"{each}.{within}" if within else each for each in ("self", "oldSelf"))
    has_new, has_old = (f"has({each}) && has({each}.{name})" if within else f"has({each}.{name})" for each in (new, old))
    condition = f"({has_new}) == ({has_old}) && (!({has_new}) || {new}.{name} == {old}.{name})"
    remedy = "delete the job and apply it (with code: outlast submit) under the same name: it goes on from its checkpoint"
    message = f"{f'{within}.{name}' if within else name} of a job cannot change; {remedy}"
    return {"rule": condition, "message": message, "fieldPath": f".{within or name}"}


_MUTABLE = {
    "workers",
    "restarts",
    "scheduling",
    "suspend",
    "activeDeadlineSeconds",
    "startupDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "cleanPodPolicy",
}
IMMUTABLE = tuple(name for name in spec.schema()["$defs"]["Spec"]["properties"] if name not in _MUTABLE)
IMMUTABLE_SCHEDULING = ("queue", "gang", "spot", "worker0")
"""Immutable fields of `scheduling`. The priority may change, and then only affects pods that are created later."""


@functools.cache
def rules() -> dict[str, list[Rule]]:
    """Return the rules, keyed by model name, such as `{"Workers": [{"rule": ..., "message": ...}, ...]}`."""
    text = resources.files(__package__).joinpath("cel.yaml").read_text()
    shared = str(list(accelerators.SHARED))
    between: dict[str, list[Rule]] = yaml.safe_load(text.replace("<own>", f"^({spec.OWN})$").replace("<shared>", shared))
    between["Spec"] += [
        *(_immutable(name) for name in IMMUTABLE),
        *(_immutable(name, within="scheduling") for name in IMMUTABLE_SCHEDULING),
    ]
    return between
