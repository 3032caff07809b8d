"""The CustomResourceDefinition of ElasticJob, from the model of the job file.

The API server requires a structural schema
(https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema):
one type for every part, no references, and `anyOf` only for numbers or strings. This module converts pydantic's schema to that
form. `kubectl explain` shows the docstrings of fields; rules between fields are in `cel`.

Only the number of workers has a default in the schema, for `kubectl scale`. Other defaults are only in the descriptions, so that
fields that the user did not set stay unset.
"""

from __future__ import annotations

from typing import Any

from outlast.job import spec
from outlast.kubernetes.api.kinds import ELASTIC_JOB, Kind
from outlast.kubernetes.manifests.installed import cel
from outlast.kubernetes.manifests.render_request import Document

SHORT = ("ej", "ejob")

Schema = dict[str, Any]


def definition() -> Document:
    names = {"shortNames": list(SHORT), "categories": ["all", "training"]}
    return resource(ELASTIC_JOB, schema(), _columns(), ".spec.workers.replicas", ".status.replicas", names)


def resource(
    kind: Kind, schema: Schema, columns: list[Document], desired_path: str, current_path: str, names: Document
) -> Document:
    """Return a CustomResourceDefinition with the subresources status and scale. The paths are those of the desired and the
    current number of workers."""
    group, version = kind.api_version.split("/")
    scale = {"specReplicasPath": desired_path, "statusReplicasPath": current_path, "labelSelectorPath": ".status.selector"}
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
    """Return the structural schema of an ElasticJob."""
    model_schema = spec.schema()
    definitions = model_schema["$defs"]
    name = _field("Metadata", "name", definitions["Metadata"]["properties"]["name"], definitions)
    fields = _model("Spec", definitions)
    fields["properties"]["workers"]["default"] = {}
    fields["properties"]["workers"]["properties"]["replicas"]["default"] = 1
    fields["properties"]["template"] |= {"properties": _overlay()}
    del fields["properties"]["template"]["x-kubernetes-preserve-unknown-fields"], name["maxLength"]
    return {
        "type": "object",
        "description": model_schema["description"],
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


def _model(name: str, definitions: dict[str, Schema]) -> Schema:
    """Return the structural schema of a model, with its rules."""
    model = definitions[name]
    result: Schema = {"type": "object", "description": _text(model["description"])}
    if model.get("required"):
        result["required"] = list(model["required"])
    result["properties"] = {field: _field(name, field, value, definitions) for field, value in model["properties"].items()}
    if rules := cel.RULES.get(name):
        result["x-kubernetes-validations"] = rules
    return result


def _field(model: str, name: str, field: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a field: its own description instead of its model's, followed by its default."""
    result = _structural(field, definitions)
    described = _text(field["description"])
    default = _default_text(field.get("default"))
    if default and "Default: " not in described:
        described = f"{described} Default: {default}."
    if most := cel.BOUNDS.get((model, name)):
        result["maxItems"] = most
    if longest := cel.TEXT_BOUNDS.get((model, name)):
        result["maxLength"] = longest
    return {"description": described, **{key: value for key, value in result.items() if key != "description"}}


def _structural(part: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return the structural schema of a part of pydantic's schema. Raises ValueError if there is none, which a change of the
    model may cause."""
    if "$ref" in part:
        return _model(part["$ref"].removeprefix("#/$defs/"), definitions)
    if "const" in part:
        return {"type": "string", "enum": [part["const"]]}
    if "enum" in part:
        return {"type": "string", "enum": list(part["enum"])}
    if "anyOf" in part:
        return _choice([option for option in part["anyOf"] if option.get("type") != "null"], definitions)
    result = {key: part[key] for key in ("type", *_LIMITS) if key in part}
    match part.get("type"):
        case "array":
            return {**result, "items": _structural(part["items"], definitions)}
        case "object" if isinstance(part.get("additionalProperties"), dict):
            return {**result, "additionalProperties": _structural(part["additionalProperties"], definitions)}
        case "object":
            return {**result, "x-kubernetes-preserve-unknown-fields": True}
        case "string" | "integer" | "number" | "boolean":
            return result
    raise ValueError(f"no structural schema can say {part}")


_LIMITS = ("pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems")


def _choice(options: list[Schema], definitions: dict[str, Schema]) -> Schema:
    """Return the schema of an optional part, or of a number or string. Fractions are written as strings, or in a smaller
    unit: `500m`."""
    if len(options) == 1:
        return _structural(options[0], definitions)
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


def _default_text(default: Any) -> str:
    """Return a default as written in a job file, or an empty string if there is none."""
    if default in (None, "") or isinstance(default, dict | list | tuple):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def _overlay() -> Schema:
    """Return the schemas of the parts of a pod template. They are untyped, so that CEL compares each part as a whole. CEL
    considers two objects equal if they have the same number of fields that the schema does not know, and no field in common
    (Kubernetes 1.36)."""
    return {
        part: {"description": f"Laid over {what} of the pods.", "x-kubernetes-preserve-unknown-fields": True}
        for part, what in (("metadata", "the metadata"), ("spec", "the PodSpec"))
    }


# -------------------------------------------------------------------------------------------------------------------- status


def _status() -> Schema:
    """Return the schema of the status: the fields that the operator writes; a status may have others. See
    `outlast.job.status`."""
    return {
        "type": "object",
        "description": "What is known of the job, written by the operator.",
        "x-kubernetes-preserve-unknown-fields": True,
        "properties": {
            "observedGeneration": typed("integer", "The metadata.generation that this status is about."),
            "state": typed("string", "State of the job: Pending, Running, Restarting, Succeeded, Failed and so on."),
            "reason": typed("string", "The last decision, in a sentence."),
            "replicas": typed("integer", "Number of workers that exist."),
            "selector": typed("string", "Labels of the workers' pods, for the scale subresource."),
            "workersText": typed("string", "Number of workers, and its allowed range: 3/1-4."),
            "run": typed("string", "Unique id of this run."),
            "generation": typed("integer", "Generation of the world."),
            "world": list_of("integer", "The workers that train together, in rank order; empty while there is no world."),
            "step": typed("integer", "Steps done."),
            "steps": typed("integer", "Steps of the whole run, when known."),
            "progress": typed("string", "Share of the steps that is done: 42 %."),
            "rate": typed("number", "Steps per second, recently."),
            "restarts": typed("integer", "Failures that counted since the start of the run."),
            "interruptions": typed("integer", "Workers that were interrupted since the start of the run."),
            "checkpoint": object_with(
                "The newest committed checkpoint.",
                step=typed("integer", "Its step."),
                time=typed("number", "When it was committed, seconds since the epoch."),
                path=typed("string", "Where it is."),
                bytes=typed("integer", "Its size."),
            ),
            "snapshot": object_with(
                "The newest complete snapshot in the memory of the workers.",
                step=typed("integer", "Its step."),
                every=typed("integer", "Steps between two snapshots; 0: unknown."),
            ),
            "goodput": typed("number", "Share of the time spent on steps that were kept, 0 to 1, as outlast report shows it."),
            "goodputText": typed("string", "The same in per cent: 97.1 %."),
            "lastFailure": _failure(),
            "startTime": date_time("When the operator first reconciled the job."),
            "completionTime": date_time("When the job ended."),
            "rendezvous": _rendezvous(),
            "judged": _counted(),
            "ledger": typed(
                "array",
                "What was decided, the newest last; the ledger in the job's output has all of it.",
                items=object_with("An event."),
            ),
            "failures": _failures(),
            "queue": typed("string", "The queue that the job waits in, or was admitted by."),
            "gang": typed("string", "Gang scheduler of the workers: volcano or coscheduling; absent for none."),
            "conditions": _conditions(),
        },
    }


def _counted() -> Schema:
    silent = object_with(
        "A deleted pod.",
        uid=typed("string", "Its uid."),
        worker=typed("integer", "Its worker."),
        node=typed("string", "Its node."),
        since=typed("number", "When its deletion was requested, seconds since the epoch."),
    )
    lost = object_with(
        "A worker whose peers did not hear it.",
        worker=typed("integer", "Its index."),
        uid=typed("string", "Uid of its pod."),
        node=typed("string", "Its node."),
        at=typed("number", "When it was lost, seconds since the epoch."),
        times=typed("integer", "How often in a row: it is kept out of worlds for longer each time."),
        held=typed("boolean", "Whether it is kept out of worlds for a while."),
    )
    return object_with(
        "Failures that are already counted.",
        generation=typed("integer", "The newest generation whose failure is counted."),
        attempt=typed("integer", "Which start of its processes that was; absent for the first."),
        pods=list_of("string", "Uids of pods whose end is counted."),
        silent=typed("array", "Pods that were deleted because they were silent, and are not counted yet.", items=silent),
        lost=typed("array", "Workers whose peers did not hear them, of the last ten minutes.", items=lost),
        elected=typed("integer", "With rendezvous in etcd: the number of `restarts` that agents have counted."),
    )


def _failures() -> Schema:
    failure = object_with(
        "A failure.",
        time=typed("number", "When it was counted, seconds since the epoch."),
        committedStep=typed("integer", "The newest committed step at that time."),
        failedStep=typed("integer", "The step that raised, when known."),
        node=typed("string", "The node where it happened."),
        cause=typed("string", "Its cause, when known: oom, disk, hang or bits."),
    )
    return typed("array", "Failures that still count against restarts.limit, oldest first.", items=failure)


def _failure() -> Schema:
    """Return the schema of `failure.Failure`, with the node and the log tail, which only pods have."""
    return object_with(
        "The last failure: the first process that failed.",
        worker=typed("integer", "Its worker."),
        rank=typed("integer", "Its rank, when known."),
        code=typed("integer", "Its exit code."),
        reason=typed("string", "One sentence: rank 1 on worker 1 was killed by SIGKILL."),
        traceback=typed("string", "The tail of its traceback, if any."),
        step=typed("integer", "Its step."),
        generation=typed("integer", "The generation of its world."),
        attempt=typed("integer", "Which start of that world's processes failed; absent for the first."),
        time=typed("number", "When it failed, seconds since the epoch."),
        counted=typed("boolean", "Whether it counts against restarts.limit."),
        node=typed("string", "The node of its pod."),
        logTail=typed("string", "The last lines of its worker's log."),
    )


def _rendezvous() -> Schema:
    """Return the schema of `rendezvous.world.World`, and of `Called` and `Closed` in `rendezvous.transports.sockets`."""
    return object_with(
        "What the operator publishes for the workers, which watch it.",
        run=typed("string", "Id of the run."),
        world=object_with(
            "The newest world.",
            generation=typed("integer", "Its generation."),
            members=list_of("integer", "Its workers in rank order."),
            address=typed("string", "Address of the rendezvous: host and port of rank 0."),
            reason=typed("string", "Why it was formed."),
            at=typed("number", "When, seconds since the epoch."),
            held=typed("integer", "The newest step that a worker has told of before: to begin below it is a loss."),
        ),
        called=object_with(
            "A new rendezvous was called.",
            generation=typed("integer", "The next generation."),
            reason=typed("string", "Why it was called."),
            planned=typed("boolean", "Whether training saves first."),
            deadline=typed("number", "Deadline for saving, seconds since the epoch."),
            at=typed("number", "When it was called, seconds since the epoch."),
            leaving=list_of("integer", "Workers that leave."),
            lost=list_of("integer", "Workers whose peers do not hear them."),
        ),
        closed=object_with(
            "There will be no further world.",
            reason=typed("string", "Why."),
            code=typed("integer", "Exit code of the workers."),
        ),
        born=typed("string", "With rendezvous in etcd: the incarnation id of the run."),
        wanted=object_with(
            "With rendezvous in etcd: the request to the elected coordinator.",
            number=typed("integer", "Grows with each change."),
            replicas=typed("integer", "Number of workers; 0 while the job is suspended."),
            sizes=list_of("integer", "Allowed numbers of workers."),
            expected=list_of("integer", "Expected members."),
        ),
        leaving=typed("array", "Workers that have to be gone by a deadline.", items=_leaving()),
    )


def _leaving() -> Schema:
    return object_with(
        "A worker whose node is about to be terminated.",
        worker=typed("integer", "Its index."),
        uid=typed("string", "Uid of its pod."),
        deadline=typed("number", "When it is killed, seconds since the epoch."),
        reason=typed("string", "Why, one sentence."),
    )


def typed(kind: str, description: str, **more: Any) -> Schema:
    return {"type": kind, "description": description, **more}


def date_time(description: str) -> Schema:
    return {"type": "string", "format": "date-time", "description": description}


def list_of(kind: str, description: str) -> Schema:
    return {"type": "array", "description": description, "items": {"type": kind}}


def object_with(description: str, **fields: Schema) -> Schema:
    """Return the schema of an object to which operators of other versions may add fields."""
    base = {"type": "object", "description": description, "x-kubernetes-preserve-unknown-fields": True}
    return {**base, "properties": fields} if fields else base


def _conditions() -> Schema:
    """Return the schema of the conditions in the status.
    https://github.com/kubernetes/community/blob/master/contributors/devel/sig-architecture/api-conventions.md"""
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
    """Return the columns of `kubectl get ej`; the reason is shown only with `-o wide`."""
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
