"""A recording: one turn as a line of JSON, as :mod:`toolgap.prefixes.turns` reads it. No I/O.

Beside the keys described there, each line has the turn's times and sizes::

    asked_s, calling_s, whole_s    Unix time: the request came, its first tool call began to leave, its answer was whole
    prompt_tokens, output_tokens   as the server counted them
    request_bytes, answer_bytes    of their JSON, since a stream may say nothing of tokens
    num_calls                      tool calls of the answer
    tools                          names of the tools that the answer calls
    finish                         why the answer ended, in the API's word
    path                           of the API

What is not known is left out. Without content, ``request`` and ``response`` are left out as well, and so are
the names of tools: such a recording tells when and how much, and ``check-prefix`` cannot read it.
"""

from typing import Any

import msgspec

from toolgap.gateway.watch import Asked, Seen
from toolgap.prefixes.turns import Turn
from toolgap.protocol import Api


class Recorded(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line.

    Attributes:
        session: The conversation's key: no client's name can be read from it.
        api: Whose form the bodies have; None for APIs whose requests have no messages.
        path: Of the URL.
        request_bytes: Of the request, as JSON.
        answer_bytes: Of the answer's messages, as JSON; None if they are not read.
        num_calls: Tool calls of the answer.
    """

    session: str
    api: Api | None = None
    path: str
    asked_s: float
    calling_s: float | None = None
    whole_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    request_bytes: int
    answer_bytes: int | None = None
    num_calls: int
    finish: str | None = None
    tools: list[str] | None = None
    request: dict[str, Any] | None = None
    response: dict[str, Any] | None = None

    def line(self) -> bytes:
        """Its JSON, with the end of the line."""
        return msgspec.json.encode(self) + b"\n"


def recorded(session: str, asked: Asked, seen: Seen, *, asked_s: float, content: bool) -> Recorded:
    """A turn for a recording.

    Args:
        session: The conversation's key.
        asked: The request.
        seen: Its answer, with times on the clock of ``asked_s``.
        asked_s: When the request came.
        content: Whether what was said goes into the recording.
    """
    return Recorded(
        session=session,
        api=asked.route.api,
        path=asked.path,
        asked_s=asked_s,
        calling_s=seen.calling_s,
        whole_s=seen.whole_s,
        prompt_tokens=seen.usage.prompt_tokens,
        output_tokens=seen.usage.output_tokens,
        request_bytes=len(msgspec.json.encode(asked.request)),
        answer_bytes=len(msgspec.json.encode(seen.answer.messages)) if seen.answer.messages else None,
        num_calls=len(seen.calls),
        finish=seen.finish,
        tools=[call.tool for call in seen.calls] if content else None,
        request=asked.request if content else None,
        response=_response(asked.route.api, seen) if content else None,
    )


def turn_of(recorded: Recorded) -> Turn | None:
    """The turn as it is read again; None if it was recorded without its content."""
    if recorded.request is None:
        return None
    return Turn(
        request=recorded.request, response=recorded.response, session=recorded.session, api=recorded.api
    )


def _response(api: Api | None, seen: Seen) -> dict[str, Any] | None:
    """The body of the reply, of a streamed one as it would have been without streaming, as far as it is read."""
    if api is None or not seen.answer.messages:
        return None
    (message,) = seen.answer.messages
    prompt_tokens, output_tokens = seen.usage
    if api is Api.ANTHROPIC:
        usage = {"input_tokens": prompt_tokens, "output_tokens": output_tokens}
        about = {"id": seen.answer_id, "type": "message", "stop_reason": seen.finish, "usage": usage}
        return {**about, **message}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    choice = {"index": 0, "message": message, "finish_reason": seen.finish}
    return {"id": seen.answer_id, "object": "chat.completion", "choices": [choice], "usage": usage}
