"""What the gateway answers itself, in the form of the API that was called. Pure."""

from enum import Enum
from typing import NamedTuple

import msgspec

from toolgap.gateway.headers import Headers


class Kind(NamedTuple):
    """One kind of refusal: its status, and what each API calls it."""

    status: int
    code: str
    anthropic_type: str


class Refusal(Enum):
    """Why a request has no answer of an upstream."""

    BAD_TARGET = Kind(400, "bad_request_target", "invalid_request_error")
    TOO_LARGE = Kind(413, "request_too_large", "request_too_large")
    NO_UPGRADE = Kind(501, "websocket_not_supported", "invalid_request_error")
    BAD_UPSTREAM = Kind(502, "bad_upstream_answer", "api_error")
    UNREACHABLE = Kind(502, "upstream_unreachable", "api_error")
    TIMEOUT = Kind(504, "upstream_timeout", "timeout_error")
    FAULT = Kind(500, "gateway_fault", "api_error")


class Answer(NamedTuple):
    """A whole response."""

    status: int
    headers: Headers
    body: bytes


def answer(refusal: Refusal, message: str, *, path: str, request_id: str) -> Answer:
    """A refusal as an error of the API at this path: Anthropic's below ``/v1/messages``, else OpenAI's."""
    kind = refusal.value
    error: dict[str, object]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        inner = {"type": kind.anthropic_type, "message": message}
        error = {"type": "error", "error": inner, "request_id": request_id}
    else:
        of = "invalid_request_error" if kind.status < 500 else "server_error"
        error = {"error": {"message": message, "type": of, "param": None, "code": kind.code}}
    body = msgspec.json.encode(error)
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    if refusal is Refusal.TOO_LARGE:
        # Else the server would read on to the end of what is too large, only to drop it.
        headers.append((b"connection", b"close"))
    return Answer(kind.status, headers, body)
