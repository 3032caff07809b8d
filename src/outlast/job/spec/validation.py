"""Validates a document and reports all mistakes at once, each as a sentence with the line, the value and the remedy.

Unknown fields are checked first. If it is clear which field was meant, its value is validated as well. Then pydantic validates
the rest, and its errors are rewritten as sentences for users.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from outlast.base.errors import InvalidJob
from outlast.job import contract, url_logins
from outlast.job.spec.yaml_document import Document, Place

Model = TypeVar("Model", bound="Checked")


class Broken(ValueError):
    """Violations of rules between a model's fields, as pairs (place below the model, sentence)."""

    def __init__(self, rules: list[tuple[Place, str]]) -> None:
        self.rules = rules
        super().__init__("; ".join(sentence for _, sentence in rules))


class Checked(BaseModel):
    """A frozen part of a document, with rules between its fields. Attributes are snake_case, and names in the document are
    camelCase."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        use_attribute_docstrings=True,
        alias_generator=lambda name: to_camel(name.rstrip("_")),
    )

    instead: ClassVar[Mapping[str, str]] = {}
    """Names from other tools, with the names to use here."""

    @classmethod
    def choices(cls, given: Collection[str]) -> Iterator[tuple[Place, str]]:
        """Yield mistakes in the choice of fields, regardless of the fields' values, as pairs (place below this part,
        sentence)."""
        return iter(())

    def rules(self) -> Iterator[tuple[Place, str]]:
        """Yield violations of rules between fields' values, as pairs (place below this part, sentence)."""
        return iter(())

    @model_validator(mode="after")
    def _hold(self) -> Self:
        given = [field for field, (_, value) in zip(fields(type(self)), self, strict=True) if value is not None]
        if broken := [*self.choices(given), *self.rules()]:
            raise Broken(broken)
        return self


def name(place: Place) -> str:
    """Format a place as users write it: `data[0].from`, without `spec.`."""
    if len(place) > 1 and place[0] == "spec":
        place = place[1:]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def validated(model: type[Model], document: Document, *, source: str) -> Model:
    """Validate a document as a `model`. Raises InvalidJob with every mistake, in order of line numbers."""
    problems: list[tuple[int | None, str]] = list(document.problems)
    data = document.data
    if isinstance(data, dict):
        group, slash, _ = str(data.get("apiVersion")).partition("/")
        if slash and group != contract.GROUP:  # another program's document: its fields are not checked
            ways = (
                "outlast init SCRIPT writes a job file, outlast convert FILE translates Kubeflow's, and with the operator "
                "kubectl apply -f FILE runs torchelastic's as it is"
            )
            said = f"apiVersion ({group}/...) must be {contract.API_VERSION}; {ways}"
            raise InvalidJob([(document.line(("apiVersion",)), said)], source=source)
        data = _Names(model, document, problems).checked(model, data, ())
    try:
        valid = model.model_validate(data)
    except ValidationError as error:
        for place, sentence in _sentences(error):
            problems.append((document.line(place), sentence))
    if problems:
        raise InvalidJob(sorted(dict.fromkeys(problems), key=lambda problem: problem[0] or 0), source=source)
    return valid


# ------------------------------------------------------------------------------------------------------------ unknown fields


