"""`outlast checkpoints list | show | verify | restore | export | prune`: checkpoints on this machine and in a store."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.base import units
from outlast.base.errors import NotFound, OutlastError
from outlast.cli import find_job, tables, terminal, transfer_progress
from outlast.cli.find_job import BestOption, ContextOption, NameArgument, NamespaceOption, StepOption, YesOption
from outlast.cli.groups import Commands
from outlast.cli.tables import Output, OutputOption
from outlast.job import contract

if TYPE_CHECKING:
    from outlast.storage.checkpoints import in_store, on_disk
    from outlast.storage.checkpoints.both_places import Places, Saved

app = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode=None, help="List, verify, restore, export and remove checkpoints."
)

StoreOption = Annotated[
    str | None, typer.Option(metavar="URL", help="URL of the job's output in a store, if it is not the one in the job.")
]


def _job(ctx: typer.Context, name: str | None, url: str | None, namespace: str | None, context: str | None) -> Places:
    """Return where a job's checkpoints are. Reads the store only if the job is unknown on this machine. Raises NotFound."""
    from outlast.storage.checkpoints import both_places, in_store

    elsewhere = find_job.in_store(name)
    if url and elsewhere:
        raise OutlastError(f"{elsewhere} and --store {url} are two places; leave one of them out")
    if elsewhere or (url and not (namespace or context) and not find_job.backend(ctx).list()):
        there, record = find_job.stored_run(elsewhere or url or "")
        return both_places.Places(record.run, None, in_store.Checkpoints(there, record.run))
    run = find_job.run(ctx, name, namespace, context)
    return both_places.of(run.place, run.name, url)


def _saved(job: Places) -> list[Saved]:
    return job.list_(_warn)


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)


def _say_none() -> None:
    print("there is no checkpoint of outlast.training; the files of a plain script are in its working directory", file=sys.stderr)


