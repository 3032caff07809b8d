"""The list of images in the form for notebooks, `spawner_ui_config.yaml`, with ours added.

Administrators keep notes in that file, so it is changed as text: lines are inserted, and all other bytes stay. The same in a
parser that keeps comments (ruamel.yaml) would reformat quotes and indentation, and be one more library. What was inserted is
read again and compared with what was meant, so a layout that we do not understand is refused and never damaged.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from outlast.errors import OutlastError

KEY = "spawner_ui_config.yaml"
"""Key of the ConfigMap."""
_DEFAULTS = "spawnerFormDefaults"
_BY_HAND = "add them by hand: kubectl -n kubeflow edit configmap"


def missing(text: str, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Images that the file does not offer yet, by section. Raises OutlastError for a file that cannot be read."""
    return {section: new for section, images in wanted.items() if (new := _new(_options(_read(text), section), images))}


def added(text: str, wanted: Mapping[str, Sequence[str]]) -> str:
    """The file with these images in `spawnerFormDefaults.SECTION.options`; unchanged if it has them.

    `wanted`: images by section: `image`, `imageGroupOne`, `imageGroupTwo`. Raises OutlastError, with nothing changed, when a
    section is not there or its layout is not understood.
    """
    for section, images in missing(text, wanted).items():
        meant = copy.deepcopy(_read(text))
        meant[_DEFAULTS][section]["options"] = [*_options(meant, section), *images]
        changed = _inserted(text, section, images)
        if _read(changed) != meant:
            raise OutlastError(f"{KEY}: the layout of {_DEFAULTS}.{section} is not understood; {_BY_HAND}")
        text = changed
    return text


def _read(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise OutlastError(f"{KEY} is not YAML ({said}); correct it: kubectl -n kubeflow edit configmap") from error


def _options(data: Any, section: str) -> list[Any]:
    """The images of a section. Raises OutlastError if there is no such section."""
    found = data.get(_DEFAULTS) if isinstance(data, dict) else None
    fields = found.get(section) if isinstance(found, dict) else None
    if not isinstance(fields, dict):
        raise OutlastError(
            f"{KEY} has no {_DEFAULTS}.{section}: this version of Kubeflow has no such images; remove spawner.{_field(section)}"
        )
    options = fields.get("options")
    if options is not None and not isinstance(options, list):
        raise OutlastError(f"{KEY}: {_DEFAULTS}.{section}.options is no list; correct it: kubectl -n kubeflow edit configmap")
    return list(options or ())


def _field(section: str) -> str:
    return "images" if section == "image" else section


def _new(there: Sequence[Any], images: Sequence[str]) -> list[str]:
    return [image for image in dict.fromkeys(images) if image not in there]


def _child(node: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    return next(((key, value) for key, value in node.value if key.value == name), None)


def _inserted(text: str, section: str, images: Sequence[str]) -> str:
    """The text with images after the last of a section."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for name in (_DEFAULTS, section):
        found = _child(node, name) if isinstance(node, yaml.MappingNode) else None
        if found is None:
            return text
        node = found[1]
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        return text
    options = _child(node, "options")
    if options is None:  # after the last line of the section's first field
        first_key, first = node.value[0]
        indent = " " * first_key.start_mark.column
        lines = [f"{indent}options:", *(f"{indent}- {image}" for image in images)]
        return _after_line(text, _last_line(first), lines)
    list_ = options[1]
    if isinstance(list_, yaml.SequenceNode) and not list_.flow_style and list_.value:
        indent = " " * list_.start_mark.column
        return _after_line(text, _last_line(list_.value[-1]), [f"{indent}- {image}" for image in images])
    if isinstance(list_, yaml.SequenceNode) and list_.value:  # [a, b]
        end = list_.value[-1].end_mark.index
        return text[:end] + "".join(f", {image}" for image in images) + text[end:]
    # nothing there: `options:`, `options: null`, `options: []`
    start, end = list_.start_mark.index, list_.end_mark.index
    return f"{text[:start]}{'' if text[:start].endswith(' ') else ' '}[{', '.join(images)}]{text[end:]}"


def _last_line(node: yaml.Node) -> int:
    """The line on which a node ends."""
    line: int = node.end_mark.line
    return line if node.end_mark.column or node.start_mark.line == line else line - 1


def _after_line(text: str, number: int, lines: Sequence[str]) -> str:
    """The text with lines inserted after a line of it, with the same line ends."""
    rows = text.splitlines(keepends=True)
    end = "\r\n" if rows[number].endswith("\r\n") else "\n"
    if not rows[number].endswith("\n"):
        rows[number] += end
    return "".join([*rows[: number + 1], *(f"{line}{end}" for line in lines), *rows[number + 1 :]])
