"""`outlast notebook`: running JupyterLab with Outlast until Ctrl-C."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.base.errors import OutlastError
from outlast.cli import terminal, web_servers

if TYPE_CHECKING:
    from outlast.local import jupyter

_HERE = "127.0.0.1"
_START_S = 180.0
"""Timeout, in seconds, for the server's first response, which can take a minute in a pod on a busy node with cold disks."""
_GRACE_S = 20.0
"""Seconds within which kernels may end by themselves before the server is killed."""


def notebook(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Directory of the notebooks.")] = Path("notebooks"),
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
        typer.Option("--kubeflow", help="In a Kubeflow pod: serve below $NB_PREFIX, without a token unless one is given."),
    ] = False,
) -> None:
    """Run JupyterLab with a first notebook until Ctrl-C.

    The first notebook prepares text on Spark, trains a small GPT on it with two workers, kills one of them, and draws where the
    time went. Its kernel is the Python in which this Outlast is installed. An existing notebook is not changed, and jobs that
    were started go on when the server ends.

    Anyone who has the token can run programs on this machine. A new token is generated at each start and printed as part of the
    URL. The variable OUTLAST_NOTEBOOK_TOKEN, or --token-file, sets another token, which is not printed.

    \b
    Examples:
      outlast notebook
      outlast notebook ~/experiments --port 9000 --open
      outlast notebook work --bind 0.0.0.0 --token-file token.txt
    """
    from outlast.local import jupyter
    from outlast.worker.agent import pid1

    pid1.stand_by()  # in a pod, this process reaps jobs that outlive their kernels
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
    with tempfile.TemporaryDirectory(prefix="outlast-notebook-") as made_here, web_servers.until_stopped():
        private = Path(made_here)
        home = os.access(os.environ.get("HOME") or "/nonexistent", os.W_OK)
        environ = jupyter.environment(os.environ, directory, private, home=home)
        jupyter.prepare(private, token)
        server = jupyter.Server(directory, web_servers.port(port, bind, jupyter.PORT), bind, open_, base)
        _serve(server, private, environ, token, made=made)


def _serve(server: jupyter.Server, private: Path, environ: Mapping[str, str], token: str, *, made: bool) -> None:
    """Serve until a user shuts the server down in the page. Raises NotFound if the server does not start, OutlastError if it
    fails."""
    from outlast.local import jupyter

    with web_servers.child(
        "JupyterLab",
        jupyter.command(server, root=os.geteuid() == 0),
        private / "log",
        lambda: jupyter.ready(server, token),
        environ=environ,
        start_s=_START_S,
        grace_s=_GRACE_S,
    ) as process:
        (private / "token").unlink()  # the server has read it; a SIGKILL or a power loss would leave it behind
        url = jupyter.url(server, web_servers.shown(server.bind), token if made else "")
        print(f"JupyterLab: {url} (Ctrl-C ends it)", flush=True)
        if code := process.wait():
            raise OutlastError(f"JupyterLab has ended with exit code {code}")
