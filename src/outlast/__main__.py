"""Entry point of all processes: the first argument is the role of one of Outlast's own processes, or an `outlast` command.

Roles keep module names out of command lines. Only the role's module is imported, because a slow start delays training.
"""

import importlib
import sys

ROLES = {
    "agent": "outlast.worker.agent.start",  # also a command, which pods run
    "faults": "outlast.local.backend",
    "follower": "outlast.worker.tracking.follower",
    "inject": "outlast.worker.launch.relocatable",
    "launcher": "outlast.local.launcher",
    "rank": "outlast.worker.launch.training_process",
    "shard": "outlast.training.samples.shard_fetching",
    "upload": "outlast.worker.agent.upload",
    "warm": "outlast.worker.launch.warm_process",
    "weights": "outlast.training.state.weights",
    "workdir": "outlast.worker.prepare.workdir",
}
"""The module of each role. Its `main` receives the remaining arguments and returns the exit code, or None for 0."""


def main(argv: list[str]) -> None:
    """Run the role or the command named by the first argument, and exit."""
    if argv and argv[0] in ROLES:
        sys.exit(importlib.import_module(ROLES[argv[0]]).main(argv[1:]))
    importlib.import_module("outlast.cli").main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
