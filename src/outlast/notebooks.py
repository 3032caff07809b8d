"""Public API for notebooks: `follow` a job while it trains, `draw` its loss and time, and `report` its time."""

from outlast.local.notebooks import draw, follow, report

__all__ = ["draw", "follow", "report"]
