"""The stand-in for a training process that was forked from the warm process.

torchrun's agent starts, watches and signals *its* child, whereas the training process is a fork of `launch.warm_process`, which
has imported torch already. This small program is the child: it requests a fork from the warm process, passes on its stdin, stdout
and stderr, forwards signals, and ends in the same way as the training process.

With several processes on a worker, it also copies the output, to prefix each line with the rank. The program runs by path with
`python -I -S`, which starts in about 15 ms, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from types import FrameType

SOCKET = "warm.sock"
"""Name of the warm process's socket, in the directory of its worker."""
CONNECT_TIMEOUT_S = 5.0
"""Timeout of a connection in seconds, for a stopped listener with a full queue."""
PIECE = 65536
"""Maximum number of bytes in one read (the capacity of a pipe) and in a line; longer lines are split."""
PREFIX = "[rank {}] "
"""Prefix of each line of several processes."""
AGAIN_S = 1.0
"""Pause in seconds after a fork that failed at the limit on processes or descriptors."""
KILL_DELAY_S = 5.0
"""Time in seconds from SIGTERM to SIGKILL for training without a grace period."""


class Lines:
    """A copy of a process's output, from the pipe `write` to our stdout, with the rank as a prefix of each line."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self._rest = b""

    def copy(self, *, last: bool = False) -> bool:
        """Copy the lines of the next piece; in the `last` piece also an unfinished line. Returns whether more may follow."""
        more, data = True, b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.read, PIECE)
            more = bool(data)
        lines = (self._rest + data).splitlines(keepends=True)  # splits at \r, too, for progress bars
        self._rest = b"" if last or not lines or lines[-1].endswith((b"\r", b"\n")) else lines.pop()
        if len(self._rest) >= PIECE:
            lines.append(self._rest[:PIECE] + b"\n")
            self._rest = self._rest[PIECE:]
        for line in lines:
            os.write(1, PREFIX.format(os.environ["RANK"]).encode() + line)
        return more


def connect(path: str) -> socket.socket:
    """Connect to the warm process at `path`, which may be longer than a socket address (107 bytes on Linux)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_TIMEOUT_S)
    try:
        if len(os.fsencode(path)) < 100:
            sock.connect(path)
        else:
            directory = os.open(os.path.dirname(path), os.O_RDONLY)
            try:
                sock.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
            finally:
                os.close(directory)
    except OSError:
        sock.close()
        raise
    sock.settimeout(None)
    return sock


def request(sock: socket.socket, kind: str, argv: list[str], env: dict[str, str], cwd: str, fds: tuple[int, int, int]) -> None:
    """Request a fork that runs `kind` ("rank" or "elastic") with these arguments, environment, directory and streams."""
    message = json.dumps({"kind": kind, "argv": argv, "env": env, "cwd": cwd}).encode()
    socket.send_fds(sock, [len(message).to_bytes(4, "big")], fds)
    sock.sendall(message)


def main() -> None:
    """Request the fork, wait for its end, and end in the same way."""
    path, grace_s, *argv = sys.argv[1:]
    with contextlib.suppress(OSError):  # left by an earlier process, perhaps in another container
        os.unlink(error_path())
    try:
        sock = connect(path)
        lines = Lines() if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1" else None
        streams = (0, lines.write, lines.write) if lines else (0, 1, 2)
        request(sock, "rank", argv, dict(os.environ), os.getcwd(), streams)
    except OSError as problem:  # with the warm process our elastic agent has ended, too, and the rank would have no owner
        sys.exit(f"outlast | rank {os.environ.get('RANK')} cannot be started by the warm process: {problem}")

    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        promised = os.path.exists(os.environ.get("OUTLAST_NOTICE", ""))
        with contextlib.suppress(OSError):
            sock.sendall(b"%d\n" % number)
        signal.setitimer(signal.ITIMER_REAL, float(grace_s) if promised else KILL_DELAY_S)

    def kill(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(b"%d\n" % signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    signal.signal(signal.SIGALRM, kill)

    if lines:
        os.close(lines.write)
        while sock.fileno() not in select.select([sock.fileno(), lines.read], [], [])[0] and lines.copy():
            pass
    reply = b""
    with contextlib.suppress(OSError), sock.makefile("rb") as answer:
        reply = answer.readline()
    if lines:
        lines.copy(last=True)
    ended = json.loads(reply) if reply.endswith(b"\n") else {"status": -signal.SIGKILL, "time": time.time()}
    status = int(ended["status"])
    if status < 0:
        if why := str(ended.get("why", "")):
            time.sleep(AGAIN_S)  # another attempt follows at once
        record_death(-status, ended["time"], why)
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
        time.sleep(1)  # reached only if the signal does not end a process
    if status == 0 and not received:
        record({"rank": int(os.environ.get("RANK", "0")), "left": True})
    os._exit(status & 0xFF)


def error_path() -> str:
    """Return the path of the training process's error record, see `contract.ERROR`."""
    return os.path.join(os.environ.get("OUTLAST_WORKER_STATE", "/nonexistent"), f"error-{os.environ.get('LOCAL_RANK', '0')}.json")


def record_death(number: int, when: float, why: str = "") -> None:
    """Record that a signal ended the training process, or `why` it could not start. An error record of the process itself
    remains, since threads of torch may end it with SIGABRT while it exits with an exception."""
    path = error_path()
    if os.path.exists(path):
        return
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    rank = int(os.environ.get("RANK", "0"))
    record({"rank": rank, "type": name, "message": why or f"was killed by {name}", "traceback": "", "time": when})


def record(fields: dict[str, object]) -> None:
    """Write the error record; on a full disk, write nothing."""
    path = error_path()
    with contextlib.suppress(OSError):
        with open(path + ".tmp", "w") as file:
            json.dump(fields, file)
        os.replace(path + ".tmp", path)


if __name__ == "__main__":
    main()
