"""Running a script without a job file: `outlast run train.py` and `outlast init train.py` generate the same job file. As with
python and torchrun, options before the script are for `outlast`, and every word after the script is for the script."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from outlast.base import files
from outlast.base.errors import OutlastError
from outlast.job import contract

ModuleOption = Annotated[bool, typer.Option("-m", "--module", help="FILE is a Python module, such as package.train.")]
WorkersOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Number of workers. Default: that of the file, 1 for a script.")
]


class Command(TyperCommand):
    """A command that takes a job file, or a script with arguments, which stay in `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = False  # to find the first word that is not an option
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        ctx.allow_extra_args = bool(given.get("file")) and is_script(str(given["file"]), module=bool(given.get("module")))
        ctx.allow_interspersed_args = not ctx.allow_extra_args
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "FILE [ARGS]..."]


def is_script(file: str | Path, *, module: bool = False) -> bool:
    """Return whether the argument is a script or module rather than a job file."""
    return module or str(file).endswith(".py")


def init(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, followed by its arguments.")],
    module: ModuleOption = False,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of workers.")] = 1,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job. Default: that of the script.")] = None,
    into: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="File to write; - prints to standard output.")
    ] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a job file for a script, with comments.

    `outlast run` with the same script, options and arguments runs this job.

    \b
    Examples:
      outlast init train.py
      outlast init --workers 2 train.py --steps 100
      outlast init -o - -m package.train
    """
    if not is_script(file, module=module):
        raise OutlastError(f"{file}: give a Python script, such as train.py, or a module with -m")
    directory = Path.cwd() if str(into) == "-" else into.parent.resolve()
    text = job_file(file, ctx.args, module=module, workers=workers, name=name, gpus=gpus(), directory=directory)
    if str(into) == "-":
        print(text, end="")
        return
    target = files.target(into)
    if is_script(into) or is_script(target):
        raise OutlastError(f"{into} is the name of a script, not of a job file; write another file with -o, such as job.yaml")
    if not force and into.exists():
        raise OutlastError(f"{into} exists; --force replaces it, -o writes another file")
    try:
        files.replace(target, text)
    except OSError as error:
        raise OutlastError(f"{into} cannot be written: {error.strerror}; choose another place with -o") from error
    print(f"wrote {into}; train with: outlast run {into}")


def job_file(file: str, args: Sequence[str], *, module: bool, workers: int, name: str | None, gpus: int, directory: Path) -> str:
    """Return the text of a job file in `directory` for a script. The job's code is the working directory if that contains the
    script, so that the script finds the same files as when python runs it; otherwise it is the script's directory. Raises
    NotFound if the script does not exist."""
    from outlast.job import spec

    here = Path.cwd()
    if module:
        own = (here / file.partition(".")[0]).exists() or (here / f"{file.partition('.')[0]}.py").exists()
        source, code = "", here if own else None
        runs = f"module: {_quoted(file)}"
    else:
        path = Path(file).expanduser().absolute()
        source, top = _read(path), spec.code_of(path)
        code, runs = top, f"script: {_quoted(str(path.relative_to(top)))}"
    share = max(1, gpus // workers) if gpus else 0
    lines = [
        "# yaml-language-server: $schema=elasticjob.json",
        "# Editors complete this file once the schema is there: outlast validate --schema > elasticjob.json",
        "apiVersion: outlast.dev/v1alpha1",
        "kind: ElasticJob",
        "metadata:",
        f"  name: {_quoted(name or title(file, module=module))}",
        "spec:",
        *(f"  # {sentence}" for sentence in _saving(source)),
        f"  {runs}",
        *([f"  code: {_quoted(_from(directory, code))}"] if code and (module or code != directory) else []),
        *(["  args:", *(f"    - {_quoted(word)}" for word in args)] if args else []),
        "  workers:",
        f"    replicas: {workers}",
        "    # min: 1    # With these two it grows and shrinks while it runs: outlast scale 3",
        "    # max: 4",
        "  resources:",
        f"    gpu: {share}    # of each worker, with a process for each; 0 trains on the CPU",
        "  checkpoint:    # of scripts that use outlast.training",
        "    every: 5m",
        "    keep: 3",
        "  restarts:",
        "    limit: 10    # failures within the window; a newer checkpoint refunds them",
        "    window: 1h",
        "  hang:",
        "    limit: 10m",
        "  # output: s3://bucket/runs         # default: .outlast/runs",
        "  # data: [{from: ./data}]           # the script finds it in $OUTLAST_DATA",
        "  # environment: {requirements: requirements.txt}",
        "  # image: registry/image:tag        # of the pods, for outlast submit",
    ]
    return "\n".join(lines) + "\n"


def _from(directory: Path, place: Path) -> str:
    return f"./{place.relative_to(directory)}" if directory in (place, *place.parents) else str(place)


_ATTACH = {
    "transformers": "import outlast.hf; outlast.hf.attach(trainer, batch=64) before trainer.train()",
    "accelerate": "import outlast.accelerate; run = outlast.accelerate.attach(accelerator, batch=64, epochs=3) after prepare()",
    "lightning": "import outlast.lightning; outlast.lightning.attach(trainer, batch=64) before trainer.fit(), and "
    "L.Trainer(..., **outlast.lightning.world())",
    "torchtitan": "dataloader=outlast.torchtitan.Loader.Config(...) and checkpoint=outlast.torchtitan.CheckpointManager.Config()",
}
"""Lines with which a script resumes from exactly where it stopped, keyed by the library that the script uses
(docs/guide/hugging-face.md)."""


def _saving(source: str) -> Iterator[str]:
    """Yield comments on how this kind of script continues after a failure."""

    def imports(module: str) -> bool:
        package, _, name = module.rpartition(".")
        inside = rf"|^\s*from {package} import .*\b{name}\b" if package else ""
        return bool(re.search(rf"^\s*(from|import)\s+{re.escape(module)}\b{inside}", source, re.M))

    if any(imports(f"outlast.{name}") for name in ("training", "hf", "accelerate", "lightning", "torchtitan")):
        yield "It is attached to Outlast, which saves, and continues exactly where it was."
    elif library := next((name for name in _ATTACH if imports(name)), ""):
        yield "To continue exactly after a failure, and with any number of workers, the script needs:"
        yield f"    {_ATTACH[library]}"
    elif imports("pytorch_lightning"):
        yield "To continue after a failure the script resumes from the newest checkpoint of its Trainer."
    else:
        yield "To continue after a failure the script saves checkpoints in its working directory, and loads the newest one."


def title(file: str, *, module: bool = False) -> str:
    """Derive a job's name from the name of a script or module."""
    stem = file.rpartition(".")[2] if module else Path(file).stem
    return contract.job_name(stem)


def misplaced(ctx: typer.Context, file: str) -> Iterator[str]:
    """Yield warnings about `outlast` options that come after the script and are not in the script's text."""
    source = _read(Path(file).expanduser()) if is_script(file) and ctx.args else ""
    own = {option: each for each in ctx.command.params for option in each.opts if option.startswith("--")}
    for at, word in enumerate(ctx.args if source else ()):
        option = word.partition("=")[0]
        if option in own and option not in source:
            end = at + (1 if "=" in word or getattr(own[option], "is_flag", False) else 2)
            words = ["outlast", ctx.info_name or "run", *ctx.args[at:end], file, *ctx.args[:at], *ctx.args[end:]]
            yield f"{option} comes before the script: {shlex.join(words)}"


def command(file: str, args: Sequence[str], *, module: bool, workers: int | None, name: str | None, set_: Iterable[str]) -> str:
    """Return the command that continues a script's run; empty for a job file."""
    if not is_script(file, module=module):
        return ""
    chosen = [*(["--workers", str(workers)] if workers else []), *(["--name", name] if name else [])]
    changed = [word for change in set_ for word in ("--set", change)]
    return shlex.join(["outlast", "run", *chosen, *changed, *(["-m"] if module else []), file, *args])


def gpus() -> int:
    """Return the number of GPUs on this machine."""
    from outlast.local import worker_processes as workers

    return workers.gpu_count()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError as error:
        from outlast.job import spec

        raise spec.no_such_file(path, "*.py", "a script or of a job file") from error
    except OSError as error:
        raise OutlastError(f"{path} cannot be read: {error.strerror}") from error


def _quoted(text: str) -> str:
    import yaml

    plain = re.fullmatch(r"(--)?[A-Za-z_][\w./=,+-]*", text, re.ASCII) and yaml.safe_load(text) == text
    return text if plain else yaml.safe_dump(text, default_style='"', width=sys.maxsize).strip()