class _Names:
    """Checks the names in a document. Reports unknown names, each with the field that was probably meant, and names that are
    mutually exclusive."""

    def __init__(self, model: type[Checked], document: Document, problems: list[tuple[int | None, str]]) -> None:
        self.document = document
        self.problems = problems
        self.elsewhere: dict[str, list[str]] = {}
        """Full names of fields, keyed by their last part: `{"replicas": ["spec.workers.replicas"]}`."""
        self._index(model, ())

    def _index(self, model: type[Checked], place: Place) -> None:
        for field, annotation in fields(model).items():
            self.elsewhere.setdefault(field, []).append(".".join(map(str, (*place, field))))
            if isinstance(annotation, type) and issubclass(annotation, Checked):
                self._index(annotation, (*place, field))

    def checked(self, model: type[Checked], data: dict[str, Any], place: Place) -> dict[str, Any]:
        """Return the data without unknown fields, and without fields that have no value (`args:`)."""
        known = fields(model)
        result: dict[str, Any] = {}
        for field, value in data.items():
            if field not in known:
                meant = self._meant((*place, field), list(known), model.instead)
                if meant is None or meant in data:
                    continue
                self._rename((*place, field), (*place, meant))
                field = meant
            if value is not None:
                result[field] = self._value(_part(known[field]), value, (*place, field))
        for below, sentence in model.choices(result):
            self.problems.append((self.document.line((*place, *below)), sentence))
        return result

    def _value(self, model: type[Checked] | None, value: Any, place: Place) -> Any:
        if model and isinstance(value, dict):
            return self.checked(model, value, place)
        if model and isinstance(value, list):
            return [self._value(model, item, (*place, index)) for index, item in enumerate(value)]
        return value

    def _meant(self, place: Place, names: list[str], instead: Mapping[str, str]) -> str | None:
        """Report the unknown field at `place`, and return the field in the same part that the user probably meant, if any."""
        field = str(place[-1])
        spelt = {each.lower(): each for each in names}
        near = difflib.get_close_matches(field.lower().replace("_", "").replace("-", ""), spelt, 1)
        if field in instead:
            near = []
            remedy = f"write {instead[field]}"
        elif field in self.elsewhere:
            near = []
            belongs = " or ".join(self.elsewhere[field])
            remedy = f"did you mean {belongs}?" if belongs != name(place) else "write it beside spec, not below it"
        elif near:
            remedy = f"did you mean {name((*place[:-1], spelt[near[0]]))}?"
        else:
            remedy = f"known here are {', '.join(names)}" if len(names) <= 12 else "remove it"
        self.problems.append((self.document.line(place), f"{name(place)} is unknown; {remedy}"))
        return spelt[near[0]] if near else None

    def _rename(self, old: Place, new: Place) -> None:
        for place, line in list(self.document.lines.items()):
            if place[: len(old)] == old:
                self.document.lines[(*new, *place[len(old) :])] = line


def fields(model: type[Checked]) -> dict[str, Any]:
    """Return the types of a model's fields, keyed by their names in a document."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _part(annotation: Any) -> type[Checked] | None:
    """Return the model `Part` in the annotation `Part`, `Part | None` or `tuple[Part, ...]`; None for any other annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Checked):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _part(inner))), None)


# ----------------------------------------------------------------------------------------------------------- pydantic's words


def _sentences(error: ValidationError) -> Iterator[tuple[Place, str]]:
    for found in error.errors(include_url=False):
        place, kind, context = found["loc"], found["type"], found.get("ctx", {})
        cause = context.get("error")
        if isinstance(cause, Broken):
            yield from (((*place, *below), sentence) for below, sentence in cause.rules)
        elif kind == "missing":
            yield place, f"{name(place)} is missing; add it"
        elif kind != "default_factory_not_called":  # pydantic reports this only after another mistake
            yield place, _sentence(name(place) or "the document", found["input"], kind, context, found["msg"])


_SENTENCES = {
    "value_error": "{error}",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    **dict.fromkeys(("string_too_short", "too_short"), "must not be empty"),
    "tuple_type": "must be a list; put it in brackets: [ ... ]",
    **dict.fromkeys(("model_type", "dict_type"), "must be a mapping of names to values"),
}


def _sentence(what: str, value: Any, kind: str, context: dict[str, Any], fallback: str) -> str:
    what = f"{what} ({shown(value)})"
    if kind == "literal_error":
        return f"{what} must be {context['expected'].replace(chr(39), '')}"
    if kind == "string_type":
        remedy = "" if isinstance(value, list | dict) else f'; put it in quotes: "{shown(value)}"'
        return f"{what} must be text{remedy}"
    return f"{what} {_SENTENCES[kind].format(**context)}" if kind in _SENTENCES else f"{what}: {fallback}"


def shown(value: Any) -> str:
    """Format a value as it is written in a document, shortened if it is long."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    text = str(value).lower() if isinstance(value, bool) else url_logins.hidden(str(value)) or '""'
    return text if len(text) <= 60 else text[:57] + "..."
