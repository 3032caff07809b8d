"""`outlast notebook`: JupyterLab with Outlast in it, on this machine; `notebook_pod` has those in clusters."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import notebook_pod, serving, terminal
from outlast.cli.which import ContextOption, NamespaceOption
from outlast.errors import NotFound, OutlastError

if TYPE_CHECKING:
    from outlast.notebooks import jupyter

_HERE = "127.0.0.1"
_START_S = 180.0
"""How long the server may take to answer: in a pod on a busy node, with cold disks, it takes a minute."""
_GRACE_S = 20.0
"""How long kernels have to end before the server is killed; they end themselves then."""


def notebook(
    ctx: typer.Context,
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIR|NAME]",
            help="Where the work is kept; in a cluster the notebook's name. Default: notebooks; notebook.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="Port. Default: 8888, or a free one if that is taken.")
    ] = None,
    bind: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at; 0.0.0.0 for all.")] = _HERE,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the token from this file. Default: a new random one.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
    kubeflow: Annotated[
        bool,
        typer.Option(
            "--kubeflow", help="In a pod of Kubeflow: serve below $NB_PREFIX; without a token of its own unless one is given."
        ),
    ] = False,
    on: Annotated[
        str | None, typer.Option("--on", metavar="kubernetes", help="Start it in a pod of a cluster.", show_default=False)
    ] = None,
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="In a cluster: another image with JupyterLab.")] = None,
    size: Annotated[str | None, typer.Option(metavar="SIZE", help="In a cluster: size of its claim. Default: 10Gi.")] = None,
    storage_class: Annotated[
        str | None, typer.Option(metavar="NAME", help="In a cluster: StorageClass of its claim. Default: the cluster's.")
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="In a cluster: pods on other nodes, as Spark's, may mount its claim (ReadWriteMany).")
    ] = False,
    cpu: Annotated[str | None, typer.Option(metavar="N", help="In a cluster: cores. Default: 1, or more if idle.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="In a cluster: memory. Default: 4Gi.")] = None,
    gpu: Annotated[int | None, typer.Option(metavar="N", min=0, help="In a cluster: GPUs. Default: 0.")] = None,
    secret: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="In a cluster: a Secret with variables; may be repeated.")
    ] = None,
    account: Annotated[
        str | None, typer.Option(metavar="NAME", help="In a cluster: a ServiceAccount that is there. Default: one of its own.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="In a cluster: start it, and do not open it.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="In a cluster: stop it, and keep the work.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="In a cluster: stop it, and delete the work.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Start JupyterLab with a first notebook, on this machine until Ctrl-C, or in a cluster.

    The first notebook prepares text on Spark, trains a small GPT on it with two workers, kills one of them, and draws where
    the time went. Its kernel is the Python of this Outlast. A notebook that is there already is not changed, and
    jobs that were started go on when the server ends.

    Whoever has the token can run programs here: it is made anew at each start and printed as part of the URL. The
    variable OUTLAST_NOTEBOOK_TOKEN, or --token-file, gives another one, which is not printed.

    In a cluster it runs in a pod, its work is on a claim, and a port of this machine leads to it until Ctrl-C; it goes on then,
    and the same command opens it again. Where Kubeflow is, it is a Notebook of Kubeflow.

    \b
    Examples:
      outlast notebook
      outlast notebook ~/experiments --port 9000 --open
      outlast notebook work --bind 0.0.0.0 --token-file token.txt
      outlast notebook --on kubernetes -n team-a --gpu 1 --secret aws
      outlast notebook --on kubernetes -n team-a --shared --storage-class efs
      outlast notebook --on kubernetes -n team-a --stop
    """
    choices = notebook_pod.Choices(
        image, size, storage_class, shared, cpu, memory, gpu, secret, account, detach, stop, delete, yes, namespace, context
    )
    if on is None:
        if choices.given:
            raise OutlastError(f"{', '.join(choices.given)}: only for a notebook in a cluster; add --on kubernetes")
        _here(Path(where or "notebooks"), port, bind, token_file, open_=open_, kubeflow=kubeflow)
        return
    notebook_pod.checked(on)
    if bind != _HERE or token_file or open_ or kubeflow:
        raise OutlastError("--bind, --token-file, --open and --kubeflow are for a notebook on this machine; leave out --on")
    notebook_pod.run(ctx, where, choices, port)


def _here(directory: Path, port: int | None, bind: str, token_file: Path | None, *, open_: bool, kubeflow: bool) -> None:
    """Serve until Ctrl-C."""
    from outlast.agent import pid1
    from outlast.notebooks import jupyter

    pid1.stand_by()  # in a pod: jobs outlive their kernels, and somebody has to reap them
    jupyter.check()
    base = jupyter.base(os.environ) if kubeflow else "/"
    if base != "/" and token_file is None and jupyter.TOKEN not in os.environ:
        token, made = "", False
        terminal.say("no token: Kubeflow's gateway says who may come in")
    else:
        token, made = jupyter.token(token_file, os.environ)
    directory = Path(os.path.abspath(directory))
    if jupyter.place(directory):
        terminal.say(f"put {jupyter.FIRST} into {directory}")
    with tempfile.TemporaryDirectory(prefix="outlast-notebook-") as made_here, serving.until_stopped():
        private = Path(made_here)
        home = jupyter.writable(os.environ.get("HOME"))
        environ = jupyter.environment(os.environ, directory, private, home=home)
        if there := jupyter.running(directory, environ):
            print(f"JupyterLab runs already in {directory}: {there if made else there.partition('?')[0]}")
            return
        jupyter.prepare(private, token)
        while True:
            server = jupyter.Server(directory, serving.port(port, bind, jupyter.PORT), bind, open_, base)
            try:
                _serve(server, private, environ, token, made=made)
            except NotFound:
                if port or not serving.answers(server.host, server.port):
                    raise
                continue  # another server took the port while ours started
            return


def _serve(server: jupyter.Server, private: Path, environ: Mapping[str, str], token: str, *, made: bool) -> None:
    """Serve until somebody shuts it down in the page. Raises NotFound when it does not start, OutlastError when it fails."""
    from outlast.notebooks import jupyter

    with serving.child(
        "JupyterLab",
        jupyter.command(server, root=os.geteuid() == 0),
        private / "log",
        lambda: jupyter.ready(server, token),
        environ=environ,
        start_s=_START_S,
        grace_s=_GRACE_S,
    ) as process:
        jupyter.forget(private)
        url = jupyter.url(server, serving.shown(server.bind), token if made else "")
        print(f"JupyterLab: {url} (Ctrl-C ends it)", flush=True)
        if code := process.wait():
            raise OutlastError(f"JupyterLab has ended with exit code {code}")
