"""Public API for notebooks: `follow` a job while it trains, `draw` its report, or get the report's figures from `report`."""

from outlast.local.notebook_panel import draw, follow, report

__all__ = ["draw", "follow", "report"]
