"""The log: one JSON object a line. It has neither bodies, headers nor queries, so neither prompts nor keys."""

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any

from toolgap.gateway.events import Event, Known, Refused
from toolgap.gateway.observing import Ending
from toolgap.gateway.proxy import Exchange

logger = logging.getLogger("toolgap.gateway")

EXPECTED_REFUSALS = frozenset({"not_worthwhile"})
"""No news to whoever runs the gateway."""

_UNCOMPLETED = "ASGI callable returned without completing response."


def where(error: BaseException) -> str:
    """An exception's kind and place. Its text stays out: it may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; the fields of ``extra={"fields": {...}}`` beside the rest."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, without its end."""
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line["exception"] = where(error)
        return json.dumps(line, ensure_ascii=True, default=str)


def expected(record: logging.LogRecord) -> bool:
    """A filter that drops uvicorn's complaint of a response without its end: the gateway leaves it so on purpose."""
    return record.getMessage() != _UNCOMPLETED


def log_event(event: Event) -> None:
    """One line for what became of each restore."""
    match event:
        case Refused():
            about: dict[str, Any] = {"operation": event.operation_id, "code": event.code}
            level = logging.DEBUG if event.code in EXPECTED_REFUSALS else logging.INFO
        case Known():
            status = event.status
            about = {
                "operation": status.operation_id,
                "state": status.state.value,
                "reason": status.reason.value if status.reason else None,
                "inserted_tokens": status.inserted_tokens,
                "used_tokens": status.used_tokens if event.final else None,
            }
            level = logging.INFO if status.inserted_tokens else logging.DEBUG
        case _:
            return
    fields = {"conversation": event.conversation, "upstream": event.upstream, **about}
    logger.log(level, "restore", extra={"fields": fields})


def log_exchange(exchange: Exchange) -> None:
    """One line for each request, as it ends."""
    quiet = exchange.ending in (Ending.COMPLETE, Ending.CLIENT_LEFT)
    fields = {
        "request_id": exchange.request_id,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "ending": exchange.ending.value,
        "refusal": exchange.refusal.value.code if exchange.refusal else None,
        "upstream": exchange.upstream,
        "failovers": exchange.failovers,
        "request_bytes": exchange.sent_bytes,
        "response_bytes": exchange.received_bytes,
        "headers_s": None if exchange.headers_s is None else round(exchange.headers_s, 6),
        "elapsed_s": round(exchange.elapsed_s, 6),
    }
    logger.log(logging.INFO if quiet else logging.WARNING, "exchange", extra={"fields": fields})
