"""What has happened, as far as the page shows it: a bounded state built from the gateway's events."""

import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from threading import Lock
from typing import TypeVar

import msgspec

from toolgap.gateway import events
from toolgap.gateway.events import Event
from toolgap.gateway.page.records import Conversation, Figures, Gap, Hint, Page, Refusal, Restore
from toolgap.gateway.page.savings import yielded
from toolgap.protocol import OperationStatus

MAX_CONVERSATIONS = 64
MAX_GAPS = 32
"""Of one conversation."""
MAX_LISTED = 12
"""Restores, refusals and hints of one gap, of each kind."""
MAX_CODES = 64
MAX_TOOLS = 8
MAX_NAME_CHARACTERS = 80

OTHER = "other"
"""In place of further codes."""

LOST = "lost"
"""In place of the state of an operation whose server does not tell any more."""

T = TypeVar("T")


class _Operation:
    """A restore that is shown, and the newest that its server told of it."""

    def __init__(self, shown: Restore, status: OperationStatus, gap: Gap) -> None:
        self.shown, self.status, self.gap = shown, status, gap
        self.lost: str | None = None
        """The code, if its server does not tell any more."""
        self.is_final = False
        """Whether its server has told what the continuation used of it."""

    @property
    def is_decided(self) -> bool:
        """Whether what is not used by now was read in vain."""
        gap_had_none = self.gap.ended_s is not None and not self.gap.returned
        return self.is_final or gap_had_none


class _Entry:
    """A conversation that is shown."""

    def __init__(self, key: str, at_s: float) -> None:
        self.key, self.first_s, self.last_s = key, at_s, at_s
        self.figures = Figures()
        self.gaps: deque[Gap] = deque()
        self.operations: dict[str, _Operation] = {}
        self.is_closed = False
        self.version = 0
        self.encoded: msgspec.Raw | None = None

    @property
    def open_gap(self) -> Gap | None:
        return self.gaps[-1] if self.gaps and self.gaps[-1].ended_s is None else None


