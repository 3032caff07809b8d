"""The handler that connects torchrun to our rendezvous: `torchrun --rdzv-backend=outlast --rdzv-endpoint=...`.

Torch's elastic agent calls it, and a `Membership` provides the answers. It is published as the entry point `torchrun.handlers:
outlast`, and works with torch 2.11 and newer.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from outlast.job import contract, sealed_lines
from outlast.rendezvous import torchrun, world_store
from outlast.rendezvous.membership import Membership, NoWorld, RunClosed
from outlast.rendezvous.who_trains import MemberState

BACKEND = "outlast"


class Handler(RendezvousHandler):
    """Gives torch's elastic agent access to a `Membership`. torchrun does not report its processes."""

    def __init__(self, member: Membership) -> None:
        self.member = member
        member.notice = Path(os.environ.get(contract.Env.NOTICE, member.notice))
        for name in member.numbers:  # adding a name later may move the environment while C code reads it (glibc before 2.41)
            os.environ.setdefault(name, "0")

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self.member.run_id

    def is_closed(self) -> bool:
        return self.member.closed is not None

    def set_closed(self) -> None:
        """Do nothing: only the coordinator ends a run."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if this worker must stop its training processes and request the next world, otherwise 0."""
        return int(self.member.must_stop())

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next world that includes this worker, and connect to its store."""
        try:
            store = self.member.next_world(world_store.connect)
        except RunClosed as problem:
            closed = self.member.closed
            if closed and closed.code == contract.Exit.DONE:
                # The job has finished without this surplus node. torchrun has no other way to exit successfully.
                print(f"outlast | {closed.reason}; nothing is left to do here", flush=True)
                raise SystemExit(0) from problem
            raise RendezvousClosedError(str(problem)) from problem
        except NoWorld as problem:
            raise RendezvousTimeoutError(str(problem)) from problem
        world = self.member.world
        assert world is not None
        os.environ |= self.member.numbers  # training processes inherit our environment from torchrun
        host, port = world.address.rsplit(":", 1)
        return RendezvousInfo(store, self.member.rank, len(world.members), RendezvousStoreInfo(host, int(port)))

    def shutdown(self) -> bool:
        """Report how this node has ended. torchrun calls this in a `finally` block, so `sys.exception` returns its error."""
        ended_by = sys.exception()
        if ended_by is None:
            self.member.report(MemberState.DONE)
        elif isinstance(ended_by, ChildFailedError):
            rank, first = ended_by.get_first_failure()
            reason = f"worker {self.member.id} gives up, its --max-restarts are used up: rank {rank} exited with {first.exitcode}"
            failure = {"rank": rank, "code": contract.Exit.GIVEN_UP, "reason": reason, "time": time.time()}
            self.member.report(MemberState.LEAVING, failed=True, failure=failure)
        self.member.close()
        return True


def create(params: RendezvousParameters) -> Handler:
    """Create a handler from torchrun's `--rdzv-*` options, with defaults from the worker's environment. Raises OutlastError."""
    sizes = params.min_nodes, params.max_nodes
    client, join_s = torchrun.client(params.endpoint, run=params.run_id, sizes=sizes, conf=params.config)
    member = Membership(
        client,
        run_id=params.run_id,
        state=Path(os.environ.get(contract.Env.STATE) or _temporary_directory()),
        host=params.local_addr or client.host,
        processes=1,
        join_s=join_s,
    )
    member.key = sealed_lines.key(os.environ)
    return Handler(member)


def _temporary_directory() -> str:
    path = tempfile.mkdtemp(prefix="outlast-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
