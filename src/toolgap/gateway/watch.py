"""Watches an answer as its bytes pass, and tells what it was. No I/O, no clock.

Nothing here may disturb the user's stream: what cannot be read gives None, never an exception, and what is
kept is bounded.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import msgspec

from toolgap.client import PrefixFields
from toolgap.gateway.apis.answers import Json, Reader, UnreadableError, Usage
from toolgap.gateway.apis.anthropic import MessagesReader
from toolgap.gateway.apis.chat import ChatReader
from toolgap.gateway.apis.completions import CompletionReader
from toolgap.gateway.apis.responses import ResponsesReader
from toolgap.gateway.apis.sse import Events, EventTooLongError
from toolgap.hooks.restores import Call
from toolgap.hooks.tool_calls import Answer
from toolgap.protocol import PROMPT_FIELDS, Api

MAX_BYTES = 16 << 20
"""What may be kept of one answer; a longer one passes unwatched."""

NAMESPACE_FIELDS = ("extra_key", "cache_salt", "lora_path", "routed_dp_rank")
"""Of a request's body: what decides, beside its prompt, which KV it can use."""

_DONE = b"[DONE]"


class Route(NamedTuple):
    """An API that is watched."""

    reader: Callable[[int, Json], Reader]
    api: Api | None
    """Whose form a prefix named by messages has; None if messages cannot name it."""
    names_requests: bool
    """Whether SGLang gives its answers the ids of its requests."""


ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": Route(ChatReader, Api.OPENAI, True),
    "/v1/completions": Route(CompletionReader, None, True),
    "/v1/messages": Route(MessagesReader, Api.ANTHROPIC, False),
    "/v1/responses": Route(ResponsesReader, None, True),
}
"""By path."""


class Asked(NamedTuple):
    """A request whose answer is worth watching."""

    path: str
    request: Json
    """Its body."""

    @property
    def route(self) -> Route:
        """The API it is for."""
        return ROUTES[self.path]


class Seen(NamedTuple):
    """What an answer was."""

    answer: Answer
    """Names the prefix of the next request."""
    calls: tuple[Call, ...]
    """Its tool calls, in order; empty if the client has nothing to run."""
    finish: str | None
    """Why it ended, in the API's word."""
    answer_id: str | None
    """As the API gives it, a request's or not."""
    reasoned: bool
    """Whether it has reasoning."""
    usage: Usage
    calling_s: float | None
    """When the first tool call began to leave, on the caller's clock; None if there is none."""
    whole_s: float
    """When the answer was whole, on the caller's clock: a tool may have started before, if it is eager."""


def asked(path: str, headers: Mapping[str, str], body: bytes) -> Asked | None:
    """A request, if its answer can be watched.

    Args:
        path: Of the URL, without the query.
        headers: By lower-case name.
        body: As sent.
    """
    if path not in ROUTES or not _is_plain(headers):
        return None
    request = _object(body)
    return None if request is None else Asked(path, request)


class Watch:
    """Watches one answer.

    Args:
        asked: What is answered.
        status: Of the response.
        headers: Of the response, by lower-case name.
        max_bytes: What may be kept of it.
    """

    def __init__(
        self, asked: Asked, status: int, headers: Mapping[str, str], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._asked = asked
        self._max_bytes = max_bytes
        self._reader: Reader | None = asked.route.reader(max_bytes, asked.request)
        self._events: Events | None = None
        self._body = bytearray()
        self._calling_s: float | None = None
        self._whole_s: float | None = None
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/event-stream":
            self._events = Events(max_bytes)
        elif kind != "application/json":
            self._reader = None
        if status != 200 or not _is_plain(headers):
            self._reader = None

    @property
    def is_calling(self) -> bool:
        """Whether a tool call has begun to leave: known in a stream before its end."""
        return self._calling_s is not None

    @property
    def is_whole(self) -> bool:
        """Whether all of the answer has come, though the stream may not have ended yet."""
        return self._whole_s is not None

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Bytes of the body pass. Never raises.

        Args:
            chunk: Of any length; cutting the body otherwise changes nothing but the times.
            now_s: When, on the caller's clock.
        """
        reader = self._reader
        if reader is None or reader.over:
            return
        try:
            if self._events is None:
                self._body += chunk
                if len(self._body) > self._max_bytes:
                    raise UnreadableError("the body is too long")
            else:
                self._stream(reader, self._events, chunk)
        except (UnreadableError, EventTooLongError):
            self._give_up()
        else:
            self._note(reader, now_s)

    def ended(self, now_s: float) -> Seen | None:
        """The body has ended, or broken off. Never raises.

        Returns:
            None if it cannot be told what the answer was, or if it is not whole.
        """
        reader = self._reader
        if reader is None:
            return None
        try:
            if self._events is None:
                body = _object(bytes(self._body))
                if body is None:
                    raise UnreadableError("the body is no JSON object")
                reader.body(body)
                self._note(reader, now_s)
            return self._seen(reader) if reader.whole else None
        except UnreadableError:
            return None
        finally:
            self._give_up()

    def _stream(self, reader: Reader, events: Events, chunk: bytes) -> None:
        for data in events.feed(chunk):
            if data.strip() == _DONE:
                reader.over = True
            else:
                event = _object(data)
                if event is None:
                    raise UnreadableError("an event is no JSON object")
                reader.event(event)
            if reader.over:
                break

    def _note(self, reader: Reader, now_s: float) -> None:
        if reader.calling and self._calling_s is None:
            self._calling_s = now_s
        if reader.whole and self._whole_s is None:
            self._whole_s = now_s

    def _give_up(self) -> None:
        self._reader = self._events = None
        self._body = bytearray()

    def _seen(self, reader: Reader) -> Seen:
        content, route = reader.content(), self._asked.route
        assert self._whole_s is not None
        return Seen(
            answer=Answer(
                request_id=content.id if route.names_requests else None,
                request=prefix_fields(self._asked),
                messages=content.messages,
                calls=[call.id for call in content.calls],
            ),
            calls=content.calls,
            finish=content.finish,
            answer_id=content.id,
            reasoned=content.reasoned,
            usage=content.usage,
            calling_s=self._calling_s if content.calls else None,
            whole_s=self._whole_s,
        )


def prefix_fields(asked: Asked) -> PrefixFields:
    """Of a request's body what names its prompt; empty if messages cannot."""
    request, api = asked.request, asked.route.api
    messages = request.get("messages")
    if api is None or not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return {}
    names = (*PROMPT_FIELDS, *NAMESPACE_FIELDS)
    fields: dict[str, Any] = {name: request[name] for name in names if request.get(name) is not None}
    if api is not Api.OPENAI:
        fields["api"] = api
    return cast("PrefixFields", fields)


def _is_plain(headers: Mapping[str, str]) -> bool:
    return headers.get("content-encoding", "identity").strip().lower() in ("", "identity")


def _object(data: bytes) -> Json | None:
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
