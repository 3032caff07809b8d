"""`outlast data prepare --engine spark --master k8s://URL`: Spark's driver becomes a Job of the cluster, whose pod runs the same
command."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import render, terminal, which
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast.manifests.spark import Wanted

JobOption = Annotated[
    Path | None,
    typer.Option("--job", metavar="FILE", help="With k8s://: a job file, for image, volumes, secrets, scheduling, resources."),
]
ClaimOption = Annotated[
    str | None, typer.Option(metavar="NAME:/PATH", help="With k8s://: the claim that all pods mount, and where.")
]
ImageOption = Annotated[str | None, typer.Option(metavar="IMAGE", help="With k8s://: the image, with Outlast, Spark and a Java.")]
SecretOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="With k8s://: a Secret with variables; may be repeated.")
]
FollowOption = Annotated[bool, typer.Option("-f", "--follow", help="With k8s://: show the driver's log until its end.")]
PrintOption = Annotated[bool, typer.Option("--print", help="With k8s://: print the documents instead of applying them.")]

_HERE = {"job", "claim", "image", "secret", "follow", "print_", "namespace", "context", "master"}
"""Parameters that only say where and how to submit."""
_PATHS = {"labels"}
"""Parameters besides source and target that are paths."""


@dataclasses.dataclass(frozen=True)
class Where:
    """The options for a cluster."""

    job: Path | None = None
    claim: str | None = None
    image: str | None = None
    secrets: Sequence[str] = ()
    follow: bool = False
    print_: bool = False
    namespace: str | None = None
    context: str | None = None

    def refuse(self) -> None:
        """Raise OutlastError if any of them is given: there is no cluster."""
        if self != Where():
            raise OutlastError(
                "--job, --claim, --image, --secret, --follow, --print, --namespace and --context are for Spark in a cluster; "
                "add --engine spark --master k8s://URL"
            )


def submit(ctx: typer.Context, source: Path, where: Where) -> None:
    """Submit the command that is being run. Raises OutlastError."""
    from outlast import spec
    from outlast.cluster import preparation
    from outlast.data.prepare import spark as engine
    from outlast.manifests import spark

    master, to, work = str(ctx.params["master"]), str(ctx.params["to"]), ctx.params["work"]
    given = spec.load(where.job) if where.job else None
    described = spark.described(
        given, spark.name(to), image=where.image or "", claim=where.claim or "", secrets=tuple(where.secrets)
    )
    settings = engine.settings(master, None, ctx.params["conf"] or ())
    namespace = where.namespace or (given.metadata.namespace if given else None)
    place = which.cluster(ctx, namespace, where.context)
    preparation.check_master(master, place.cluster)
    wanted = spark.Wanted(
        words=[str(ctx.info_name), *words(ctx)],
        source=_absolute("SOURCE", source),
        to=to if "://" in to else _absolute("--to", Path(to)),
        work=_absolute("--work", work) if work else "",
        job=described,
        namespace=place.cluster.namespace,
        conf=settings.conf,
    )
    if where.print_:
        print(render.text(spark.documents(wanted)), end="")
        return
    print(preparation.submit(place.workloads, wanted, terminal.say))
    _then(place, wanted, which.suffix(namespace, where.context), follow=where.follow)


def _then(place: Any, wanted: Wanted, options: str, *, follow: bool) -> None:
    from outlast.cli.submit import follow_

    if follow:
        raise typer.Exit(follow_(place, wanted.name, options))
    print(f"look at it with: outlast logs -f {wanted.name}{options}")


def words(ctx: Any) -> Iterator[str]:
    """The words of the command line behind the command's name, without those that only say where to do it. Raises OutlastError
    for paths that a pod would take for others."""
    arguments: list[str] = []
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name)
        if param.name in _HERE or source is None or source.name != "COMMANDLINE":
            continue
        value = ctx.params[param.name]
        if param.param_type_name == "argument":
            arguments.append(str(value))
        elif value is True:
            yield param.opts[-1]
        else:
            for each in value if isinstance(value, list | tuple) else [value]:
                yield param.opts[-1]
                yield _absolute(param.opts[-1], each) if param.name in _PATHS else str(getattr(each, "value", each))
    yield from arguments


def _absolute(word: str, path: Path) -> str:
    if not PurePosixPath(path).is_absolute():
        raise OutlastError(f"{word} {path} is a path in the pods of driver and executors, which has to begin with /")
    return str(path)
