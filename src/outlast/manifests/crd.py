"""The CustomResourceDefinition of ElasticJob, from the model of the job file.

The API server wants a structural schema
(https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema):
every part has one type, nothing refers to elsewhere, nothing is `anyOf` but a number or text. What pydantic writes is put into
that form here. Field docstrings become what `kubectl explain` shows, rules between fields are in `cel`.

Only the number of workers has a default in the schema: `kubectl scale` needs it to be there. Other defaults stand in the
descriptions, and what the user did not write is not written for them.
"""

from __future__ import annotations

from typing import Any

from outlast import spec
from outlast.kube.kinds import ELASTIC_JOB, Kind
from outlast.manifests import cel
from outlast.manifests.request import Document

SHORT = ("ej", "ejob")

Schema = dict[str, Any]


def definition() -> Document:
    """The CustomResourceDefinition."""
    more = {"shortNames": list(SHORT), "categories": ["all", "training"]}
    return resource(ELASTIC_JOB, schema(), _columns(), ".spec.workers.replicas", ".status.replicas", more)


def resource(kind: Kind, schema: Schema, columns: list[Document], wanted: str, there: str, names: Document) -> Document:
    """A CustomResourceDefinition with the subresources status and scale; `wanted` and `there` are the paths of the latter."""
    group, version = kind.api_version.split("/")
    scale = {"specReplicasPath": wanted, "statusReplicasPath": there, "labelSelectorPath": ".status.selector"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": kind.resource,
            "labels": {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/part-of": "outlast"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                **names,
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": columns,
                    "subresources": {"status": {}, "scale": scale},
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def schema() -> Schema:
    """The structural schema of an ElasticJob."""
    read = spec.schema()
    named = read["$defs"]
    name = _field("Metadata", "name", named["Metadata"]["properties"]["name"], named)
    fields = _model("Spec", named)
    fields["properties"]["workers"]["default"] = {}
    fields["properties"]["workers"]["properties"]["replicas"]["default"] = 1
    fields["properties"]["template"] |= {"properties": _overlay()}
    del fields["properties"]["template"]["x-kubernetes-preserve-unknown-fields"], name["maxLength"]
    return {
        "type": "object",
        "description": read["description"],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": fields,
            "status": _status(),
        },
        "x-kubernetes-validations": [cel.NAME],
    }


# ------------------------------------------------------------------------------------------------------------ from the model


def _model(name: str, named: dict[str, Schema]) -> Schema:
    """A model of `spec` as a structural schema, with its rules."""
    model = named[name]
    result: Schema = {"type": "object", "description": _text(model["description"])}
    if model.get("required"):
        result["required"] = list(model["required"])
    result["properties"] = {field: _field(name, field, value, named) for field, value in model["properties"].items()}
    if rules := cel.RULES.get(name):
        result["x-kubernetes-validations"] = rules
    return result


def _field(model: str, name: str, field: Schema, named: dict[str, Schema]) -> Schema:
    """A field: its own description goes before that of the model it is of, and ends with its default."""
    result = _structural(field, named)
    described = _text(field["description"])
    default = _shown(field.get("default"))
    if default and "Default: " not in described:
        described = f"{described} Default: {default}."
    if most := cel.BOUNDS.get((model, name)):
        result["maxItems"] = most
    if longest := cel.TEXT_BOUNDS.get((model, name)):
        result["maxLength"] = longest
    return {"description": described, **{key: value for key, value in result.items() if key != "description"}}


def _structural(part: Schema, named: dict[str, Schema]) -> Schema:
    """One part of what pydantic writes. Raises ValueError for what no structural schema can say: a change of the model."""
    if "$ref" in part:
        return _model(part["$ref"].removeprefix("#/$defs/"), named)
    if "const" in part:
        return {"type": "string", "enum": [part["const"]]}
    if "enum" in part:
        return {"type": "string", "enum": list(part["enum"])}
    if "anyOf" in part:
        return _choice([option for option in part["anyOf"] if option.get("type") != "null"], named)
    kept = {key: part[key] for key in ("type", *_LIMITS) if key in part}
    match part.get("type"):
        case "array":
            return {**kept, "items": _structural(part["items"], named)}
        case "object" if isinstance(part.get("additionalProperties"), dict):
            return {**kept, "additionalProperties": _structural(part["additionalProperties"], named)}
        case "object":
            return {**kept, "x-kubernetes-preserve-unknown-fields": True}
        case "string" | "integer" | "number" | "boolean":
            return kept
    raise ValueError(f"no structural schema can say {part}")


_LIMITS = ("pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems")


def _choice(options: list[Schema], named: dict[str, Schema]) -> Schema:
    """A part that may be of one type, or a number or text. Fractions are written as text, or in a smaller unit: `500m`."""
    if len(options) == 1:
        return _structural(options[0], named)
    numbers = [option for option in options if option.get("type") in ("integer", "number")]
    texts = [option for option in options if option.get("type") == "string"]
    if len(numbers) > 1 or len(texts) != 1 or len(numbers) + len(texts) != len(options):
        raise ValueError(f"no structural schema can say {options}")
    pattern = texts[0].get("pattern") or f"^{texts[0]['const']}$"
    return {
        "x-kubernetes-int-or-string": True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "pattern": pattern,
        **({"minimum": numbers[0]["minimum"]} if "minimum" in numbers[0] else {}),
    }


def _text(description: str) -> str:
    return " ".join(description.split())


def _shown(default: Any) -> str:
    """A default as it would stand in a file; nothing for one that says nothing."""
    if default in (None, "") or isinstance(default, dict | list | tuple):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def _overlay() -> Schema:
    """What a template has, without types: so CEL compares it as a whole. Two objects it takes for equal when they have as many
    fields that the schema does not know, and none of them in common (Kubernetes 1.36)."""
    return {
        part: {"description": f"Laid over {what} of the pods.", "x-kubernetes-preserve-unknown-fields": True}
        for part, what in (("metadata", "the metadata"), ("spec", "the PodSpec"))
    }


# -------------------------------------------------------------------------------------------------------------------- status


def _status() -> Schema:
    """What the operator writes. What is not named here it may write as well; see `outlast.status`."""
    return {
        "type": "object",
        "description": "What is known of the job, written by the operator.",
        "x-kubernetes-preserve-unknown-fields": True,
        "properties": {
            "observedGeneration": known("integer", "The metadata.generation that this status is about."),
            "state": known("string", "Where the job stands: Pending, Running, Restarting, Succeeded, Failed and so on."),
            "reason": known("string", "The sentence of the last decision."),
            "replicas": known("integer", "Workers that there are."),
            "selector": known("string", "Labels of the workers' pods, for the scale subresource."),
            "workersText": known("string", "Workers that there are, and how many there may be: 3/1-4."),
            "run": known("string", "Unique id of this run."),
            "generation": known("integer", "Generation of the world."),
            "world": _many("integer", "The workers that train together, in rank order; empty while there is no world."),
            "step": known("integer", "Steps done."),
            "steps": known("integer", "Steps of the whole run, when known."),
            "progress": known("string", "Share of the steps that is done: 42 %."),
            "rate": known("number", "Steps per second, recently."),
            "restarts": known("integer", "Failures that counted since the start of the run."),
            "interruptions": known("integer", "Workers that were told to leave since the start of the run."),
            "checkpoint": _part(
                "The newest committed checkpoint.",
                step=known("integer", "Its step."),
                time=known("number", "When it was committed, seconds since the epoch."),
                path=known("string", "Where it is."),
                bytes=known("integer", "Its size."),
            ),
            "goodput": known("number", "Share of the wall time spent on steps that were kept, 0 to 1."),
            "goodputText": known("string", "The same in per cent: 97.1 %."),
            "lastFailure": _failure(),
            "startTime": time("When the operator took the job up."),
            "completionTime": time("When the job ended."),
            "rendezvous": _rendezvous(),
            "judged": _judged(),
            "failures": _failures(),
            "queue": known("string", "The queue that the job waits in, or was admitted by."),
            "gang": known("string", "Who starts the workers all or none: volcano or coscheduling; nobody when it is not there."),
            "conditions": _conditions(),
        },
    }


def _judged() -> Schema:
    return _part(
        "Failures that are already counted.",
        generation=known("integer", "The newest generation whose failure is."),
        pods=_many("string", "Uids of pods whose end is."),
        silent={
            "type": "array",
            "description": "Pods that were told to go since nothing was heard of them: not counted yet.",
            "items": _part(
                "One of them.",
                uid=known("string", "Its uid."),
                worker=known("integer", "Its worker."),
                node=known("string", "Its node."),
                since=known("number", "When it was told to go, seconds since the epoch."),
            ),
        },
        elected=known("integer", "Where agents decide by an etcd: how many of `restarts` they have counted."),
    )


def _failures() -> Schema:
    return {
        "type": "array",
        "description": "Failures that still count against restarts.limit, oldest first.",
        "items": _part(
            "One of them.",
            time=known("number", "When it was counted, seconds since the epoch."),
            committedStep=known("integer", "The newest committed step then."),
            failedStep=known("integer", "The step that raised, when known."),
            node=known("string", "The node where it was."),
        ),
    }


def _failure() -> Schema:
    """As `status.Failure`, with the place and the last lines, which only pods have."""
    return _part(
        "The last failure: the first process that failed.",
        worker=known("integer", "Its worker."),
        rank=known("integer", "Its rank, when known."),
        code=known("integer", "Its exit code."),
        reason=known("string", "One sentence: rank 1 on worker 1 was killed by SIGKILL."),
        traceback=known("string", "The tail of its traceback, where there was one."),
        step=known("integer", "The step that it was at."),
        generation=known("integer", "The generation of its world."),
        time=known("number", "When it failed, seconds since the epoch."),
        counted=known("boolean", "Whether it counts against restarts.limit."),
        node=known("string", "The node of its pod."),
        logTail=known("string", "The last lines of its worker's log."),
    )


def _rendezvous() -> Schema:
    """As `rendezvous.world.World`, and `Called` and `Closed` of `rendezvous.transports.sockets`."""
    return _part(
        "What the operator tells the workers; they watch it.",
        run=known("string", "The run that it is about."),
        world=_part(
            "The newest world.",
            generation=known("integer", "Its generation."),
            members=_many("integer", "Its workers in rank order."),
            address=known("string", "Where they meet: host and port of rank 0."),
            reason=known("string", "Why it was formed."),
            at=known("number", "When, seconds since the epoch."),
        ),
        called=_part(
            "The workers are called together for a generation.",
            generation=known("integer", "The generation to come."),
            reason=known("string", "Why they are."),
            planned=known("boolean", "Whether training saves first."),
            deadline=known("number", "Until when it may, seconds since the epoch."),
            at=known("number", "When they were called, seconds since the epoch."),
            leaving=_many("integer", "Workers that go."),
        ),
        closed=_part(
            "There will be no further world.",
            reason=known("string", "Why not."),
            code=known("integer", "What workers exit with."),
        ),
        born=known("string", "Where agents decide by an etcd: their word for the run."),
        wanted=_part(
            "Where agents decide by an etcd: what is wanted of them.",
            number=known("integer", "A greater one is newer."),
            replicas=known("integer", "Workers; 0 while the job is suspended."),
            sizes=_many("integer", "Numbers of workers that may train together."),
            expected=_many("integer", "Workers that are to be members."),
        ),
    )


def known(kind: str, description: str, **more: Any) -> Schema:
    return {"type": kind, "description": description, **more}


def time(description: str) -> Schema:
    return {"type": "string", "format": "date-time", "description": description}


def _many(kind: str, description: str) -> Schema:
    return {"type": "array", "description": description, "items": {"type": kind}}


def _part(description: str, **fields: Schema) -> Schema:
    """A part that operators of other versions may add to."""
    found = {"type": "object", "description": description, "x-kubernetes-preserve-unknown-fields": True}
    return {**found, "properties": fields} if fields else found


def _conditions() -> Schema:
    """https://github.com/kubernetes/community/blob/master/contributors/devel/sig-architecture/api-conventions.md"""
    return {
        "type": "array",
        "description": "Created, Queued, Running, Resizing, Restarting, Suspended, Succeeded, Failed.",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {"type": "string"},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "observedGeneration": {"type": "integer"},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "reason": {"type": "string"},
                "message": {"type": "string"},
            },
        },
    }


def _columns() -> list[Document]:
    """What `kubectl get ej` shows, the reason with `-o wide` only. Numbers that stand in a sentence come as texts."""
    return [
        column("State", ".status.state"),
        column("Workers", ".status.workersText"),
        column("Step", ".status.step", "integer"),
        column("Progress", ".status.progress"),
        column("Restarts", ".status.restarts", "integer"),
        column("Goodput", ".status.goodputText"),
        column("Age", ".metadata.creationTimestamp", "date"),
        {**column("Reason", ".status.reason"), "priority": 1},
    ]


def column(name: str, path: str, kind: str = "string") -> Document:
    return {"name": name, "type": kind, "jsonPath": path}
