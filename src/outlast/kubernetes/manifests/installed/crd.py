"""Builds ElasticJob's CustomResourceDefinition from `crd.yaml` and the job file's model.

Pydantic's schema is converted to a structural one, in which every part has one type, references are resolved, and `anyOf` only
allows a number or a string. Only the number of workers has a default, for `kubectl scale`. Other fields that the user did not set
stay unset.

Rules about several fields are CEL, from `cel.yaml`. The API server rejects rules that it estimates to be expensive, so lists are
bounded (`BOUNDS`). Fields that define the training are immutable, because otherwise pods of the old and the new specification
would train together.
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
https://kubernetes.io/docs/reference/using-api/cel/
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import yaml

from outlast.job import accelerators, spec
from outlast.kubernetes.manifests.render_request import Document

Schema = dict[str, Any]


def definition() -> Document:
    document: Document = yaml.safe_load(resources.files(__package__).joinpath("crd.yaml").read_text())
    schema: Schema = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    model_schema = spec.schema()
    definitions = model_schema["$defs"]
    name = _field("Metadata", "name", definitions["Metadata"]["properties"]["name"], definitions)
    fields = _model("Spec", definitions)
    fields["properties"]["workers"]["default"] = {}
    fields["properties"]["workers"]["properties"]["replicas"]["default"] = 1
    fields["properties"]["template"] |= {"properties": _overlay()}
    del fields["properties"]["template"]["x-kubernetes-preserve-unknown-fields"], name["maxLength"]
    schema["description"] = model_schema["description"]
    schema["properties"]["metadata"]["properties"]["name"] = name
    schema["properties"]["spec"] = fields
    return document


def _model(name: str, definitions: dict[str, Schema]) -> Schema:
    model = definitions[name]
    result: Schema = {"type": "object", "description": _text(model["description"])}
    if model.get("required"):
        result["required"] = list(model["required"])
    result["properties"] = {field: _field(name, field, value, definitions) for field, value in model["properties"].items()}
    if rules := rules_by_model().get(name):
        result["x-kubernetes-validations"] = rules
    return result


def _field(model: str, name: str, field: Schema, definitions: dict[str, Schema]) -> Schema:
    result = _structural(field, definitions)
    described = _text(field["description"])
    default = _default_text(field.get("default"))
    if default and "Default: " not in described:
        described = f"{described} Default: {default}."
    if most := BOUNDS.get((model, name)):
        result["maxItems" if result.get("type") == "array" else "maxLength"] = most
    return {"description": described, **{key: value for key, value in result.items() if key != "description"}}


def _structural(part: Schema, definitions: dict[str, Schema]) -> Schema:
    """Convert a part of pydantic's schema. Raises ValueError if no structural schema can express it."""
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
    """Return the schema of an optional part, or of a number that may be a string, such as `500m`."""
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
    if default in (None, "") or isinstance(default, dict | list | tuple):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def _overlay() -> Schema:
    """Declare the parts of a pod template. If they were undeclared, CEL would consider two templates equal that have the same
    number of fields and no field in common (Kubernetes 1.36)."""
    return {
        part: {"description": f"Laid over {what} of the pods.", "x-kubernetes-preserve-unknown-fields": True}
        for part, what in (("metadata", "the metadata"), ("spec", "the PodSpec"))
    }


# Rules

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
def rules_by_model() -> dict[str, list[Rule]]:
    """Return the rules, keyed by model name, such as `{"Workers": [{"rule": ..., "message": ...}, ...]}`."""
    text = resources.files(__package__).joinpath("cel.yaml").read_text()
    shared = str(list(accelerators.SHARED))
    between: dict[str, list[Rule]] = yaml.safe_load(text.replace("<own>", f"^({spec.OWN})$").replace("<shared>", shared))
    between["Spec"] += [
        *(_immutable(name) for name in IMMUTABLE),
        *(_immutable(name, within="scheduling") for name in IMMUTABLE_SCHEDULING),
    ]
    return between
