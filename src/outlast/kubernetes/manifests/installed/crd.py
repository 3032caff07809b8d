"""Builds ElasticJob's CustomResourceDefinition from `crd.yaml` and the job file's model.

Pydantic's schema is converted to a structural one, in which every part has one type, references are resolved, and `anyOf` only
allows a number or a string. Only the number of workers has a default, for `kubectl scale`. Other fields that the user did not set
stay unset.
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

from outlast.job import spec
from outlast.kubernetes.manifests.installed import cel
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
    if rules := cel.rules().get(name):
        result["x-kubernetes-validations"] = rules
    return result


def _field(model: str, name: str, field: Schema, definitions: dict[str, Schema]) -> Schema:
    result = _structural(field, definitions)
    described = _text(field["description"])
    default = _default_text(field.get("default"))
    if default and "Default: " not in described:
        described = f"{described} Default: {default}."
    if most := cel.BOUNDS.get((model, name)):
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
