"""A recipe's settings: one frozen dataclass becomes its flags, its help, and the keys of its configuration files.

    @dataclass(frozen=True)
    class Settings:
        data: str = flag(..., "directory of the images")                                    # ...: required
        epochs: int = flag(8, "passes over the training images", least=1, group="training") # a heading of the help begins here
        betas: tuple[float, float] = flag((0.9, 0.95), "AdamW's decay rates")
        dtype: Literal["float32", "bfloat16"] = flag("bfloat16", "type of the activations")
        compile: bool = flag(True, "compile the model")

    def main(argv: Sequence[str] | None = None) -> None:
        s = settings.parse(Settings, argv, __doc__)

    if __name__ == "__main__":
        settings.run(main)

    --config base.yaml large.yaml --epochs 8 --betas 0.9 0.95 (or --betas=0.9,0.95) --no-compile (or --compile=false)

Underscores and dashes are alike in flags and in keys. A file is a mapping of field names to values; later files override earlier
ones, and flags override files. A value means the same in a file as on the command line, because both are read as text (`_Kind`):
so `6e-4`, which YAML takes for a string, is a number.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import os
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn

import yaml

from outlast import contract
from outlast.errors import OutlastError

T = typing.TypeVar("T")

_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NONE = ("none", "null", "~")
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def flag(
    default: Any,
    reason: str,
    *,
    least: float | None = None,
    most: float | None = None,
    group: str = "",
    also: tuple[str, ...] = (),
    first: bool = False,
) -> Any:
    """A field with its default, what it is for (unit and reason), and the smallest and largest values that make sense.

    The default `...` makes it required, and keyword-only. `group` is the heading of the help that begins with this field. `also`
    are other names for it in flags and files; one of a single letter has one dash (`-b 32`). `first`: an argument without a flag
    is its value; of one field at most, a single text.
    """
    metadata = {"help": reason, "least": least, "most": most, "group": group, "also": also, "first": first}
    if default is ...:
        return dataclasses.field(metadata=metadata, kw_only=True)
    return dataclasses.field(default=default, metadata=metadata)


def parse(settings: type[T], argv: Sequence[str] | None, about: str | None) -> T:
    """The settings that `argv` (None: the command line) and the files named there ask for.

    Raises OutlastError for a wrong flag, key or value, and for a file that cannot be read.
    """
    kinds = {field.name: _Kind.of(field, hint) for field, hint in _fields(settings)}
    parser = _parser(settings, kinds, about)
    given = vars(parser.parse_args(list(_dashed(sys.argv[1:] if argv is None else argv, kinds, parser.first))))
    values: dict[str, Any] = {}
    for file in given.pop("config", ()):
        values |= _read(file, kinds)
    values |= given
    for name, kind in kinds.items():
        if kind.required and name not in values:
            raise OutlastError(f"{_flag(name)} is required; give it, or {name} in a file named by --config; see --help")
    return settings(**values)


def values(settings: Any) -> dict[str, Any]:
    """All settings by name, as JSON and YAML have them; written as YAML, `--config` reads them back."""
    plain = dataclasses.asdict(settings)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def run(main: Callable[[], None]) -> None:
    """Run a recipe. A mistake that its user can correct (no data, a wrong flag) ends it with one sentence and exit code 78.

    Under `outlast run`, `launch.rank` does that, and keeps the sentence for `outlast status`.
    """
    if contract.EVALUATE in sys.argv:  # `outlast evaluate NAME | head` ends it in silence, as other programs
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        main()
    except OutlastError as error:
        if contract.Env.STATE in os.environ:
            raise
        print(f"outlast: {error}", file=sys.stderr, flush=True)
        sys.exit(contract.Exit.MISCONFIGURED)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a field accepts, and how its text becomes a value."""

    item: Any
    """The type of the value, or of each value of a list: int, float, str or bool."""
    choices: tuple[Any, ...] = ()
    count: int | None = None
    """Of a tuple: how many values; 0: any number. None: it is a single value."""
    optional: bool = False
    """Whether it may be None."""
    least: float | None = None
    most: float | None = None
    required: bool = False
    also: tuple[str, ...] = ()
    """Other names of the field."""

    @classmethod
    def of(cls, field: dataclasses.Field[Any], hint: Any) -> _Kind:
        """The kind of a field; raises TypeError for a type that no flag can have."""
        optional = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        if optional:
            (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        count = None
        if typing.get_origin(hint) is tuple:
            hint, *more = typing.get_args(hint)
            count = 0 if more == [...] else 1 + len(more)
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        item = type(choices[0]) if choices else hint
        if item not in (int, float, str, bool):
            raise TypeError(
                f"{field.name} is of type {hint}; a setting is an int, float, str, bool, Literal, or a tuple of one of those"
            )
        required = field.default is dataclasses.MISSING
        bounds = field.metadata["least"], field.metadata["most"]
        return cls(item, choices, count, optional, *bounds, required, field.metadata["also"])

    @property
    def metavar(self) -> str:
        """What the help shows for one value."""
        return "{" + ",".join(map(str, self.choices)) + "}" if self.choices else self.item.__name__.upper()

    def one(self, text: str) -> Any:
        """The value that a text means; raises ValueError with what is wrong."""
        if self.optional and self.count is None and text.lower() in _NONE:
            return None
        try:
            value = _BOOLS[text.lower()] if self.item is bool else _whole(text) if self.item is int else self.item(text)
        except (ValueError, KeyError):
            raise ValueError(f"{text!r} is not {_WORDS[self.item]}") from None
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(text, map(str, self.choices), 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{text!r} is not one of {', '.join(map(str, self.choices))}{meant}")
        if self.least is not None and not value >= self.least:
            raise ValueError(f"{text} is below {self.least}")
        if self.most is not None and not value <= self.most:
            raise ValueError(f"{text} is above {self.most}")
        return value

    def several(self, texts: Sequence[str]) -> tuple[Any, ...]:
        """The value of a list, whose values may stand in one text with commas; raises ValueError with what is wrong."""
        if len(texts) == 1 and "," in texts[0]:
            texts = [each.strip() for each in texts[0].split(",")]
        if self.count and len(texts) != self.count:
            raise ValueError(f"it wants {self.count} values, not {len(texts)}")
        return tuple(self.one(text) for text in texts)

    def node(self, node: yaml.Node) -> Any:
        """The value of a node of a YAML file; raises ValueError with what is wrong."""
        if isinstance(node, yaml.ScalarNode):
            if node.tag == "tag:yaml.org,2002:null":
                if self.optional:
                    return None
                if not (self.item is str and self.count is None):
                    raise ValueError("it has no value")
                return ""
            return self.one(node.value) if self.count is None else self.several([node.value])
        if isinstance(node, yaml.SequenceNode) and self.count is not None:
            if all(isinstance(each, yaml.ScalarNode) for each in node.value):
                return self.several([each.value for each in node.value])
            raise ValueError("a list holds single values here, no lists or mappings")
        raise ValueError(f"{'a list' if isinstance(node, yaml.SequenceNode) else 'a mapping'} is not {_WORDS[self.item]}")


def _whole(text: str) -> int:
    """6e5 and 600000.0 are whole numbers, too."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _fields(settings: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(settings)
    return ((field, hints[field.name]) for field in dataclasses.fields(settings))


def _flag(name: str) -> str:
    return ("--" if len(name) > 1 else "-") + name.replace("_", "-")


def _dashed(argv: Sequence[str], kinds: dict[str, _Kind], first: str) -> Iterator[str]:
    """The arguments, with dashes in the names of flags; values stay as they are.

    Where an argument may come without a flag, a switch before it does not take it for its value: `--evaluate data/cifar10`.
    """
    known = {_flag(prefix + each) for name, kind in kinds.items() for each in (name, *kind.also) for prefix in ("", "no_")}
    switches = {_flag(each) for name, kind in kinds.items() for each in (name, *kind.also) if kind.item is bool and first}
    for argument, following in itertools.zip_longest(argv, argv[1:], fillvalue="-"):
        name, equals, value = argument.partition("=")
        dashed = _flag(name[2:]) if name.startswith("--") else name
        if dashed not in known:
            yield argument
        elif dashed in switches and not equals and not following.startswith("-") and following.lower() not in (*_BOOLS, *_NONE):
            yield f"{dashed}=true"
        else:
            yield dashed + equals + value


def _read(file: str, kinds: dict[str, _Kind]) -> dict[str, Any]:
    """The settings in a YAML file."""
    if file.endswith(".py"):  # nanoGPT's are assignments
        raise OutlastError(
            f"--config {file} is Python; write its settings in a YAML file, `name: value` instead of `name = value`"
        )
    try:
        with open(file, encoding="utf-8") as text:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise OutlastError(f"--config {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        at = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = f"line {at.line + 1}: {error.problem}" if at else str(error)  # type: ignore[union-attr]  # as it has a mark
        raise OutlastError(f"{file} is not YAML: {where}") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise OutlastError(f"{file} is not a mapping of settings to values, such as `{next(iter(kinds))}: ...`")
    found: dict[str, Any] = {}
    meant = {also: name for name, kind in kinds.items() for also in kind.also}
    for key, node in root.value:
        name, where = str(key.value).replace("-", "_"), f"{file}, line {key.start_mark.line + 1}"
        name = meant.get(name, name)
        if name not in kinds:
            raise OutlastError(f"{where}: there is no setting {key.value!r}; {_meant(name, kinds)}")
        if name in found:
            raise OutlastError(f"{where}: {name} is there already; leave one of the two out")
        try:
            found[name] = kinds[name].node(node)
        except ValueError as error:
            raise OutlastError(f"{where}: {name}: {error}") from None
    return found


def _meant(name: str, kinds: dict[str, _Kind]) -> str:
    near = difflib.get_close_matches(name, kinds, 1)
    return f"did you mean {near[0]}?" if near else "see --help for those there are"


def _parser(settings: type, kinds: dict[str, _Kind], about: str | None) -> _Parser:
    first = next((field.name for field, _ in _fields(settings) if field.metadata["first"]), "")
    usage = f"%(prog)s [--config FILE ...] {f'[{first.upper()}] ' if first else ''}[flags]"
    main = sys.modules["__main__"].__spec__ if settings.__module__ == "__main__" else None  # None: a file, `python mine.py`
    prog = f"python -m {main.name}" if main else None
    parser = _Parser(
        prog=prog, description=about, usage=usage, formatter_class=_Help, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.known, parser.first = kinds, first
    parser.add_argument(
        "--config", nargs="+", action="extend", metavar="FILE",
        help="YAML files of the settings below; later files override earlier ones, flags override files",
    )  # fmt: skip
    section: Any = parser
    for field, _ in _fields(settings):
        kind = kinds[field.name]
        names, dest = [_flag(name) for name in (field.name, *kind.also)], field.name
        if field.metadata["group"]:
            section = parser.add_argument_group(field.metadata["group"])
        reason = (field.metadata["help"] + _default(field, kind)).replace("%", "%%")
        if kind.count is not None:
            section.add_argument(*names, dest=dest, nargs="*", action=_List, const=kind, metavar=kind.metavar, help=reason)
            continue
        section.add_argument(
            *names, dest=dest, type=_converted(kind), nargs="?" if kind.item is bool else None, metavar=kind.metavar, help=reason,
            const=True if kind.item is bool else None,
        )  # fmt: skip
        if kind.item is bool:
            no = [_flag(f"no_{name}") for name in (field.name, *kind.also) if len(name) > 1]
            section.add_argument(*no, dest=dest, action="store_const", const=False, help=argparse.SUPPRESS)
    return parser


def _default(field: dataclasses.Field[Any], kind: _Kind) -> str:
    """How the help ends."""
    if kind.required:
        return " (required)"
    default: Any = field.default
    if isinstance(default, bool):
        return f" (default on; --no-{_flag(field.name)[2:]} turns it off)" if default else ""
    if default in (None, "", ()):
        return ""
    return f" (default {' '.join(map(str, default)) if kind.count is not None else default})"


def _converted(kind: _Kind) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return kind.one(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


class _List(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        try:
            setattr(namespace, self.dest, self.const.several(values))
        except ValueError as error:
            raise argparse.ArgumentError(self, str(error)) from None


class _Help(argparse.RawDescriptionHelpFormatter):
    """Switches show no value; reasons stand in one column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """All names, then the value once (argparse repeats it for each until Python 3.13)."""
        value = "" if action.nargs == 0 else self._format_args(action, self._get_default_metavar_for_optional(action))
        return ", ".join(action.option_strings) + (f" {value}" if value else "")

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "?":
            return ""
        if isinstance(action, _List):
            return " ".join([str(action.metavar)] * action.const.count) or f"[{action.metavar} ...]"
        return super()._format_args(action, default_metavar)


class _Parser(argparse.ArgumentParser):
    known: dict[str, _Kind]
    first: str
    """The field whose value needs no flag; empty: none."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, wrong = self.parse_known_args(args, namespace)
        if self.first and len(wrong) == 1 and not wrong[0].startswith("-"):
            if hasattr(found, self.first):
                self.error(f"{self.first} is there twice, as {getattr(found, self.first)!r} and as {wrong[0]!r}; leave one out")
            setattr(found, self.first, wrong.pop())
        for argument in wrong:
            name = argument.partition("=")[0]
            if name.startswith("--"):
                near = difflib.get_close_matches(name, [_flag(each) for each in [*self.known, "config"]], 1)
                self.error(f"there is no flag {name}" + (f"; did you mean {near[0]}?" if near else ""))
        if wrong:
            self.error(f"{wrong[0]!r} belongs to no flag")
        return found

    def error(self, message: str) -> NoReturn:
        raise OutlastError(f"{message}{'' if message.endswith('?') else ';'} see --help")
