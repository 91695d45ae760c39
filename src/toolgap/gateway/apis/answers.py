"""What an answer says, put together from its events or from its whole body: one reader for each API. No I/O.

Readers believe nothing: what has not the shape that the API gives it raises :class:`UnreadableError`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from toolgap.hooks.restores import Call
from toolgap.hooks.tool_calls import Message

Json = dict[str, Any]

PIECE_BYTES = 64
"""What a kept piece of text costs beside its text, roughly."""


class UnreadableError(ValueError):
    """It is no answer of this API, it failed, or too much of it would have to be kept."""


class Usage(NamedTuple):
    """Sizes, as the server counts them; None where it does not say."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Content(NamedTuple):
    """A whole answer."""

    id: str | None
    """As the API gives it."""
    calls: tuple[Call, ...]
    messages: tuple[Message, ...]
    """The answer as the next request will show it; empty if that cannot be told."""
    finish: str | None
    """Why it ended, in the API's word."""
    reasoned: bool
    """Whether it has reasoning, be it in ``messages`` or not."""
    usage: Usage


class Reader(ABC):
    """Puts one answer together.

    Args:
        max_bytes: What may be kept of it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left_bytes = max_bytes
        self.calling = False
        """Whether a tool call has begun to leave."""
        self.whole = False
        """Whether all that matters of the answer has come."""
        self.over = False
        """Whether nothing of it is to come."""

    @abstractmethod
    def event(self, event: Json) -> None:
        """A streamed answer goes on.

        Raises:
            UnreadableError
        """

    @abstractmethod
    def body(self, body: Json) -> None:
        """The whole of an answer that is not streamed.

        Raises:
            UnreadableError
        """

    @abstractmethod
    def content(self) -> Content:
        """What it was; to be asked once it is whole.

        Raises:
            UnreadableError
        """

    def keep(self, num_bytes: int) -> None:
        """So much more is kept.

        Raises:
            UnreadableError: that would be too much.
        """
        self._left_bytes -= num_bytes + PIECE_BYTES
        if self._left_bytes < 0:
            raise UnreadableError("more of the answer would have to be kept than is allowed")


class Pieces:
    """Text that comes in pieces.

    Args:
        reader: Whose it is.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._pieces: list[str] = []

    def add(self, piece: Any) -> None:
        """The next piece; None and the empty text are none.

        Raises:
            UnreadableError: it is no text, or too much.
        """
        if text := optional(piece, str):
            # In memory a character takes up to four bytes.
            self._reader.keep(4 * len(text))
            self._pieces.append(text)

    def __str__(self) -> str:
        return "".join(self._pieces)


def optional(value: Any, kind: type[Any]) -> Any:
    """A value that may be None.

    Raises:
        UnreadableError: it is neither that nor of this kind.
    """
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise UnreadableError(f"{kind.__name__} expected, not {type(value).__name__}")


def given(value: Any, kind: type[Any]) -> Any:
    """A value that must be there.

    Raises:
        UnreadableError: it is not of this kind.
    """
    if value is None:
        raise UnreadableError(f"{kind.__name__} expected, not null")
    return optional(value, kind)


def dicts(value: Any) -> list[Json]:
    """Elements of a list that may be missing.

    Raises:
        UnreadableError: it is no list of objects.
    """
    return [given(item, dict) for item in optional(value, list) or ()]


def usage_of(value: Any, prompt: str, output: str) -> Usage:
    """Sizes of a ``usage`` object."""
    usage: Mapping[str, Any] = value if isinstance(value, dict) else {}
    return Usage(*(n if type(n := usage.get(name)) is int else None for name in (prompt, output)))


def arguments_of(text: str) -> Any:
    """A tool call's arguments.

    Raises:
        UnreadableError: they are not JSON.
    """
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError("the arguments of a tool call are not JSON") from error


def refuse_error(event: Json) -> None:
    """Raise if the server says that it failed.

    Raises:
        UnreadableError
    """
    if event.get("error") is not None or event.get("object") == "error" or event.get("type") == "error":
        raise UnreadableError("the server answered with an error")
