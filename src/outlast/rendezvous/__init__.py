"""Rendezvous: the decision on which workers train together (`world`), the transports that carry it, and torchrun's handler."""

from __future__ import annotations

from typing import Any


def entry_point() -> Any:
    """The function that torch's registry loads from `torchrun.handlers`; it returns the function that creates handlers.

    The module `handler` is imported only when a handler is created: torch loads its entry points while torch itself is half
    imported.
    """

    def create(params: Any) -> Any:
        from outlast.rendezvous import handler

        return handler.create(params)

    return create
