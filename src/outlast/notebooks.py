"""Jobs in a notebook: `follow` one while it trains, `draw` and `report` it."""

from outlast.local.notebooks import draw, follow, report

__all__ = ["draw", "follow", "report"]
