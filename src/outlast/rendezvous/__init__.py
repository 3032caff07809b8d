"""Who trains together: the decision (`world`), the transports that carry it, and torchrun's door to it (`handler`)."""

from __future__ import annotations

from typing import Any


def entry_point() -> Any:
    """What torch's registry loads from `torchrun.handlers`: a function that returns the creator of handlers.

    The handler is imported when one is made: torch loads its entry points while it is itself half imported.
    """

    def create(params: Any) -> Any:
        from outlast.rendezvous import handler

        return handler.create(params)

    return create
