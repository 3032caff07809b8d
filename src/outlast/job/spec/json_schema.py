"""The JSON schema for job files."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from outlast.base import units
from outlast.job.spec.model import Job


def schema() -> dict[str, Any]:
    """Return the JSON schema for job files, which editors use."""
    described = Job.model_json_schema(schema_generator=_Schema)
    for model in (described, *described["$defs"].values()):
        for field in model["properties"].values():
            field.pop("title", None)  # only repeats the name, capitalized
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


class _Schema(GenerateJsonSchema):
    """Generates a schema with defaults as written in a job file."""

    def encode_default(self, dft: Any) -> Any:
        match dft:
            case timedelta():
                return units.duration_text(dft)
            case units.Every():
                return str(dft) if dft.steps else units.duration_text(dft.duration or timedelta())
            case BaseModel():
                return {}
        return super().encode_default(dft)
