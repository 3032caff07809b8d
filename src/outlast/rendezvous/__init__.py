"""Rendezvous: deciding which workers train together (`who_trains`), transports, and torchrun's handler."""

from __future__ import annotations

from typing import Any


def entry_point() -> Any:
    """Return the function that creates handlers, for torch's `torchrun.handlers` registry.

    The function imports `handler` late because torch loads entry points while it is itself being imported.
    """

    def create(params: Any) -> Any:
        from outlast.rendezvous import handler

        return handler.create(params)

    return create