@app.command("list")
def list_(
    ctx: typer.Context,
    name: NameArgument = None,
    store: StoreOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the checkpoints of a job, on this machine and in its store.

    Only committed checkpoints are listed, the newest last. If they have a metric (checkpoint.by, run.save(metric=)), BEST ranks
    them, starting with 1 for the best.

    NAME may be a job file, or the URL of a job's output in a store, so this works even if the machine that ran the job is gone.
    For a job in a cluster, the checkpoints in its store are listed. The same is true of the other checkpoints commands.

    \b
    Examples:
      outlast checkpoints list
      outlast checkpoints list cifar10 -o json
      outlast checkpoints list cifar10 -n team-a
      outlast checkpoints list s3://bucket/runs/cifar10
    """
    job = _job(ctx, name, store, namespace, context)
    every = _saved(job)
    ranks = job.ranks(every)
    if output is not Output.TABLE:
        tables.data([saved.plain(job, ranks) for saved in every], output)
        return
    if not every:
        return _say_none()
    now, rows = time.time(), []
    by = next((saved.metric.by for saved in reversed(every) if saved.metric), None)
    columns = () if by is None else (by.upper() or "METRIC", "BEST")
    for saved in every:
        facts = saved.facts()
        age = units.human_seconds(now - facts["time"]) if facts["time"] is not None else None
        size = units.human_bytes(facts["bytes"]) if facts["bytes"] is not None else None
        where = "; ".join(filter(None, (saved.where if saved.where == "both" or not saved.problem else "", saved.problem)))
        good = (saved.metric and f"{saved.metric.value:.6g}", ranks.get(saved.step)) if columns else ()
        rows.append((saved.step, age, size, *good, facts["generation"], facts["world_size"], facts["run"], where))
    print(tables.table(("STEP", "AGE", "SIZE", *columns, "GENERATION", "RANKS", "RUN", "WHERE"), rows))


@app.command("show")
def show_(
    ctx: typer.Context,
    name: NameArgument = None,
    step: StepOption = None,
    best: BestOption = False,
    store: StoreOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a checkpoint and its files.

    Shows the newest checkpoint unless --best or --step is given.

    \b
    Examples:
      outlast checkpoints show --best
      outlast checkpoints show cifar10 --step 1200
      outlast checkpoints show s3://bucket/runs/cifar10 -o json
    """
    from outlast.storage.checkpoints import both_places

    job = _job(ctx, name, store, namespace, context)
    found = _saved(job)
    if not found:
        raise NotFound("nothing has been saved yet")
    newest = both_places.chosen(found, step, best=best)[-1]
    plain = newest.plain(job, job.ranks(found))
    if output is not Output.TABLE:
        tables.data({**plain, "files": newest.sizes()}, output)
        return
    fields = {
        "step": plain["step"],
        "directory": plain["path"],
        "in the store": plain["url"],
        "saved": tables.moment(plain["time"]) if plain["time"] else None,
        "size": units.human_bytes(plain["bytes"]) if plain["bytes"] is not None else None,
        plain["by"] or "metric": f"{plain['metric']:.6g}" if plain["metric"] is not None else None,
        "run": plain["run"],
        "world": f"{plain['world_size']} ranks, generation {plain['generation']}" if plain["world_size"] else None,
        "problem": plain["problem"],
    }
    print(f"{tables.fields(fields)}\n")
    print(tables.table(("FILE", "SIZE"), ((file, units.human_bytes(size)) for file, size in newest.sizes().items())))


@app.command()
def verify(
    ctx: typer.Context,
    name: NameArgument = None,
    step: StepOption = None,
    store: StoreOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check that checkpoints are undamaged.

    Reads all checkpoints, or only the one selected with --step, on this machine and in the store, and compares every file with
    its checksum. The exit code is 1 if a checkpoint is damaged. A checkpoint that training removes during the check, because of
    checkpoint.keep, does not count as damaged.

    \b
    Examples:
      outlast checkpoints verify
      outlast checkpoints verify cifar10 --step 1200
      outlast checkpoints verify s3://bucket/runs/cifar10
    """
    from outlast.storage.checkpoints import both_places

    job = _job(ctx, name, store, namespace, context)
    results = []

    def tell(step: int, where: str, problem: str | None, size: int, *, gone: bool = False) -> None:
        if not gone:
            results.append({"step": step, "where": where, "whole": problem is None, "problem": problem or ""})
        if output is Output.TABLE:
            at = contract.checkpoint_name(step) + ("" if where == "here" else " in the store")
            said = "removed meanwhile, as checkpoint.keep says" if gone else problem or f"whole, {units.human_bytes(size)}"
            print(f"{at}: {said}", flush=True)

    found = both_places.chosen(_saved(job), step)
    if not found:
        _say_none()
    for saved in found:
        if saved.here:
            problem = _verified(saved.here.path)
            tell(saved.step, "here", problem, saved.here.bytes, gone=problem is not None and not saved.here.path.exists())
    there = [saved.there for saved in found if saved.there]
    if job.there and there:
        whole = sum(checkpoint.bytes for checkpoint in there)
        with transfer_progress.transfer("read", whole, quiet=output is not Output.TABLE) as (progress, stop):
            for checkpoint in there:
                problem = job.there.verify(checkpoint, deep=True, progress=progress, stop=stop)
                gone = problem is not None and checkpoint.place not in [c.place for c in job.there.list_()]
                tell(checkpoint.step, "store", problem, checkpoint.bytes, gone=gone)
    if output is not Output.TABLE:
        tables.data(results, output)
    if not all(result["whole"] for result in results):
        raise typer.Exit(1)


def _verified(path: Path) -> str | None:
    """Return what is damaged in a checkpoint, or None if nothing is. Protects the checkpoint from removal during the check."""
    from outlast.storage import checkpoints

    try:
        with checkpoints.reading(path):
            return checkpoints.verify(path)
    except OSError:  # it is being removed, or damaged: `verify` returns the details
        return checkpoints.verify(path)


@app.command()
def restore(
    ctx: typer.Context,
    name: NameArgument = None,
    step: StepOption = None,
    best: BestOption = False,
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Target directory. Default: where the job looks for it; ./checkpoints for a URL."),
    ] = None,
    store: StoreOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Download a checkpoint from the store.

    Downloads the newest undamaged checkpoint unless --best or --step is given. Every file is verified. If this machine has a
    valid checkpoint of the same step, that checkpoint is kept.

    \b
    Examples:
      outlast checkpoints restore
      outlast checkpoints restore cifar10 --step 1200
      outlast checkpoints restore s3://bucket/runs/cifar10 --best --to best
    """
    from outlast.storage.checkpoints import both_places, in_store

    job = _job(ctx, name, store, namespace, context)
    if job.there is None:
        raise OutlastError(f"the job has no store, its checkpoints are in {job.directory}; name one with --store URL")
    directory = to or job.directory or Path(contract.CHECKPOINTS)
    found = job.there.list_()
    try:
        if best or step is not None:
            [saved] = both_places.chosen([both_places.Saved(c.step, there=c) for c in found], step, best=best)
            with transfer_progress.transfer("received", saved.there.bytes if saved.there else 0) as (progress, stop):
                assert saved.there
                restored = job.there.fetch(saved.there, directory, progress=progress, stop=stop)
        else:
            say = functools.partial(print, file=sys.stderr, flush=True)
            with transfer_progress.transfer("received", found[-1].bytes if found else 0) as (progress, stop):
                newest = job.there.restore(directory, say=say, progress=progress, stop=stop)
            if newest is None:
                raise NotFound(f"{job.there.store.url} holds no checkpoint that is whole")
            restored = newest
    except in_store.Damaged as problem:
        raise OutlastError(f"{problem}; without --step the newest undamaged one is restored") from problem
    except OSError as error:
        raise OutlastError(f"{directory} cannot be written: {error.strerror}; name another directory with --to") from error
    print(f"step {restored.step}, {units.human_bytes(restored.bytes)}: {restored.path}")


@app.command()
def export(
    ctx: typer.Context,
    name: NameArgument = None,
    step: StepOption = None,
    best: BestOption = False,
    to: Annotated[Path, typer.Option(metavar="FILE", help="File to write; the suffix .safetensors selects that format.")] = Path(
        "model.pt"
    ),
    key: Annotated[str, typer.Option(metavar="NAME", help="Name of the module in run.resume().")] = "",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Write the weights in a checkpoint to a file.

    The file can be read with torch.load(FILE, weights_only=True) or with safetensors. The weights come from the newest checkpoint
    unless --best or --step is given. A checkpoint that is only in a store is downloaded first. --key is needed if training has
    saved several modules. Needs torch.

    \b
    Examples:
      outlast checkpoints export
      outlast checkpoints export cifar10 --best --to cifar10.safetensors
      outlast checkpoints export gan --key generator --to generator.pt
    """
    from outlast.storage.checkpoints import both_places

    job = _job(ctx, name, None, namespace, context)

    def fetch(stored: in_store.Checkpoint, directory: Path) -> on_disk.Checkpoint:
        with transfer_progress.transfer("received", stored.bytes) as (progress, stop):
            return job.fetched(stored, directory, progress=progress, stop=stop)

    with job.undamaged(both_places.chosen(_saved(job), step, best=best), _warn, fetch) as found:
        # in a separate process, because importing torch takes seconds
        command = [sys.executable, "-m", "outlast", "weights", str(found.path), str(to), key]
        if code := subprocess.run(command, check=False).returncode:
            raise typer.Exit(code)
    print(f"step {found.step}, {units.human_bytes(to.stat().st_size)}: {to}")


@app.command()
def prune(
    ctx: typer.Context,
    name: NameArgument = None,
    keep: Annotated[int, typer.Option(metavar="N", min=2, help="Number of newest checkpoints to keep; at least 2.")] = 2,
    best: Annotated[int, typer.Option(metavar="N", min=0, help="Number of best checkpoints to keep as well.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    yes: YesOption = False,
    store: StoreOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Remove old checkpoints, on this machine and in the store.

    The newest checkpoints are kept, and so are the best ones (if there is a metric) and any that are being read. On a terminal,
    the command asks first.

    \b
    Examples:
      outlast checkpoints prune --keep 3 --dry-run
      outlast checkpoints prune cifar10 --keep 2 --yes
      outlast checkpoints prune s3://bucket/runs/cifar10 --keep 5
    """
    from outlast.storage import checkpoints

    job = _job(ctx, name, store, namespace, context)
    own = [c for c in checkpoints.list_(job.directory) if c.run == job.run] if job.directory else []
    retention = checkpoints.Retention(keep, best)
    here = checkpoints.expired(own, retention)
    there = job.there.prune(retention, dry_run=True) if job.there else []
    lines = [f"{c.path.name} here, {units.human_bytes(c.bytes)}" for c in here]
    lines += [f"{contract.checkpoint_name(place.step)} in the store" for place in there]
    if not lines:
        measured = best and any(c.metric for c in [*own, *(job.there.list_() if job.there else ())])
        print(f"nothing to remove: there are no more than {keep}" + (f", and the best {best}" if measured else ""))
        return
    ask = sys.stdin.isatty() and not yes
    for line in lines if dry_run or ask else ():
        print(f"would remove {line}")
    if dry_run:
        return
    if ask:
        terminal.confirm("These checkpoints would be removed")
    for checkpoint in here:
        did = "removed" if checkpoints.remove(checkpoint) else "kept, for it is being read:"
        print(f"{did} {checkpoint.path.name} here, {units.human_bytes(checkpoint.bytes)}")
    if job.there and there:
        for place in job.there.prune(retention):
            print(f"removed {contract.checkpoint_name(place.step)} in the store")
