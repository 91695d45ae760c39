"""Answers of ``/v1/messages``. No I/O."""

from typing import Any

from toolgap.gateway.apis.answers import (
    Content,
    Json,
    Pieces,
    Reader,
    UnreadableError,
    Usage,
    arguments_of,
    dicts,
    given,
    optional,
    refuse_error,
    usage_of,
)
from toolgap.hooks.restores import Call

TEXT_OF = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("partial_json", "input"),
}
"""Of a delta: the field that has its text, and the block's field that the text belongs to."""

REASONING = ("thinking", "redacted_thinking")
PER_BLOCK_BYTES = 1024

CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")
"""Of a usage: parts of the prompt that ``input_tokens`` leaves out."""


class _Block:
    def __init__(self, reader: Reader, start: Json) -> None:
        self.start = start
        self._reader = reader
        self._pieces: dict[str, Pieces] = {}

    def add(self, delta: Json) -> None:
        kind = TEXT_OF.get(given(delta.get("type"), str))
        if kind is None:
            raise UnreadableError("a delta of a kind that is not known")
        source, target = kind
        if target not in self._pieces:
            self._pieces[target] = Pieces(self._reader)
        self._pieces[target].add(delta.get(source))

    def whole(self) -> Json:
        block = dict(self.start)
        for field, pieces in self._pieces.items():
            if not (text := str(pieces)):
                continue
            block[field] = (
                arguments_of(text) if field == "input" else f"{optional(block.get(field), str) or ''}{text}"
            )
        return block


class MessagesReader(Reader):
    """Reads a message. Its id is no request's of SGLang, so the prefix is named by messages.

    Args:
        max_bytes: What may be kept of it.
        request: Not needed: what the API returns is what a client has to send back, thinking included.
    """

    def __init__(self, max_bytes: int, request: Json) -> None:
        super().__init__(max_bytes)
        self._id: str | None = None
        self._blocks: dict[int, _Block] = {}
        self._finish: str | None = None
        self._usage = Usage()

    def event(self, event: Json) -> None:
        """One event; those of unknown types say nothing."""
        refuse_error(event)
        match event.get("type"):
            case "message_start":
                message = given(event.get("message"), dict)
                self._begin(message)
                for index, block in enumerate(dicts(message.get("content"))):
                    self._start(index, block)
            case "content_block_start":
                self._start(given(event.get("index"), int), given(event.get("content_block"), dict))
            case "content_block_delta":
                begun = self._blocks.get(given(event.get("index"), int))
                if begun is None:
                    raise UnreadableError("a content block goes on that has not begun")
                begun.add(given(event.get("delta"), dict))
            case "message_delta":
                self._end(optional(event.get("delta"), dict) or {})
                self._count(event.get("usage"))
            case "message_stop":
                self.over = True

    def body(self, body: Json) -> None:
        """A whole message."""
        refuse_error(body)
        self._begin(body)
        for index, block in enumerate(dicts(body.get("content"))):
            self._start(index, block)
        self._end(body)
        self.over = True

    def content(self) -> Content:
        """The message with its blocks in order."""
        blocks = [self._blocks[index].whole() for index in sorted(self._blocks)]
        certain = self._finish not in ("max_tokens", "refusal")
        calls = [block for block in blocks if block.get("type") == "tool_use"]
        return Content(
            id=self._id,
            calls=tuple(Call(given(block.get("id"), str), given(block.get("name"), str)) for block in calls)
            if certain
            else (),
            messages=({"role": "assistant", "content": blocks},) if certain and blocks else (),
            finish=self._finish,
            reasoned=any(block.get("type") in REASONING for block in blocks),
            usage=self._usage,
        )

    def _begin(self, message: Json) -> None:
        if self._id is None and (name := optional(message.get("id"), str)):
            self.keep(len(name))
            self._id = name
        self._count(message.get("usage"))

    def _start(self, index: int, block: Json) -> None:
        if index in self._blocks:
            raise UnreadableError("a content block begins twice")
        self.keep(PER_BLOCK_BYTES + size_of(block))
        self._blocks[index] = _Block(self, block)
        self.calling |= block.get("type") == "tool_use"

    def _end(self, delta: Json) -> None:
        finish = optional(delta.get("stop_reason"), str)
        if finish is not None:
            self.keep(len(finish))
            self._finish, self.whole = finish, True

    def _count(self, value: Any) -> None:
        new = usage_of(value, "input_tokens", "output_tokens")
        if new.prompt_tokens is not None:
            # The API counts what came from a cache beside the rest. No prompt is empty: SGLang streams a 0
            # where it does not know yet.
            cached = (usage_of(value, name, "").prompt_tokens or 0 for name in CACHED)
            new = new._replace(prompt_tokens=new.prompt_tokens + sum(cached) or None)
        self._usage = Usage(*(b if b is not None else a for a, b in zip(self._usage, new, strict=True)))


def size_of(value: Any) -> int:
    """Bytes that a JSON value takes in memory, roughly, but never less than its text."""
    waiting, total = [value], 0
    while waiting:
        item = waiting.pop()
        total += 64
        if isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str):
            total += 4 * len(item)
    return total
