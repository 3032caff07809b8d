"""The rules between fields of a job (`spec.*.rules` and `choices`) in CEL, for the API server.

    {"Workers": [{"rule": ..., "message": ...}, ...]}        by the name of the model in `spec`

A rule consists of a condition and the message that `spec` has for it. The API server rejects rules that it estimates to be
expensive, so the lists that rules iterate over are bounded (`BOUNDS`).

The fields that define the training itself are immutable (`IMMUTABLE`): otherwise, pods of the old and the new specification would
train together. The number of workers, the deadlines and the settings for the job's end are mutable.
https://kubernetes.io/docs/reference/using-api/cel/ https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#validation-rules
"""

from __future__ import annotations

from outlast.job import accelerators, contract, spec

Rule = dict[str, str]

BOUNDS = {
    ("Spec", "data"): 32,
    ("Spec", "models"): 32,
    ("Spec", "volumes"): 32,
    ("Spec", "secrets"): 32,
    ("Workers", "sizes"): 256,
}
"""Maximum number of items of lists that rules iterate over."""
TEXT_BOUNDS = {
    ("Data", "from"): 1024,
    ("Data", "to"): 256,
    ("Weights", "from"): 1024,
    ("Weights", "name"): 128,
    ("Volume", "to"): 256,
    ("Secret", "name"): 253,
    ("Secret", "to"): 256,
}
"""Maximum length of strings in the lists of `BOUNDS`."""


def rule(condition: str, message: str, *, at: str = "") -> Rule:
    """Return a rule with a constant message: the API server estimates the cost of `messageExpression` too high."""
    return {"rule": condition, "message": message, **({"fieldPath": at} if at else {})}


def _immutable(name: str, *, within: str = "") -> Rule:
    """Return a rule that a field of the specification, or of its section `within`, is immutable."""
    new, old = (f"{each}.{within}" if within else each for each in ("self", "oldSelf"))
    has_new, has_old = (f"has({each}) && has({each}.{name})" if within else f"has({each}.{name})" for each in (new, old))
    condition = f"({has_new}) == ({has_old}) && (!({has_new}) || {new}.{name} == {old}.{name})"
    remedy = "delete the job and apply it under the same name: it goes on from its checkpoint"
    return rule(condition, f"{f'{within}.{name}' if within else name} of a job cannot change; {remedy}", at=f".{within or name}")


def _unique(lists: str, field: str, sentence: str) -> Rule:
    """Return a rule that this field is unique among the items of a list; items without the field are ignored."""
    given = f"self.{lists}.filter(x, has(x.{field}))"
    same = f"self.{lists}.exists_one(y, has(y.{field}) && y.{field} == x.{field})"
    return rule(f"!has(self.{lists}) || {given}.all(x, {same})", sentence, at=f".{lists}")


def _distinct_places(left: str, left_place: str, right: str, right_place: str, sentence: str, *, except_if: str = "") -> Rule:
    """Return a rule that no item of the left list (x) has the same place as an item of the right list (y), unless `except_if`
    holds."""
    same_place = f"has(y.to) && {left_place} == {right_place}" if right == "secrets" else f"{left_place} == {right_place}"
    exception = f"!({except_if}) && " if except_if else ""
    return rule(
        f"!has(self.{left}) || !has(self.{right}) || !self.{left}.exists(x, {exception}self.{right}.exists(y, {same_place}))",
        sentence,
        at=f".{right}",
    )


def _not_reserved(lists: str) -> Rule:
    """Return a rule that no item of a list is mounted over a directory of Outlast or of the system."""
    return rule(
        f"!has(self.{lists}) || !self.{lists}.exists(x, has(x.to) && x.to.matches('^({spec.OWN})$'))",
        f"{lists} has a place (to) of Outlast or of the system; choose another, e.g. /mnt/data",
        at=f".{lists}",
    )


_IS_LOCAL = "!x.from.contains('://') || x.from.startsWith('file://')"
"""The condition that data (x) is on the machine that submits the job; in that case, a volume may have the same place."""
_DATA_TO = "(has(x.to) ? x.to : '/data')"

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
"""Immutable fields of the specification."""
IMMUTABLE_SCHEDULING = ("queue", "gang", "spot", "worker0")
"""Immutable fields of `scheduling`. Its priority is mutable; a change affects pods that are created later."""

NAME = rule(
    f"size(self.metadata.name) <= {contract.LONGEST_NAME}",
    f"metadata.name is longer than {contract.LONGEST_NAME} characters; shorten it, since workers are called "
    f"{contract.worker_name('NAME', contract.MOST_WORKERS - 1)}, in at most {contract.LONGEST_HOST}",
    at=".metadata.name",
)
"""A rule on the whole document. A `maxLength` in the schema would keep all other rules from being evaluated, and its message
would be less clear."""

