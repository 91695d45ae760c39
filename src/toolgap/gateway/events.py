"""What the gateway has seen and done, as it tells its metrics, its log and its live page. No prompt text in it.

Events of one conversation come in order, in one and the same thread.
"""

from collections.abc import Callable

import msgspec

from toolgap.protocol import OperationStatus


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Attributes: conversation: its key, from which no client's name can be read; at_s: Unix time."""

    conversation: str
    at_s: float


class Paused(_Event, tag="paused", frozen=True, kw_only=True):
    """An answer with tool calls has left: a gap begins.

    Attributes:
        upstream: URL of the server that gave the answer.
        tools: Names of the tools called, in order.
        prompt_tokens, output_tokens: As the server counted them, if it did.
        expected_gap_s: How long the gap is thought to be, in seconds; None if nothing tells.
    """

    upstream: str
    tools: tuple[str, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    expected_gap_s: float | None = None


class Submitted(_Event, tag="submitted", frozen=True, kw_only=True):
    """A restore was accepted.

    Attributes:
        upstream: URL of the server that restores.
        status: As the server answered.
    """

    upstream: str
    status: OperationStatus


class Refused(_Event, tag="refused", frozen=True, kw_only=True):
    """A restore was not accepted, or could not be asked for.

    Attributes:
        upstream: URL of the server that was asked.
        operation_id: The refused operation's.
        code: The server's code of the error, or ``unreachable``, ``not_found`` (no Toolgap there) and the like.
    """

    upstream: str
    operation_id: str
    code: str


class Known(_Event, tag="known", frozen=True, kw_only=True):
    """An operation has ended; once more when it is known what the continuation used of it.

    Attributes:
        upstream: URL of the server.
        status: The operation's, now.
        final: Whether this is what was known once the continuation was answered: the second and last time.
    """

    upstream: str
    status: OperationStatus
    final: bool = False


class Hinted(_Event, tag="hinted", frozen=True, kw_only=True):
    """Somebody said when the gap ends.

    Attributes:
        left_s: In so many seconds; 0 if the last tool has ended.
    """

    left_s: float


class Returned(_Event, tag="returned", frozen=True, kw_only=True):
    """The continuation has come: the gap has ended.

    Attributes:
        gap_s: Its length in seconds, from the first tool call's leaving.
    """

    gap_s: float


class Closed(_Event, tag="closed", frozen=True, kw_only=True):
    """The conversation answered without a tool call, was given up after a very long gap, or was forgotten."""


Event = Paused | Submitted | Refused | Known | Hinted | Returned | Closed

Listener = Callable[[Event], None]
"""Told every event, in the thread that sends restores: it must be quick, and may raise anything."""
