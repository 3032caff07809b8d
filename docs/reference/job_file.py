"""Writes the reference page of the job file from its model:

python docs/reference/job_file.py > docs/reference/job-file.md
"""

from __future__ import annotations

from typing import Any

from outlast.base import units
from outlast.job import spec

HEAD = """\
# The job file

<!-- Written by `python docs/reference/job_file.py > docs/reference/job-file.md` from src/outlast/job/spec/model.py. -->

Names that are not on this page are refused. `outlast validate FILE` reports every mistake with its line. Relative paths are
relative to the job file.

Editors with the YAML language server (VS Code's YAML extension, Neovim) check and complete job files: write the JSON schema with
`outlast validate --schema > elasticjob.json`, and begin the job file with `# yaml-language-server: $schema=elasticjob.json`.

*Duration*: `90s`, `5m`, `1h30m`, `2d`, or a number of seconds. *Quantity*: as in Kubernetes, `16Gi`, `500m`, `2`.
"""

SPECIAL = {
    units.EVERY_PATTERN: "duration or steps",
    units.DURATION_PATTERN: "duration",
    units.QUANTITY_PATTERN: "quantity",
}
"""Types that JSON knows only by the pattern of their text."""

PLAIN = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "object": "mapping"}


def page() -> str:
    """The page, in Markdown."""
    schema = spec.schema()
    sections = [HEAD]
    waiting = [("ElasticJob", schema)]
    seen = set()
    while waiting:
        title, model = waiting.pop(0)
        sections.append(f"## {title}\n\n{model['description']}\n\n| field | type | default | |\n|---|---|---|---|\n")
        for name, field in model["properties"].items():
            text = " ".join(field["description"].split()).replace("|", "\\|")
            default = "required" if name in model.get("required", ()) else shown(field.get("default"))
            sections[-1] += f"| `{name}` | {kind(field)} | {default} | {text} |\n"
            if (inner := reference(field)) and inner not in seen:
                seen.add(inner)
                waiting.append((name, schema["$defs"][inner]))
    return "\n".join(sections)


def reference(field: dict[str, Any]) -> str:
    """The model that a field, or each item of it, is of; empty for none."""
    return str(field.get("$ref") or field.get("items", {}).get("$ref") or "").removeprefix("#/$defs/")


def kind(field: dict[str, Any]) -> str:
    """The type of a field."""
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"] if value)
    if options := field.get("anyOf"):
        known = next((name for pattern, name in SPECIAL.items() for option in options if option.get("pattern") == pattern), None)
        return known or " or ".join(kind(option) for option in options if option.get("type") != "null")
    if "items" in field:
        return "list of " + kind(field["items"]) + "s"
    return PLAIN[field.get("type", "object")]


def shown(default: Any) -> str:
    """A default as it would stand in a file; nothing where the description says what happens."""
    if default is None or default == "" or isinstance(default, dict | list):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    print(page(), end="")