RULES: dict[str, list[Rule]] = {
    "Workers": [
        rule(
            "!has(self.sizes) || !has(self.step) || self.step == 1",
            "workers.step and workers.sizes are both given; keep one",
            at=".step",
        ),
        rule(
            "!has(self.min) || !has(self.max) || self.min <= self.max",
            "workers.min is above workers.max; swap them or raise max",
            at=".min",
        ),
        rule(
            "!has(self.min) || self.replicas == 0 || self.replicas >= self.min",
            "workers.replicas is below workers.min; raise replicas or lower min",
            at=".replicas",
        ),
        rule(
            "!has(self.max) || self.replicas <= self.max",
            "workers.replicas is above workers.max; lower replicas or raise max",
            at=".replicas",
        ),
        rule(
            "!has(self.sizes) || !has(self.min) || self.min in self.sizes",
            "workers.min is not one of workers.sizes; add it or raise min",
            at=".min",
        ),
        rule(
            "!has(self.sizes) || !has(self.max) || self.sizes.exists(x, x <= self.max)",
            "workers.max is below all of workers.sizes; raise max or add a size",
            at=".max",
        ),
        rule(
            "self.replicas == 0 || (has(self.sizes) ? self.replicas in self.sizes : "
            "!has(self.step) || !has(self.min) || (self.replicas - self.min) % self.step == 0)",
            "workers.replicas is not an allowed number of workers; see sizes or step",
            at=".replicas",
        ),
    ],
    "Rendezvous": [
        rule(
            "!has(self.backend) || self.backend != 'etcd' || has(self.endpoint)",
            "rendezvous.backend is etcd, which needs rendezvous.endpoint, e.g. etcd:2379",
            at=".backend",
        ),
        rule(
            "!has(self.endpoint) || (has(self.backend) && self.backend != 'auto')",
            "rendezvous.endpoint has no effect with backend auto; set backend: etcd or c10d",
            at=".endpoint",
        ),
    ],
    "Environment": [
        rule(
            "!has(self.requirements) || !has(self.conda)",
            "environment.requirements and environment.conda are both given; keep one",
            at=".conda",
        )
    ],
    "Spec": [
        rule("!has(self.script) || !has(self.module)", "script and module are both given; keep one", at=".module"),
        rule(
            "has(self.script) || has(self.module)",
            "there is nothing to run; give script (a file in code) or module",
        ),
        rule(
            "!has(self.processesPerWorker) || type(self.processesPerWorker) != int || !has(self.resources) || "
            "!has(self.resources.gpu) || self.resources.gpu == 0 || int(self.processesPerWorker) <= self.resources.gpu || "
            f"(has(self.resources.accelerator) && self.resources.accelerator in {list(accelerators.SHARED)})",
            "processesPerWorker is above resources.gpu; each process needs a GPU of its own",
            at=".processesPerWorker",
        ),
        rule(
            "!has(self.activeDeadlineSeconds) || !has(self.startupDeadlineSeconds) || "
            "self.startupDeadlineSeconds <= self.activeDeadlineSeconds",
            "startupDeadlineSeconds is above activeDeadlineSeconds; lower it or raise the other",
            at=".startupDeadlineSeconds",
        ),
        rule(
            f"!has(self.data) || self.data.all(x, self.data.exists_one(y, {_DATA_TO.replace('x.', 'y.')} == {_DATA_TO}))",
            "two entries of data have the same place (to); choose another for one of them",
            at=".data",
        ),
        rule(
            f"!has(self.data) || !self.data.exists(x, self.data.exists(y, "
            f"{_DATA_TO.replace('x.', 'y.')}.startsWith({_DATA_TO} + '/')))",
            "an entry of data is inside another one (to); choose separate directories",
            at=".data",
        ),
        _not_reserved("data"),
        _not_reserved("volumes"),
        _not_reserved("secrets"),
        _unique("models", "name", "two models have the same name; choose another for one of them"),
        _unique("volumes", "to", "two volumes have the same place (to); choose another for one of them"),
        _unique("secrets", "to", "two secrets have the same place (to); choose another for one of them"),
        _distinct_places(
            "data",
            _DATA_TO,
            "volumes",
            "y.to",
            "a volume is where data from a store is (to); choose another place",
            except_if=_IS_LOCAL,
        ),
        _distinct_places("data", _DATA_TO, "secrets", "y.to", "a secret is where data is (to); choose another place"),
        _distinct_places("volumes", "x.to", "secrets", "y.to", "a secret is where a volume is (to); choose another place"),
        _distinct_places(
            "models",
            "'/models/' + x.name",
            "volumes",
            "y.to",
            "a volume is where a model from a store is; choose another place",
            except_if=_IS_LOCAL,
        ),
        _distinct_places(
            "models", "'/models/' + x.name", "secrets", "y.to", "a secret is where a model is; choose another place"
        ),
        _distinct_places(
            "models",
            "'/models/' + x.name",
            "data",
            _DATA_TO.replace("x.", "y."),
            "data is where a model is; choose another place",
        ),
        *(_immutable(name) for name in IMMUTABLE),
        *(_immutable(name, within="scheduling") for name in IMMUTABLE_SCHEDULING),
    ],
}
