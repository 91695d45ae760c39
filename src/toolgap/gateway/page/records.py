"""What the page is told, as JSON. Times are Unix times in seconds by the gateway's clock; counts are of tokens."""

import msgspec

from toolgap.gateway.page.savings import Yield


class Figures(msgspec.Struct, kw_only=True):
    """Sums, of one conversation or of all; also of what is no longer shown."""

    gaps: int = 0
    returned: int = 0
    """Of those, ended by a continuation."""
    gap_s: float = 0.0
    """Length of the gaps that have ended."""
    restores: int = 0
    refused: int = 0
    landed_tokens: int = 0
    used_tokens: int = 0
    joined_tokens: int = 0
    wasted_tokens: int = 0
    undecided_tokens: int = 0
    saved_s: float = 0.0
    unestimated: int = 0

    def change(self, old: Yield, new: Yield) -> None:
        """A restore came to more, or to something else, than was thought."""
        for name in Yield.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(new, name) - getattr(old, name))


class Restore(msgspec.Struct, kw_only=True):
    """A restore; what is None is not known, or not yet."""

    operation_id: str
    upstream: str
    accepted_s: float
    state: str
    reason: str | None = None
    requested_tokens: int = 0
    resident_tokens: int = 0
    found_tokens: int | None = None
    read_tokens: int = 0
    yielded: Yield = Yield()
    queried_s: float | None = None
    """When storage had told what it holds: reading begins."""
    read_s: float | None = None
    """When the last page had been read."""
    ended_s: float | None = None
    used_s: float | None = None
    """When a request first used what had landed."""


class Refusal(msgspec.Struct, kw_only=True):
    """A restore that was not accepted, or could not be asked for."""

    at_s: float
    code: str
    upstream: str


class Hint(msgspec.Struct, kw_only=True):
    """Somebody said when the gap ends."""

    at_s: float
    left_s: float


class Gap(msgspec.Struct, kw_only=True):
    """A gap and what was done in it."""

    number: int
    """Of the conversation's gaps, from 1."""
    started_s: float
    tools: list[str]
    upstream: str
    expected_s: float | None = None
    ended_s: float | None = None
    returned: bool = False
    """Whether it ended by a continuation; otherwise it was given up."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    restores: list[Restore] = []
    refusals: list[Refusal] = []
    hints: list[Hint] = []
    left_out: int = 0
    """Restores, refusals and hints that are counted and not listed, because there are too many."""


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation: its newest gaps, oldest first, and the sums of all."""

    key: str
    first_s: float
    last_s: float
    figures: Figures
    gaps: list[Gap]
    is_closed: bool = False


class Page(msgspec.Struct, kw_only=True):
    """All that the page shows, or what has changed of it."""

    epoch: str
    """Another one: the gateway was restarted, and versions count anew."""
    version: int
    now_s: float
    since_s: float
    """When counting began."""
    figures: Figures
    refusals: dict[str, int]
    """By code."""
    keys: list[str]
    """Of all conversations that are shown, the latest first."""
    forgotten: int
    """Conversations that are counted and not shown any more."""
    conversations: list[msgspec.Raw]
    """Those that have changed: each a :class:`Conversation`."""
