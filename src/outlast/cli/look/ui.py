"""`outlast ui`: a live view of jobs in a browser. See docs/decisions/0068-the-live-page.md."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from outlast.base.errors import Unanswered
from outlast.cli import completion, find_job, terminal, web_servers
from outlast.cli.find_job import ContextOption, NamespaceOption

PORT = 8700


def ui(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Job to show first. Default: the list of jobs.", autocompletion=completion.jobs),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="Port. Default: 8700, or a free one if that is taken.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Host in the URL of a proxy in front; may be repeated.")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="On a terminal, open a browser.")] = True,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Show jobs in a browser, as they train, until Ctrl-C.

    The list leads to the page of each job: its state, the plots and tables of `outlast report -o html`, which grow while it
    trains, and the logs of its workers. The server only reads, listens on this machine only, and needs the token in the URL,
    which is new at each start. If the server runs on another machine, forward the port: `ssh -L 8700:127.0.0.1:8700 HOST`.

    \b
    Examples:
      outlast ui
      outlast ui cifar10 --no-browser
      outlast ui -n team-a --port 9000
    """
    from outlast.cli.look import live_pages
    from outlast.job.report import page

    page.Page("")  # fails early if bokeh is missing, and imports it before a build is timed
    place = find_job.place(ctx, name, namespace, context)
    if name is not None:
        with contextlib.suppress(Unanswered):  # the page tries again
            place.status(find_job.job(place, name))
    first = f"job/{quote(name, safe='')}/" if name else "./"
    pages, number = live_pages.Pages(place), web_servers.port(port, live_pages.HERE, PORT)
    with live_pages.Server(pages, number, first, host or ()) as server, tempfile.TemporaryDirectory() as private:
        print(f"Jobs: {server.url} (Ctrl-C ends it)", flush=True)
        with web_servers.until_stopped():
            if browser and terminal.interactive(sys.stdout):
                _open(server.url, Path(private) / "open.html")
            server.serve_forever()


def _open(url: str, file: Path) -> None:
    """Open a browser through a private file, because every user of this machine can read a browser's arguments."""
    import webbrowser

    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):  # no text browser
        file.write_text(f'<meta http-equiv="refresh" content="0; url={url}">')
        webbrowser.open(file.as_uri())
