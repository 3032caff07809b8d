"""Logs to standard output in a cluster, as JSON for collectors or as text for people."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any


class Lines(logging.Formatter):
    """Formats each log record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _time(record.created), "level": record.levelname.lower()}
        line |= {name: getattr(record, name) for name in ("namespace", "job") if hasattr(record, name)}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Text(logging.Formatter):
    """Formats log records for people."""

    def format(self, record: logging.LogRecord) -> str:
        job = f"{record.namespace}/{record.job}: " if hasattr(record, "job") and hasattr(record, "namespace") else ""
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        lines = [f"{_time(record.created)} {job}{level}{record.getMessage()}"]
        return "\n".join(lines + ([self.formatException(record.exc_info)] if record.exc_info else []))


def write_log(*, text: bool) -> None:
    """Log to standard output, as text or as JSON."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(Text() if text else Lines())
    logger = logging.getLogger("outlast")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
