"""Who coordinates the rendezvous of a worker, and so what its agent has to do for the run as a whole."""

from __future__ import annotations

import enum

from outlast import contract
from outlast.errors import OutlastError


class Mode(enum.Enum):
    """The coordinator of a run."""

    LAUNCHER = "the launcher on this machine"
    """It owns the run, starts the workers and records the end; agents only train. In all other modes agents claim the run."""
    OPERATOR = "the operator"
    ELECTED = "an agent, elected in etcd"
    WORKER_0 = "the agent of worker 0"

    @classmethod
    def of(cls, endpoint: str) -> Mode:
        """The mode of a rendezvous endpoint (`contract.Env.RENDEZVOUS`). Raises OutlastError for an unknown one."""
        schemes = {"unix://": cls.LAUNCHER, contract.KUBERNETES: cls.OPERATOR, "c10d://": cls.WORKER_0}
        schemes |= dict.fromkeys(contract.ETCD, cls.ELECTED)
        for scheme, mode in schemes.items():
            if endpoint.startswith(scheme):
                return mode
        raise OutlastError(f"rendezvous by {endpoint} is not known here; say backend: c10d or etcd")
