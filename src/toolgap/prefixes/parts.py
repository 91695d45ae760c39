"""What a request's body consists of, part by part, in one form for both APIs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from toolgap.protocol import Api

Body = Mapping[str, Any]


class Kind(StrEnum):
    """What a part is."""

    SYSTEM = "system"
    USER = "user"
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    RESULT = "result"
    OTHER = "other"


class Part(NamedTuple):
    """One part of a message, or the system prompt.

    Attributes:
        path: Where it stands in the body, such as ``messages[3].content``.
        kind: What it is.
        message: Its message's position; -1 for a system prompt beside the messages.
        value: As the body has it.
        name: Of a call, the tool's; of a result, the call's id.
    """

    path: str
    kind: Kind
    message: int
    value: Any
    name: str = ""

    @property
    def text(self) -> str:
        """The value as text."""
        return self.value if isinstance(self.value, str) else json.dumps(self.value, ensure_ascii=False)


_KINDS = {
    "system": Kind.SYSTEM,
    "developer": Kind.SYSTEM,
    "user": Kind.USER,
    "assistant": Kind.TEXT,
    "tool": Kind.RESULT,
}

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message in which clients send reasoning back."""


def parts_of(body: Body, api: Api | None) -> list[Part]:
    """Parts of the system prompt and of all messages, in order."""
    parts: list[Part] = []
    if api is Api.ANTHROPIC and body.get("system") is not None:
        parts += _content("system", Kind.SYSTEM, -1, body["system"])
    for index, message in enumerate(body["messages"]):
        parts += message_parts(message, index)
    return parts


def message_parts(message: Mapping[str, Any], index: int) -> list[Part]:
    """Parts of one message, which stands at that position."""
    kind = _KINDS.get(str(message.get("role")), Kind.OTHER)
    path = f"messages[{index}]"
    parts: list[Part] = []
    if kind is Kind.TEXT:
        for field in REASONING_FIELDS:
            if isinstance(message.get(field), str) and message[field]:
                parts.append(Part(f"{path}.{field}", Kind.REASONING, index, message[field]))
                break
    name = str(message.get("tool_call_id") or "")
    parts += _content(f"{path}.content", kind, index, message.get("content"), name)
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            where = f"{path}.tool_calls[{number}].function.arguments"
            parts.append(
                Part(where, Kind.CALL, index, function.get("arguments", ""), str(function.get("name")))
            )
    return parts


def _content(path: str, kind: Kind, index: int, content: Any, name: str = "") -> Iterator[Part]:
    if isinstance(content, str):
        if content:
            yield Part(path, kind, index, content, name)
        return
    for number, block in enumerate(content if isinstance(content, list) else []):
        where = f"{path}[{number}]"
        match block:
            case {"type": "text", "text": str(text)}:
                yield Part(f"{where}.text", kind, index, text, name)
            case {"type": "thinking", "thinking": str(text)}:
                yield Part(f"{where}.thinking", Kind.REASONING, index, text)
            case {"type": "tool_use", "name": str(tool), "input": value}:
                yield Part(f"{where}.input", Kind.CALL, index, value, tool)
            case {"type": "tool_result", "content": value}:
                yield from _result(f"{where}.content", index, value, str(block.get("tool_use_id") or ""))
            case _:
                yield Part(where, Kind.OTHER, index, block)


def _result(path: str, index: int, value: Any, name: str) -> Iterator[Part]:
    if isinstance(value, str):
        yield Part(path, Kind.RESULT, index, value, name)
        return
    yield from _content(path, Kind.RESULT, index, value, name)


def tool_name(tool: Mapping[str, Any]) -> str:
    """A tool definition's name, in either API's form."""
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name"))


def canonical(value: Any) -> str | None:
    """A form that is equal for JSON values that differ in the order of keys or in blanks only.

    None for text that is no JSON object or list.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, dict | list):
        return None
    return json.dumps(value, sort_keys=True)


def first_difference(before: Any, after: Any, path: str) -> str:
    """Path of the first place at which two JSON values differ, key order included."""
    if isinstance(before, dict) and isinstance(after, dict):
        if list(before) != list(after):
            if set(before) == set(after):
                return path
            changed = next(key for key in [*before, *after] if (key in before) is not (key in after))
            return f"{path}.{changed}"
        for key in before:
            if _written(before[key]) != _written(after[key]):
                return first_difference(before[key], after[key], f"{path}.{key}")
    if isinstance(before, list) and isinstance(after, list):
        for number, (one, other) in enumerate(zip(before, after, strict=False)):
            if _written(one) != _written(other):
                return first_difference(one, other, f"{path}[{number}]")
    return path


def _written(value: Any) -> str:
    return json.dumps(value)


def written_alike(before: Any, after: Any) -> bool:
    """Whether two JSON values are equal, key order included."""
    return _written(before) == _written(after)


class Span(NamedTuple):
    """Where a part stands in a rendered prompt, in characters."""

    start: int
    end: int
    path: str


def locate(text: str, parts: Sequence[Part], tools: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Where parts and tools stand in a prompt's text: those that are found, in the order of the text.

    A template may write a value in its own way; such a part is found by its name, or not at all.
    """
    spans: list[Span] = []
    cursor = 0
    for number, tool in enumerate(tools):
        start = text.find(f'"{tool_name(tool)}"', cursor)
        if start < 0:
            start = text.find(tool_name(tool), cursor)
        if start >= 0:
            if spans:
                spans[-1] = spans[-1]._replace(end=start)
            spans.append(Span(start, start + len(json.dumps(tool)), f"tools[{number}]"))
            cursor = start + 1
    after_tools = cursor
    cursor = 0
    for part in parts:
        wanted = part.text.strip()
        if part.kind is not Kind.SYSTEM:
            cursor = max(cursor, after_tools)
        start = text.find(wanted, cursor) if wanted else -1
        if part.kind is Kind.CALL:
            start = text.find(part.name, cursor)
            wanted = text[start : start + len(part.name) + len(wanted)]
        if start >= 0:
            spans.append(Span(start, start + len(wanted), part.path))
            cursor = start + len(wanted)
            if part.kind is Kind.CALL:
                cursor = start + len(part.name)
    return sorted(spans)


def place_of(offset: int, spans: Sequence[Span]) -> str:
    """The part that a character of a prompt belongs to, in words if it stands between parts."""
    inside = [span for span in spans if span.start <= offset < span.end]
    if inside:
        return inside[-1].path
    before = [span for span in spans if span.end <= offset]
    after = [span for span in spans if span.start > offset]
    if not before:
        return f"before {after[0].path}" if after else "the prompt"
    if not after:
        return f"after {before[-1].path}"
    return f"between {before[-1].path} and {after[0].path}"
