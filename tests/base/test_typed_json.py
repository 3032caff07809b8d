"""JSON as typed values: what fits is read, whatever wrote it; what does not is refused with the name of its field."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest

from outlast.base.typed_json import decode

_LONGEST = 3


class Colour(enum.StrEnum):
    RED = "red"
    OTHER = ""

    @classmethod
    def _missing_(cls, value: object) -> Colour:
        return cls.OTHER


class Mood(enum.StrEnum):
    FINE = "fine"


@dataclasses.dataclass(frozen=True)
class Wheel:
    size: float
    spokes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Vehicle:
    name: Annotated[str, lambda name: len(name) <= _LONGEST]
    wheel: Wheel | None = None
    colour: Colour = Colour.RED
    mood: Mood = Mood.FINE
    kind: Literal["car", "boat"] = "car"
    owners: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    trips: tuple[tuple[float, int], ...] = ()
    sold: bool = False
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Boat(Vehicle):
    name: str = "none"


def test_all_kinds_of_fields_are_read_and_what_is_missing_has_its_default() -> None:
    vehicle = Vehicle("a", Wheel(1, (2, 3)), Colour.OTHER, Mood.FINE, "boat", {"me": 1, "you": None}, ((0.5, 1),), True, [1])
    assert decode(Vehicle, json.loads(json.dumps(dataclasses.asdict(vehicle)))) == vehicle
    assert decode(Vehicle, dataclasses.asdict(vehicle)) == vehicle, "tuples are arrays, too"
    assert decode(Vehicle, {"name": "a"}) == Vehicle("a")
    assert decode(Vehicle, {"name": "a", "newer": 1, "wheel": {"size": 1, "newer": 1}}) == Vehicle("a", Wheel(1))
    assert decode(Vehicle, {"name": "a", "colour": "blue"}).colour is decode(Vehicle, {"name": "a", "colour": [1]}).colour
    assert decode(Boat, {"colour": "red", "name": "longer"}) == Boat("longer"), "fields of all classes"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "a vehicle cannot be None"),
        ([], r"a vehicle cannot be \[\]"),
        ({}, "name of a vehicle is missing"),
        ({"name": "long"}, "name of a vehicle cannot be 'long'"),
        ({"wheel": 1}, "wheel of a vehicle cannot be 1"),
        ({"wheel": {}}, "wheel.size of a vehicle is missing"),
        *(({"wheel": {"size": wrong}}, "wheel.size of a vehicle cannot be ") for wrong in (True, "1", None, 1e300, float("nan"))),
        *(
            ({"wheel": {"size": 1, "spokes": wrong}}, "wheel.spokes of a vehicle cannot be ")
            for wrong in (1, "12", [1, -1], [1.0], [True], [1 << 53], {"0": 1}, None)
        ),
        ({"mood": "sad"}, "mood of a vehicle cannot be 'sad'"),
        ({"mood": {}}, r"mood of a vehicle cannot be {}"),
        ({"kind": "bus"}, "kind of a vehicle cannot be 'bus'"),
        *(({"owners": wrong}, "owners of a vehicle cannot be ") for wrong in ([], {"me": "1"}, None)),
        *(({"trips": wrong}, "trips of a vehicle cannot be ") for wrong in ([1], [[1]], [[1, 2, 3]], [["1", 2]])),
        *(({"sold": wrong}, "sold of a vehicle cannot be ") for wrong in (1, "true", None)),
    ],
)
def test_values_of_another_type_are_refused_with_a_sentence_that_names_the_field(value: object, sentence: str) -> None:
    content = {"name": "a", **value} if isinstance(value, dict) and value else value
    with pytest.raises(ValueError, match=f"^{sentence}"):
        decode(Vehicle, content)


def test_a_message_may_have_a_name_and_a_long_value_is_cut() -> None:
    with pytest.raises(ValueError, match=r"^name of the note cannot be 'x{79}$"):
        decode(Vehicle, {"name": "x" * 1000}, "the note")


def test_a_type_that_has_no_form_in_json_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="has no form in JSON"):
        decode(set, [])
