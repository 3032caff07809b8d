"""Notes when processes start, fork and import, for `bench/start.py`. Python imports it first in every process that has this
directory in PYTHONPATH.

Each note is one line `time cpu pid parent modules what` in $OUTLAST_BENCH_NOTES: seconds since the epoch, CPU seconds of this
process, modules that were looked for so far. Watched modules give two notes, when their import begins and when it ends.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

WATCHED = {
    *(
        "outlast.worker.agent.lifecycle",
        "outlast.job.spec",
        "outlast.worker.prepare.phases",
        "outlast.storage.store",
        "outlast.storage.runs",
        "outlast.base.probes",
    ),
    *(
        "obstore",
        "outlast.worker.agent.coordination",
        "outlast.storage.checkpoints.in_store",
        "outlast.worker.prepare.compile_cache",
        "outlast.worker.launch.warm_process",
    ),
    *(
        "numpy",
        "torch",
        "torch.distributed.elastic.agent.server.local_elastic_agent",
        "torch._dynamo",
        "outlast.worker.agent.world_loop",
    ),
    *(
        "torch.distributed.checkpoint",
        "outlast.training.session",
        "outlast.worker.launch.training_process",
        "outlast.rendezvous.membership",
    ),
    *("torch.distributed.run",),
}
_notes = os.environ.get("OUTLAST_BENCH_NOTES", "")
_found = 0


def note(what: str) -> None:
    line = f"{time.time():.4f} {time.process_time():.4f} {os.getpid()} {os.getppid()} {_found} {what}\n"
    file = os.open(_notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


class Finder(importlib.abc.MetaPathFinder):
    """Finds no module itself, but times the watched ones."""

    def find_spec(self, name, path=None, target=None):
        global _found
        _found += 1
        if name not in WATCHED or (spec := importlib.machinery.PathFinder.find_spec(name, path, target)) is None:
            return None
        execute = spec.loader.exec_module

        def timed(module):
            note(f"begins {name}")
            try:
                execute(module)
            finally:
                note(f"imported {name}")

        spec.loader.exec_module = timed
        return spec


if _notes:
    note("python " + " ".join(sys.orig_argv[1:])[:200])
    os.register_at_fork(after_in_child=lambda: note("forked"))
    sys.meta_path.insert(0, Finder())
