"""`outlast exec | port-forward`: into the pod of a worker."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import which
from outlast.cli.which import ContextOption, NamespaceOption
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast.cluster.backend import KubernetesBackend

TENSORBOARD = 6006


def exec_(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    worker: Annotated[int, typer.Option(metavar="N", min=0, help="In the pod of this worker.")] = 0,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Run a command in the pod of a worker.

    With a terminal it is one there, too; what is piped in is what the command reads. The exit code is the command's.

    \b
    Examples:
      outlast exec cifar10 -- nvidia-smi
      outlast exec cifar10 --worker 1 -- bash
      tar c data | outlast exec cifar10 -- tar x -C /data
    """
    from outlast.kube import pods

    words = words or []
    if len(words) < 2:
        raise typer.BadParameter("give the job and the command: outlast exec NAME -- COMMAND")
    name, *command = words
    place = _cluster(ctx, name, namespace, context)
    pod = place.pod(name, worker)
    # Python has none for a descriptor that is closed
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    with _raw() if terminal else contextlib.nullcontext():
        ended = place.cluster.exec_(
            pod["metadata"]["name"],
            command,
            container=pods.container_name(pod),
            stdin=sys.stdin.buffer if sys.stdin is not None else None,
            stdout=_writer(1),
            stderr=_writer(2),
            tty=terminal,
            size=_size if terminal else None,
        )
    raise typer.Exit(ended.code)


def port_forward(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    worker: Annotated[int, typer.Option(metavar="N", min=0, help="To the pod of this worker.")] = 0,
    address: Annotated[str, typer.Option(metavar="HOST", help="Listen on this address of this machine.")] = "127.0.0.1",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Reach a port of a worker's pod on this machine, until Ctrl-C.

    PORT is that in the pod, or HERE:THERE; without it 6006, where TensorBoard listens.

    \b
    Examples:
      outlast port-forward cifar10
      outlast port-forward cifar10 8080
      outlast port-forward cifar10 9000:8080 --worker 1
    """
    words = words or []
    if not 1 <= len(words) <= 2:
        raise typer.BadParameter("give the job, and perhaps the port: outlast port-forward NAME [PORT]")
    here, there = _ports(words[1] if len(words) == 2 else str(TENSORBOARD))
    place = _cluster(ctx, words[0], namespace, context)
    pod = place.pod(words[0], worker)["metadata"]["name"]
    try:
        server = socket.create_server((address, here))
    except OSError as error:
        remedy = f"choose another, as in {here % 60000 + 1}:{there}"
        raise OutlastError(f"{address}:{here} cannot be listened on: {error.strerror}; {remedy}") from error
    here = server.getsockname()[1]
    print(f"http://{address}:{here} is port {there} of pod {pod}; Ctrl-C ends it", file=sys.stderr, flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_carry, args=(place, pod, there, connection), daemon=True).start()


def _carry(place: KubernetesBackend, pod: str, port: int, connection: socket.socket) -> None:
    with connection:
        try:
            place.cluster.forward(pod, port, connection)
        except OutlastError as error:
            print(f"outlast | {error}", file=sys.stderr, flush=True)
        finally:  # the thread that reads from it still has it open: without this, nobody sees its end
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _cluster(ctx: typer.Context, name: str, namespace: str | None, context: str | None) -> KubernetesBackend:
    """The cluster in which a job is; raises OutlastError for one of this machine."""
    found = which.in_cluster(which.place(ctx, name, namespace, context))
    if found is None:
        raise OutlastError(f"{name} is a job of this machine, which has no pods; look into it with: outlast status {name}")
    return found


def _ports(text: str) -> tuple[int, int]:
    here, _, there = text.rpartition(":")
    if not there.isdecimal() or not (here or there).isdecimal() or not 0 < int(there) < 2**16 or int(here or there) >= 2**16:
        raise typer.BadParameter(f"{text} is no port; give one from 1 to 65535, or HERE:THERE")
    return int(here or there), int(there)


def _writer(descriptor: int) -> Any:
    def write(part: bytes) -> None:
        while part:
            part = part[os.write(descriptor, part) :]

    return write


def _size() -> tuple[int, int]:
    size = os.get_terminal_size()
    return size.columns, size.lines


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Keys go to the command, Ctrl-C too, and are echoed there."""
    import termios
    import tty

    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
