"""Reading turns: request bodies, alone or with their responses, as a file holds them or a gateway records them.

A line of a recording is one JSON object::

    {"session": "...", "api": "openai", "request": {...}, "response": {...}}

``request`` is the body as it was sent to ``/v1/chat/completions`` or ``/v1/messages``; all else is optional.
``response`` is the body of the reply, of a streamed one as it would have been without streaming. Other keys,
such as times, are left alone. Lines that a gateway has recorded without content, or for an API whose requests
have no messages, are passed over.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from toolgap.protocol import Api


class TurnsError(ValueError):
    """The input holds no turns; the text says what is wrong with it, and where."""


class Turn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request and, if it is known, its response.

    Attributes:
        request: The body of the request.
        response: The body of the reply.
        session: Turns of one session follow each other; None if the input names none.
        api: Whose form the bodies have.
    """

    request: dict[str, Any]
    response: dict[str, Any] | None = None
    session: str | None = None
    api: Api | None = None

    def answer(self) -> dict[str, Any] | None:
        """The answer as the message that a client would send back; None if it is not known."""
        response = self.response or {}
        if self.api is Api.ANTHROPIC:
            content = response.get("content")
            return {"role": "assistant", "content": content} if isinstance(content, list) else None
        message = _first(response.get("choices")).get("message")
        if not isinstance(message, dict):
            return None
        return {"role": "assistant", **{key: value for key, value in message.items() if value is not None}}

    def answer_ids(self) -> list[int] | None:
        """The answer's tokens, if the response tells them: see :data:`ANSWER_ID_FIELDS`."""
        response = self.response or {}
        choice = _first(response.get("choices"))
        extension = response.get("sglext")
        listed = extension.get("output_ids") if isinstance(extension, dict) else None
        candidates = [choice.get(field) for field in ANSWER_ID_FIELDS]
        candidates += listed[:1] if isinstance(listed, list) else []
        for ids in candidates:
            if isinstance(ids, list) and ids and all(isinstance(token, int) for token in ids):
                return list(ids)
        return None


ANSWER_ID_FIELDS = ("response_token_ids", "token_ids")
"""Of a choice: where SGLang, and others, put the answer's tokens if ``return_token_ids`` asks for them.

SGLang's own extension, ``sglext.output_ids`` of the response, is read as well.
"""


def _first(values: Any) -> Mapping[str, Any]:
    first = values[0] if isinstance(values, list) and values else {}
    return first if isinstance(first, dict) else {}


def read_turns(data: bytes, api: Api | None = None) -> list[Turn]:
    """Turns of a JSON list, or of one JSON object a line, in the order of the input.

    Args:
        data: UTF-8. An element is a request's body, or an object with ``request``.
        api: Whose form all bodies have; else what an element says, else what its session's bodies look like.

    Raises:
        TurnsError: it is neither, or an element is no turn.
    """
    elements = list(_elements(data))
    turns = [_turn(value, where) for value, where in elements if not _is_bare(value)]
    if elements and not turns:
        raise TurnsError("it was recorded without content, or of APIs without messages: it names no prefix")
    for session in dict.fromkeys(turn.session for turn in turns):
        members = [turn for turn in turns if turn.session == session]
        looks = Api.ANTHROPIC if any(map(_is_anthropic, members)) else Api.OPENAI
        for turn in members:
            turn.api = api or turn.api or looks
    return turns


def sessions(turns: Sequence[Turn]) -> dict[str | None, list[Turn]]:
    """Turns by session, both in the order of the input."""
    grouped: dict[str | None, list[Turn]] = {}
    for turn in turns:
        grouped.setdefault(turn.session, []).append(turn)
    return grouped


def _elements(data: bytes) -> Iterator[tuple[Any, str]]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise TurnsError(f"it is not UTF-8: {error}") from None
    try:
        value = json.loads(text)
    except ValueError as error:
        # Not splitlines(): JSON may hold what Unicode calls a line's end.
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if len(lines) < 2 or not lines[0][1].lstrip().startswith("{") or not _is_json(lines[0][1]):
            raise TurnsError(f"it is no JSON: {error}") from None
        for number, line in lines:
            try:
                yield json.loads(line), f"line {number}"
            except ValueError as problem:
                raise TurnsError(f"line {number} is no JSON: {problem}") from None
        return
    values = value if isinstance(value, list) else [value]
    for number, element in enumerate(values, 1):
        yield element, f"element {number}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _is_bare(value: Any) -> bool:
    """Whether it is a gateway's line of a turn without messages."""
    if not isinstance(value, dict) or not value.keys() >= {"session", "path", "asked_s"}:
        return False
    request = value.get("request")
    return not isinstance(request, dict) or "messages" not in request


def _turn(value: Any, where: str) -> Turn:
    if not isinstance(value, dict):
        raise TurnsError(f"{where} is no JSON object")
    fields = value if "request" in value else {"request": value}
    try:
        turn = msgspec.convert(fields, Turn)
    except msgspec.ValidationError as error:
        raise TurnsError(f"{where}: {error}") from None
    messages = turn.request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise TurnsError(f"{where} is no request with messages")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise TurnsError(f"{where}: every message must be an object with a role")
    if not all(isinstance(tool, dict) for tool in turn.request.get("tools") or []):
        raise TurnsError(f"{where}: every tool must be an object")
    return turn


_ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


def _is_anthropic(turn: Turn) -> bool:
    request = turn.request
    if "system" in request or "anthropic_version" in request:
        return True
    if any("input_schema" in tool for tool in request.get("tools") or []):
        return True
    if (turn.response or {}).get("type") == "message":
        return True
    return any(
        isinstance(block, dict) and block.get("type") in _ANTHROPIC_BLOCKS
        for message in request["messages"]
        if isinstance(message.get("content"), list)
        for block in message["content"]
    )
