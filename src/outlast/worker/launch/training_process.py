"""A training process, which runs the user's script or module as `__main__`.

    python -m outlast rank SCRIPT.py [ARG ...]
    python -m outlast rank -m MODULE [ARG ...]

The environment is the same as under torchrun. We add a first progress record, which identifies the process to the agent, a thread
that detects deadlocks between ranks (`hangs.deadlocks`), and after an exception a small file with its traceback.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import textwrap
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from outlast.base import files
from outlast.base.errors import NoRoom, NotRestored, NotSaved, OutlastError, Superseded, WrongBits, causes
from outlast.job import contract
from outlast.job.workerfiles import progress_file
from outlast.worker.hangs import deadlocks
from outlast.worker.launch import rank_failures, script_files

_began = time.monotonic()
is_rank = False
"""True if an agent started this process; False in the child processes of a rank."""
kept = False
"""True if the process is from an earlier world, so its errors may differ from those of a new process."""
command: Sequence[str] = ("",)
_USAGE = 2
"""Exit code with which argparse and most commands reject wrong arguments."""


def title(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    return f"rank {environ.get('RANK', '0')} {argv[1] if argv[0] == '-m' else os.path.basename(argv[0])}"


def main(argv: list[str]) -> None:
    """Run `argv` as Python would. Returns at the end of the script, or raises SystemExit."""
    global _began, is_rank, command
    command = argv
    _began = time.monotonic()  # our parent may have imported this module long ago
    state = os.environ.get(contract.Env.STATE)
    if state:
        script_files.share(os.environ, _tcp_store)
        enter(Path(state))
        is_rank = True
    watch = deadlocks.watch()
    watch.record = lambda sentence: _record(state, OutlastError(sentence), "", watch.code)
    watch.start()
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            if "" not in sys.path:
                sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code == _USAGE:
            _record(state, SystemExit(f"exited with code {_USAGE}"), "", _USAGE)
        raise
    except OutlastError as error:
        again = NoRoom, NotRestored, NotSaved, WrongBits
        codes = {Superseded: contract.Exit.INTERRUPTED, **dict.fromkeys(again, contract.Exit.FAILED)}
        code = codes.get(type(error), watch.code)
        _record(state, error, "", code)
        print(error, file=sys.stderr, flush=True)
        sys.exit(code)
    except Exception as error:
        report(error)
        sys.exit(contract.Exit.FAILED)


def report(error: Exception) -> None:
    """Record an error of the script for the agent, and print it."""
    if hint := _hint(error):
        error.add_note(hint)
    text = "".join(traceback.format_exception(error.with_traceback(_below_runpy(error))))
    if rank_failures.is_secondary(_record(os.environ.get(contract.Env.STATE), error, text, contract.Exit.FAILED)):
        log = f"{contract.LOGS}/{contract.worker_log(int(os.environ.get(contract.Env.WORKER, '0')))}"
        text = f"a collective broke here because another rank has ended; its error is in {log}\n{text}"
        deadlocks.watch().broken, text = True, textwrap.indent(text, contract.ECHO, lambda _: True)
    sys.stderr.write(text)
    sys.stderr.flush()


def is_secondary(error: BaseException) -> bool:
    """Return whether a collective broke because another rank had ended."""
    return rank_failures.is_secondary({"type": type(error).__name__, "message": str(error), "traceback": str(error)})


def _tcp_store(address: str) -> Any:
    from outlast.rendezvous import world_store

    return world_store.client(address)


def enter(state: Path) -> None:
    """Record that this process has joined a world, and delete the error record of an earlier process."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    generation = int(os.environ.get(contract.Env.GENERATION, "0"))
    with contextlib.suppress(OSError):
        (state / contract.ERROR.format(local_rank=local_rank)).unlink()
    writer = progress_file.Writer(state, local_rank)
    writer.write(progress_file.Progress(generation=generation, rank=int(os.environ.get("RANK", "0")), phase="started"))
    writer.close()
    directory = Path(os.environ.get(contract.Env.OUTPUT, "")) / contract.WORK
    if os.environ.get("RANK") == "0" and Path.cwd() == directory.resolve():  # rank 0's files are the results: `prepare.workdir`
        with contextlib.suppress(OSError):  # a full disk: the files are uploaded later
            files.replace(directory / contract.WORKED, str(generation))


def _below_runpy(error: BaseException) -> TracebackType | None:
    """Return the traceback from the user's first frame on; None if the script could not be read or compiled."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _hint(error: BaseException) -> str:
    """Return a remedy for a missing file that may exist beside the original of the code, of which the job runs in a copy."""
    code = os.environ.get(contract.Env.CODE)
    names = [str(cause.filename) for cause in causes(error) if isinstance(cause, FileNotFoundError) and cause.filename]
    if not code or not names or (os.path.isabs(names[0]) and not names[0].startswith(f"{code}/")):
        return ""
    return (
        f"outlast: the job runs in {code}; a copy of its code lacks what .gitignore or .outlastignore says: "
        f"name {names[0]} under data and read it in $OUTLAST_DATA, or use an absolute path"
    )


def _record(state: str | None, error: BaseException, text: str, code: int) -> dict[str, Any]:
    first = (str(error).strip().splitlines() or [""])[0][:500]
    record = {
        "rank": int(os.environ.get("RANK", "0")),
        "generation": int(os.environ.get(contract.Env.GENERATION, "0")),
        "type": type(error).__name__,
        "message": f"raised {type(error).__name__}: {first}" if text else first,
        "traceback": "\n".join(text.rstrip().splitlines()[-30:])[-8000:],
        "time": time.time(),
        "age_s": round(time.monotonic() - _began, 3),
        "code": code,
        "kept": kept,
    }
    try:
        if state:
            files.replace(Path(state) / contract.ERROR.format(local_rank=os.environ.get("LOCAL_RANK", "0")), json.dumps(record))
    except OSError as problem:
        print(f"cannot record the error in {state}: {problem}", file=sys.stderr)
    return record
