"""Decodes JSON from other processes, machines and versions into typed values. Pure.

    decode(Report, {"run": "r", "id": 3, "standing": "waiting", "newer": 1})  ->  Report("r", 3, MemberState.WAITING)

The fields of a dataclass describe a message. Fields of newer versions are ignored, missing fields get their defaults, and values
of the wrong type are rejected. Supported types:

    bool, str, Any, enums, Literal[...], X | None, dataclasses
    int                             an integer in [0, 2**53), because no message has a negative one
    float                           a finite number below 1e300
    tuple[X, ...], tuple[X, Y]      an array
    Mapping[str, X]                 an object
    Annotated[X, check]             an X for which `check` returns true
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, Union, cast

T = TypeVar("T")
_Reader = Callable[[Any], Any]


class _Unfit(ValueError):
    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem


def decode(kind: type[T], value: object, name: str = "") -> T:
    """Convert a parsed JSON value to a type. Raises ValueError, whose message names the value (`name`) and the wrong field."""
    name = name or f"a {kind.__name__.lower()}"
    try:
        decoded: T = _reader(cast(Any, kind))(value)
    except _Unfit as unfit:
        raise ValueError(f"{unfit.field} of {name} {unfit.problem}") from None
    except ValueError:
        raise ValueError(f"{name} cannot be {value!r:.80}") from None
    return decoded


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a JSON value is an integer in [0, 2**53)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


_PLAIN: Mapping[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: is_count,
    float: _is_number,
    str: lambda value: isinstance(value, str),
    Any: lambda value: True,
}


@functools.cache
def _reader(kind: Any) -> _Reader:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        return _checked(_PLAIN[kind])
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if isinstance(kind, enum.EnumType):
        return kind
    if origin is Annotated:
        read, checked = _reader(arguments[0]), _checked(arguments[1])
        return lambda value: checked(read(value))
    if origin is Literal:
        return _checked(lambda value: value in arguments)
    if origin in (Union, types.UnionType) and len(arguments) == 2 and arguments[1] is types.NoneType:
        read = _reader(arguments[0])
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _array(*arguments)
    if origin is Mapping and arguments[0] is str:
        return _object(arguments[1])
    raise TypeError(f"{kind} has no form in JSON")


def _checked(check: Callable[[Any], Any]) -> _Reader:
    def checked(value: Any) -> Any:
        if not check(value):
            raise ValueError
        return value

    return checked


def _array(*kinds: Any) -> _Reader:
    readers = [_reader(kind) for kind in kinds if kind is not ...]
    any_length = kinds[-1] is ...

    def array(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not (any_length or len(value) == len(readers)):
            raise ValueError
        if any_length:
            return tuple(map(readers[0], value))
        return tuple(read(each) for read, each in zip(readers, value, strict=True))

    return array


def _object(kind: Any) -> _Reader:
    read = _reader(kind)

    def object(value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError
        return {name: read(each) for name, each in value.items()}

    return object


def _dataclass(kind: Any) -> _Reader:
    types = {name: each for base in reversed(kind.__mro__) for name, each in inspect.get_annotations(base, eval_str=True).items()}
    fields = [(each.name, _reader(types[each.name]), _required(each)) for each in dataclasses.fields(kind)]

    def instance(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError
        content = {}
        for name, read, required in fields:
            if name in value:
                try:
                    content[name] = read(value[name])
                except _Unfit as unfit:
                    raise _Unfit(f"{name}.{unfit.field}", unfit.problem) from None
                except ValueError:
                    raise _Unfit(name, f"cannot be {value[name]!r:.80}") from None
            elif required:
                raise _Unfit(name, "is missing")
        return kind(**content)

    return instance


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
