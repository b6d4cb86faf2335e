"""Logs as JSON, one object a line: for machines first. Prompts and texts never stand in them, nor do keys."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

log = logging.getLogger("forerun.serve")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(level: str = "info") -> None:
    """Of ours and uvicorn's; what was set up before for these names is replaced."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("forerun.serve", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name != "uvicorn.error" else []
        logger.setLevel(level.upper() if name == "forerun.serve" else logging.WARNING)
        logger.propagate = name == "uvicorn.error"


def tell(event: str, **fields: Any) -> None:
    log.info(event, extra={"fields": fields})
