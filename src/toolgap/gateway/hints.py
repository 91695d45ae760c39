"""``POST /toolgap/hints``: whoever runs the tools says how they get on.

A hint is one JSON object: Toolgap's own form, :class:`Hint`, or an event of Claude Code's HTTP hooks, so that
Claude Code can be pointed here as it is.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from toolgap.gateway.restoring import Restoring
from toolgap.gateway.turns import AmbiguousCallError, UnknownCallError

PATH = "/toolgap/hints"

MAX_BODY_BYTES = 4 << 20


class Hint(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is known of a tool call that runs, or of a session."""

    tool_call_id: Annotated[str | None, Meta(description="The call's id, as the answer gave it.")] = None
    left_s: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="It will run for so many seconds more.")
    ] = None
    ended: Annotated[bool, Meta(description="It has ended: the continuation comes.")] = False
    result: Annotated[
        dict[str, Any] | None,
        Meta(
            description="With `ended`: its result as the next request will show it: OpenAI's `tool` message, or "
            "Anthropic's `tool_result` block."
        ),
    ] = None
    session_ended: Annotated[
        str | None,
        Meta(description="The client's name of a session that is over: what is pending for it is cancelled."),
    ] = None


class ClaudeCodeEvent(msgspec.Struct, kw_only=True):
    """What is used of an event of Claude Code's hooks; the rest is ignored."""

    hook_event_name: str
    session_id: str = ""
    tool_use_id: str | None = None
    tool_calls: list[dict[str, Any]] = []


class HintError(ValueError):
    """A hint that says nothing, or too much; the text is for whoever sent it."""


class Hints(NamedTuple):
    """What a body says."""

    hints: list[Hint]
    """None if it is an event that tells nothing."""
    is_event: bool
    """Whether it is an event of a hook: one that is about nobody here is no error."""


def read(body: bytes) -> Hints:
    """The hints in a body.

    Raises:
        HintError
    """
    try:
        value = msgspec.json.decode(body)
        if isinstance(value, dict) and "hook_event_name" in value:
            return Hints(_of_claude_code(msgspec.convert(value, ClaudeCodeEvent)), is_event=True)
        hint = msgspec.convert(value, Hint)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HintError(f"no hint: {error}") from None
    given = (hint.left_s is not None, hint.ended, hint.session_ended is not None)
    if sum(given) != 1 or (hint.session_ended is None) != (hint.tool_call_id is not None):
        raise HintError("give tool_call_id with left_s or with ended, or session_ended alone")
    if hint.result is not None and not hint.ended:
        raise HintError("a result stands beside ended")
    if hint.left_s is not None and not math.isfinite(hint.left_s):
        raise HintError("left_s must be a finite number of seconds")
    return Hints([hint], is_event=False)


def _of_claude_code(event: ClaudeCodeEvent) -> list[Hint]:
    match event.hook_event_name:
        case "PostToolUse" | "PostToolUseFailure" if event.tool_use_id:
            return [Hint(tool_call_id=event.tool_use_id, ended=True)]
        case "PostToolBatch":
            calls = [call.get("tool_use_id") for call in event.tool_calls]
            return [Hint(tool_call_id=call, ended=True) for call in calls if isinstance(call, str)]
        case "SessionEnd" if event.session_id:
            return [Hint(session_ended=event.session_id)]
        case _:
            return []


def endpoint(restoring: Restoring) -> Callable[[Request], Awaitable[Response]]:
    """The route's endpoint.

    Args:
        restoring: Takes the hints.
    """

    async def take(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return _error(413, "too_large", f"a hint has at most {MAX_BODY_BYTES} bytes")
        try:
            hints, is_event = read(bytes(body))
        except HintError as error:
            return _error(400, "invalid_hint", str(error))
        taken = 0
        for hint in hints:
            try:
                await _give(restoring, hint)
                taken += 1
            except (UnknownCallError, AmbiguousCallError) as error:
                if not is_event:
                    return _of_lookup(error)
        # Claude Code reads fields of this reply that it knows: there must be none of them.
        return JSONResponse({"taken": taken})

    return take


async def _give(restoring: Restoring, hint: Hint) -> None:
    if hint.session_ended is not None:
        await restoring.session_ended(hint.session_ended)
    elif hint.tool_call_id is not None and hint.left_s is not None:
        await restoring.progressed(hint.tool_call_id, hint.left_s)
    elif hint.tool_call_id is not None:
        await restoring.tool_ended(hint.tool_call_id, hint.result)


def _of_lookup(error: LookupError) -> Response:
    match error:
        case AmbiguousCallError():
            return _error(409, "ambiguous_tool_call", "several conversations wait for a call of this id")
        case _:
            return _error(404, "unknown_tool_call", "no conversation waits for this call")


def _error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status)
