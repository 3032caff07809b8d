"""`outlast notebook --on kubernetes`: a notebook in a cluster, reached by a port of this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from outlast import units
from outlast.cli import serving, show, terminal, which
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast import kube
    from outlast.cluster.notebook import Found
    from outlast.manifests.notebook import Wanted

NAME = "notebook"


@dataclass(frozen=True)
class Choices:
    """The options for a notebook in a cluster; None and False: not given."""

    image: str | None
    size: str | None
    storage_class: str | None
    shared: bool
    cpu: str | None
    memory: str | None
    gpu: int | None
    secret: list[str] | None
    account: str | None
    detach: bool
    stop: bool
    delete: bool
    yes: bool
    namespace: str | None
    context: str | None

    @property
    def given(self) -> list[str]:
        """The names of the options that were given."""
        values = dataclasses.asdict(self)
        return [f"--{name.replace('_', '-')}" for name, value in values.items() if value not in (None, False, [])]


def run(ctx: typer.Context, name: str | None, choices: Choices, port: int | None) -> None:
    """Make or find a notebook and forward a port to it until Ctrl-C; or stop it."""
    from outlast.cluster import notebook
    from outlast.manifests import notebook as manifests

    name = manifests.checked(name or NAME)
    cluster = which.cluster(ctx, choices.namespace, choices.context).cluster
    if choices.stop or choices.delete:
        _stop(cluster, name, choices)
        return
    wanted = _wanted(name, cluster.namespace, choices)
    for done in notebook.bring(cluster, wanted):
        terminal.say(done)
    there = notebook.find(cluster, name)
    if there is None:
        raise OutlastError(f"the notebook {name} is gone again: somebody has deleted it")
    again = (
        f"outlast notebook --on kubernetes{f' {name}' if name != NAME else ''}{which.suffix(choices.namespace, choices.context)}"
    )
    if choices.detach:
        print(f"open it with: {again}")
        return
    _open(cluster, there, again, port)


def _open(cluster: kube.Cluster, there: Found, again: str, port: int | None) -> None:
    """Forward a port until Ctrl-C."""
    from outlast.cluster import notebook
    from outlast.manifests import notebook as manifests
    from outlast.notebooks import jupyter

    ready = False
    with serving.until_stopped():
        notebook.await_ready(cluster, there, terminal.say)
        number = serving.port(port, "127.0.0.1", manifests.PORT)
        with notebook.forwarded(cluster, there.pod, number, terminal.say):
            ready = True
            url = jupyter.url(jupyter.Server(port=number, base=there.base), "localhost", there.token)
            print(f"JupyterLab: {url} (Ctrl-C ends the connection, the notebook goes on)", flush=True)
            if not there.token:
                terminal.say("without a token: somebody else made it, or you may not read its Secret")
            notebook.stay(cluster, there, terminal.say)
    terminal.say(f"{'the notebook goes on' if ready else 'not ready yet'}; open it with: {again}; stop it with: {again} --stop")


def _stop(cluster: kube.Cluster, name: str, choices: Choices) -> None:
    from outlast.cluster import notebook
    from outlast.manifests import notebook as manifests

    if choices.delete and not choices.yes:
        terminal.confirm(f"this deletes the notebook {name} in namespace {cluster.namespace}, and all work on its claim")
    for done in notebook.stop(cluster, name, claim=choices.delete):
        print(done, flush=True)
    if not choices.delete:
        print(f"the work is kept in PersistentVolumeClaim {manifests.claim_name(name)}; --delete deletes it, too")


def _wanted(name: str, namespace: str, choices: Choices) -> Wanted:
    """The notebook of the options. Raises OutlastError for values that cannot be."""
    from outlast.manifests.notebook import Wanted

    fields: dict[str, Any] = {
        "image": choices.image,
        "size": choices.size,
        "storage_class": choices.storage_class,
        "shared": choices.shared,
        "memory": choices.memory,
        "gpus": choices.gpu,
        "account": choices.account,
        "secrets": tuple(choices.secret) if choices.secret else None,
    }
    if choices.cpu is not None:
        try:
            fields["cpu"] = units.cores(choices.cpu)
        except ValueError as error:
            raise OutlastError(f"--cpu {choices.cpu}: {error}") from error
    return Wanted(name, namespace, **{key: value for key, value in fields.items() if value is not None})


def checked(on: str) -> str:
    """The place; raises OutlastError for another one than kubernetes."""
    return show.one_of("place for a notebook", on, ("kubernetes",), none="")
