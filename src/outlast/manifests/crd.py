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

from outlast import contract, spec
from outlast.manifests import cel
from outlast.manifests.request import Document

PLURAL = "elasticjobs"
SHORT = "ej"

Schema = dict[str, Any]


def definition() -> Document:
    """The CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{contract.GROUP}",
            "labels": {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/part-of": "outlast"},
        },
        "spec": {
            "group": contract.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": contract.KIND,
                "listKind": f"{contract.KIND}List",
                "plural": PLURAL,
                "singular": contract.KIND.lower(),
                "shortNames": [SHORT],
                "categories": ["all", "training"],
            },
            "versions": [
                {
                    "name": contract.API_VERSION.partition("/")[2],
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": _columns(),
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.workers.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": schema()},
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


# -------------------------------------------------------------------------------------------------------------------- status


def _status() -> Schema:
    """What the operator writes. What is not named here it may write as well; see `outlast.status`."""
    return {
        "type": "object",
        "description": "What is known of the job, written by the operator.",
        "x-kubernetes-preserve-unknown-fields": True,
        "properties": {
            "observedGeneration": _known("integer", "The metadata.generation that this status is about."),
            "state": _known("string", "Where the job stands: Pending, Running, Restarting, Succeeded, Failed and so on."),
            "reason": _known("string", "The sentence of the last decision."),
            "replicas": _known("integer", "Workers that there are."),
            "selector": _known("string", "Labels of the workers' pods, for the scale subresource."),
            "run": _known("string", "Unique id of this run."),
            "generation": _known("integer", "Generation of the world."),
            "step": _known("integer", "Steps done."),
            "steps": _known("integer", "Steps of the whole run, when known."),
            "restarts": _known("integer", "Failures that counted since the start of the run."),
            "interruptions": _known("integer", "Workers that were told to leave since the start of the run."),
            "goodput": _known("number", "Share of the wall time spent on steps that were kept, 0 to 1."),
            "conditions": _conditions(),
        },
    }


def _known(kind: str, description: str) -> Schema:
    return {"type": kind, "description": description}


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
    """What `kubectl get ej` shows; the last but one with `-o wide` only."""
    return [
        {"name": "State", "type": "string", "jsonPath": ".status.state"},
        {"name": "Workers", "type": "integer", "jsonPath": ".status.replicas"},
        {"name": "Wanted", "type": "integer", "jsonPath": ".spec.workers.replicas"},
        {"name": "Step", "type": "integer", "jsonPath": ".status.step"},
        {"name": "Restarts", "type": "integer", "jsonPath": ".status.restarts"},
        {"name": "Reason", "type": "string", "jsonPath": ".status.reason", "priority": 1},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
