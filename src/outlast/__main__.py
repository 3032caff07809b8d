"""Every process that another of our processes starts is `python -m outlast ROLE ...`; any other word is a command of `outlast`.

So no command line names a module. Only the module of the role is imported, since the start of each process is waited for.
"""

import importlib
import sys

ROLES = {
    "agent": "outlast.worker.agent.start",  # the one role that is a command, too: of pods
    "faults": "outlast.local.fault_schedule",
    "follower": "outlast.worker.tracking.follower",
    "launcher": "outlast.local.launcher",
    "rank": "outlast.worker.launch.rank",
    "shard": "outlast.training.samples.stored_shards",
    "upload": "outlast.worker.agent.upload",
    "warm": "outlast.worker.launch.warm",
    "weights": "outlast.training.state.weights",
    "workdir": "outlast.worker.prepare.workdir",
}
"""The module of each role. Its `main` gets the other arguments and returns the exit code, or None for 0."""


def main(argv: list[str]) -> None:
    """Run the role or the command that the first argument names, and exit."""
    if argv and argv[0] in ROLES:
        sys.exit(importlib.import_module(ROLES[argv[0]]).main(argv[1:]))
    importlib.import_module("outlast.cli").main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
