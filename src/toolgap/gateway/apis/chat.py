"""Answers of ``/v1/chat/completions``. No I/O."""

from collections.abc import Iterable
from typing import Any

from toolgap.gateway.apis.answers import (
    Content,
    Json,
    Pieces,
    Reader,
    UnreadableError,
    Usage,
    dicts,
    given,
    optional,
    refuse_error,
    usage_of,
)
from toolgap.hooks.restores import Call

REASONING = ("reasoning_content", "reasoning")
"""Where servers put reasoning; SGLang uses the first."""

CUT = ("length", "content_filter")
"""Ends at which an answer is not what the model meant: nobody knows what the client makes of it."""

PER_CALL_BYTES = 512
"""What a tool call costs beside its text, roughly."""


class _Call:
    def __init__(self, reader: Reader) -> None:
        self.id: str | None = None
        self.name = Pieces(reader)
        self.arguments = Pieces(reader)


class ChatReader(Reader):
    """Reads a chat completion.

    Args:
        max_bytes: What may be kept of it.
        request: Tells by its earlier answers whether the client sends reasoning back.
    """

    def __init__(self, max_bytes: int, request: Json) -> None:
        super().__init__(max_bytes)
        self._echoes = _echoed(request.get("messages"))
        self._id: str | None = None
        self._text, self._reasoning = Pieces(self), {name: Pieces(self) for name in REASONING}
        self._calls: dict[int, _Call] = {}
        self._finish: str | None = None
        self._choices = 1
        self._usage = Usage()

    def event(self, event: Json) -> None:
        """One chunk."""
        refuse_error(event)
        self._begin(event)
        for choice in dicts(event.get("choices")):
            if self._is_first(choice):
                self._add(optional(choice.get("delta"), dict) or {})
                self._end(choice)

    def body(self, body: Json) -> None:
        """A whole completion."""
        refuse_error(body)
        self._begin(body)
        for choice in dicts(body.get("choices")):
            if self._is_first(choice):
                self._add(given(choice.get("message"), dict))
                self._end(choice)
        self.over = True

    def content(self) -> Content:
        """The first choice. Of several, nobody knows which one the client goes on with."""
        text = str(self._text)
        reasoning = {name: str(pieces) for name, pieces in self._reasoning.items()}
        calls = [self._calls[index] for index in sorted(self._calls)]
        certain = self._choices == 1 and self._finish not in CUT
        message: Json = {"role": "assistant", "content": text or (None if calls else "")}
        message |= {name: said for name, said in reasoning.items() if said and name in self._echoes}
        if calls:
            message["tool_calls"] = [
                {
                    "id": given(call.id, str),
                    "type": "function",
                    "function": {"name": str(call.name), "arguments": str(call.arguments)},
                }
                for call in calls
            ]
        return Content(
            id=self._id if self._choices == 1 else None,
            calls=tuple(Call(given(call.id, str), str(call.name)) for call in calls) if certain else (),
            messages=(message,) if certain else (),
            finish=self._finish,
            reasoned=any(reasoning.values()),
            usage=self._usage,
        )

    def _begin(self, event: Json) -> None:
        if self._id is None and (name := optional(event.get("id"), str)):
            self.keep(len(name))
            self._id = name
        if event.get("usage") is not None:
            self._usage = usage_of(event["usage"], "prompt_tokens", "completion_tokens")

    def _is_first(self, choice: Json) -> bool:
        index = optional(choice.get("index"), int) or 0
        self._choices = max(self._choices, index + 1)
        return index == 0

    def _add(self, delta: Json) -> None:
        self._text.add(delta.get("content"))
        for name, pieces in self._reasoning.items():
            pieces.add(delta.get(name))
        for call in dicts(delta.get("tool_calls")):
            self.calling = True
            self._add_call(call)

    def _add_call(self, delta: Json) -> None:
        call_id = optional(delta.get("id"), str) or None
        index = optional(delta.get("index"), int)
        if index is None:
            # Without an index, an id begins a call and what follows belongs to it.
            index = len(self._calls) - (call_id is None)
        call = self._calls.get(index)
        if call is None:
            if index < 0:
                raise UnreadableError("a tool call goes on that has not begun")
            self.keep(PER_CALL_BYTES)
            call = self._calls[index] = _Call(self)
        if call.id is None and call_id is not None:
            self.keep(len(call_id))
            call.id = call_id
        function = optional(delta.get("function"), dict) or {}
        call.name.add(function.get("name"))
        call.arguments.add(function.get("arguments"))

    def _end(self, choice: Json) -> None:
        finish = optional(choice.get("finish_reason"), str)
        if finish is None:
            return
        if finish == "abort":
            raise UnreadableError("the request was aborted")
        self.keep(len(finish))
        self._finish, self.whole = finish, True


def _echoed(messages: Any) -> Iterable[str]:
    """Fields of reasoning that the client has sent back before."""
    asked = messages if isinstance(messages, list) else ()
    said = [m for m in asked if isinstance(m, dict) and m.get("role") == "assistant"]
    return frozenset(name for name in REASONING if any(message.get(name) for message in said))