class Timeline:
    """Listens to the gateway's events, in any thread, and tells the page, in any other.

    Memory is bounded: of the oldest conversations and gaps only the sums remain.

    Args:
        clock: Gives the Unix time.
        max_conversations: How many are shown; those that were quiet longest make room.
        max_gaps: How many of each are shown.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        *,
        max_conversations: int = MAX_CONVERSATIONS,
        max_gaps: int = MAX_GAPS,
    ) -> None:
        self._clock = clock
        self._max_conversations, self._max_gaps = max_conversations, max_gaps
        self._lock = Lock()
        self._encoder = msgspec.json.Encoder()
        self._epoch = secrets.token_hex(8)
        self._since_s = clock()
        self._version = 0
        self._figures = Figures()
        self._refusals: dict[str, int] = {}
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._forgotten = 0

    def listen(self, event: Event) -> None:
        """Take an event in; quick, and never raises for one of :data:`toolgap.gateway.events.Event`."""
        with self._lock:
            entry = self._entry(event)
            if entry is None:
                return
            match event:
                case events.Paused():
                    self._paused(entry, event)
                case events.Submitted():
                    self._submitted(entry, event)
                case events.Known():
                    self._known(entry, event)
                case events.Refused():
                    self._refused(entry, event)
                case events.Hinted():
                    self._hinted(entry, event)
                case events.Returned():
                    self._ended(entry, event.at_s, returned=True)
                case events.Closed():
                    self._ended(entry, event.at_s, returned=False)
                    entry.is_closed = True

    def state(self, since: int = 0, epoch: str | None = None) -> bytes:
        """The page's JSON: a :class:`~toolgap.gateway.page.records.Page`.

        Args:
            since: A version that was told before: only conversations that have changed after it are in it.
            epoch: What came with that version; all conversations if it is not this timeline's.
        """
        if epoch is not None and epoch != self._epoch:
            since = 0
        with self._lock:
            page = Page(
                epoch=self._epoch,
                version=self._version,
                now_s=self._clock(),
                since_s=self._since_s,
                figures=self._figures,
                refusals=self._refusals,
                keys=list(reversed(self._entries)),
                forgotten=self._forgotten,
                conversations=[
                    self._encode(entry) for entry in self._entries.values() if entry.version > since
                ],
            )
            return self._encoder.encode(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless bounds are kept and sums are right."""
        with self._lock:
            assert len(self._entries) <= self._max_conversations
            assert len(self._refusals) <= MAX_CODES + 1
            for figures in (self._figures, *(entry.figures for entry in self._entries.values())):
                parts = (figures.used_tokens, figures.wasted_tokens, figures.undecided_tokens)
                assert figures.landed_tokens == sum(parts)
                assert min(parts) >= 0
                assert 0 <= figures.joined_tokens <= figures.used_tokens
                assert figures.saved_s >= -1e-6
                assert figures.returned <= figures.gaps
            assert self._figures.refused == sum(self._refusals.values())
            for entry in self._entries.values():
                assert len(entry.gaps) <= self._max_gaps
                assert len(entry.operations) == sum(len(gap.restores) for gap in entry.gaps)
                for gap in entry.gaps:
                    assert max(len(gap.restores), len(gap.refusals), len(gap.hints)) <= MAX_LISTED

    # ---- what happens ----

    def _paused(self, entry: _Entry, event: events.Paused) -> None:
        self._ended(entry, event.at_s, returned=False)
        entry.is_closed = False
        gap = self._begin_gap(entry, event.at_s, event.upstream)
        gap.tools = [_short(name) for name in event.tools[:MAX_TOOLS]]
        gap.expected_s = event.expected_gap_s
        gap.prompt_tokens, gap.output_tokens = event.prompt_tokens, event.output_tokens

    def _submitted(self, entry: _Entry, event: events.Submitted) -> None:
        status = event.status
        if status.operation_id in entry.operations:
            return
        gap = entry.gaps[-1] if entry.gaps else self._begin_gap(entry, event.at_s, event.upstream)
        self._count(entry, restores=1)
        if len(gap.restores) == MAX_LISTED:
            gap.left_out += 1
            return
        shown = Restore(
            operation_id=_short(status.operation_id),
            upstream=event.upstream,
            accepted_s=event.at_s - status.elapsed_s,
            state=status.state,
        )
        gap.restores.append(shown)
        operation = entry.operations[status.operation_id] = _Operation(shown, status, gap)
        self._weigh(entry, operation)

    def _known(self, entry: _Entry, event: events.Known) -> None:
        operation = entry.operations.get(event.status.operation_id)
        if operation is None:
            # Of a gap that is no longer shown.
            return
        operation.status, operation.lost = event.status, None
        operation.is_final = operation.is_final or event.final
        self._weigh(entry, operation)

    def _refused(self, entry: _Entry, event: events.Refused) -> None:
        self._count(entry, refused=1)
        code = _short(event.code)
        if code not in self._refusals and len(self._refusals) >= MAX_CODES:
            code = OTHER
        self._refusals[code] = self._refusals.get(code, 0) + 1
        if lost := entry.operations.get(event.operation_id):
            lost.lost = code
            self._weigh(entry, lost)
        elif entry.gaps:
            refusal = Refusal(at_s=event.at_s, code=code, upstream=event.upstream)
            _list(entry.gaps[-1], entry.gaps[-1].refusals, refusal)

    def _hinted(self, entry: _Entry, event: events.Hinted) -> None:
        if gap := entry.open_gap:
            _list(gap, gap.hints, Hint(at_s=event.at_s, left_s=event.left_s))

    def _ended(self, entry: _Entry, at_s: float, *, returned: bool) -> None:
        gap = entry.open_gap
        if gap is None:
            return
        gap.ended_s = max(at_s, gap.started_s)
        gap.returned = returned
        self._count(entry, returned=int(returned), gap_s=gap.ended_s - gap.started_s)
        for operation in entry.operations.values():
            if operation.gap is gap:
                self._weigh(entry, operation)

    # ---- how it is kept ----

    def _entry(self, event: Event) -> _Entry | None:
        """The event's conversation, now the latest and changed; None if it speaks of what is not shown."""
        key = event.conversation
        entry = self._entries.get(key)
        if entry is None:
            if not isinstance(event, events.Paused | events.Submitted | events.Refused):
                return None
            entry = self._entries[key] = _Entry(key, event.at_s)
            if len(self._entries) > self._max_conversations:
                self._entries.popitem(last=False)
                self._forgotten += 1
        self._entries.move_to_end(key)
        self._version += 1
        entry.version, entry.last_s, entry.encoded = self._version, event.at_s, None
        return entry

    def _begin_gap(self, entry: _Entry, at_s: float, upstream: str) -> Gap:
        self._count(entry, gaps=1)
        gap = Gap(number=entry.figures.gaps, started_s=at_s, tools=[], upstream=upstream)
        entry.gaps.append(gap)
        if len(entry.gaps) > self._max_gaps:
            gone = entry.gaps.popleft()
            entry.operations = {id_: one for id_, one in entry.operations.items() if one.gap is not gone}
        return gap

    def _weigh(self, entry: _Entry, operation: _Operation) -> None:
        """Bring what is shown of a restore, and the sums, in line with what is known."""
        status, shown, gap = operation.status, operation.shown, operation.gap

        def at(after_s: float | None) -> float | None:
            return None if after_s is None else shown.accepted_s + after_s

        came = gap.ended_s if gap.returned else None
        new = yielded(
            status,
            came_after_s=None if came is None else came - shown.accepted_s,
            is_decided=operation.is_decided,
        )
        for figures in (entry.figures, self._figures):
            figures.change(shown.yielded, new)
        shown.yielded = new
        shown.state, shown.reason = (
            (LOST, operation.lost) if operation.lost else (status.state, status.reason)
        )
        shown.requested_tokens, shown.resident_tokens = status.requested_tokens, status.resident_tokens
        shown.found_tokens, shown.read_tokens = status.found_tokens, status.read_tokens
        shown.queried_s, shown.read_s, shown.used_s = (
            at(status.queried_s),
            at(status.read_s),
            at(status.used_after_s),
        )
        shown.ended_s = at(status.elapsed_s) if status.state.terminal else None

    def _count(self, entry: _Entry, **more: float) -> None:
        for figures in (entry.figures, self._figures):
            for name, number in more.items():
                setattr(figures, name, getattr(figures, name) + number)

    def _encode(self, entry: _Entry) -> msgspec.Raw:
        if entry.encoded is None:
            record = Conversation(
                key=entry.key,
                first_s=entry.first_s,
                last_s=entry.last_s,
                figures=entry.figures,
                gaps=list(entry.gaps),
                is_closed=entry.is_closed,
            )
            entry.encoded = msgspec.Raw(self._encoder.encode(record))
        return entry.encoded


def _list(gap: Gap, those: list[T], one: T) -> None:
    if len(those) < MAX_LISTED:
        those.append(one)
    else:
        gap.left_out += 1


def _short(text: str) -> str:
    return text if len(text) <= MAX_NAME_CHARACTERS else f"{text[: MAX_NAME_CHARACTERS - 1]}…"
