"""A run's way back from wrong bits to the last state in which all ranks had the same bits.

A rank whose bits differ sends wrong gradients to all others, so the states of all ranks after that step have wrong bits, on disks
and in memory. `WayBack.go` records on every disk that these states do not count, and ends the rank's worker, as if it had
crashed. The next generation ignores these states (`resuming`) and replaces the worker. See docs/decisions/0069-the-way-back.md.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from outlast.base.errors import OutlastError, WrongBits
from outlast.job import differing_ranks
from outlast.job.differing_ranks import Difference
from outlast.storage import checkpoints
from outlast.training.state.shared_disks import Disks

log = logging.getLogger("outlast")


@dataclasses.dataclass(frozen=True)
class WayBack:
    """One generation's way back. `directory` has the run's checkpoints."""

    directory: Path
    run: str
    generation: int
    disks: Disks

    def go(self, found: Sequence[Difference], step: int, agreed: int) -> None:
        """Go back to step `agreed`, because of the differences `found` at `step`. A collective.

        Raises WrongBits on the ranks that differ. On the others the collective breaks, as when a rank crashes. Raises
        OutlastError on all ranks if earlier ways back have led no further. Returns if it is unclear which ranks differ, or
        if no disk can be written.
        """
        blamed = differing_ranks.blamed(found)
        if not blamed:
            return
        each = self.disks.gather(checkpoints.ways_back(self.directory, self.run))
        stuck = differing_ranks.stuck(agreed, {way for ways in each for way in ways})
        problem = withdraw(self.directory, self.run, [(self.generation, agreed)]) if self.disks.leader else ""
        problems = self.disks.gather(problem)
        if all(problems[rank] for rank in self.disks.leading):
            log.warning("outlast: the run cannot go back to step %d: %s", agreed, problems[0])
            return
        reason = next(
            (one.sentence(step, agreed) for one in found if one.ranks[0].rank == self.disks.rank), found[0].sentence(step, agreed)
        )
        if stuck:
            raise OutlastError(
                f"{reason}; going back to step {agreed} has not helped {differing_ranks.WAYS_BACK - 1} times, so the run ends: "
                "test the machines, or find what differs between ranks in the script; without checkpoint.goBack it goes on"
            )
        if self.disks.rank in blamed:
            raise WrongBits(f"{reason}; the run goes back to step {agreed}, and another worker takes the place of this one")
        self.disks.gather(None)  # breaks when the processes of the ranks that differ have ended


def withdraw(directory: Path, run: str, ways_back: Sequence[tuple[int, int]]) -> str:
    """Withdraw the states on this disk that do not count after these ways back. Returns the problem, or an empty string."""
    try:
        checkpoints.withdraw(directory, run, ways_back)
    except OSError as error:
        return f"checkpoints with wrong bits cannot be renamed in {directory}: {error.strerror or error}"
    return ""
