"""Whether what operations inserted is used by requests afterwards, or was read in vain."""

from collections.abc import Iterator
from typing import NamedTuple

from toolgap.operations import Operation
from toolgap.sglang.internals import Prefix


class Span(NamedTuple):
    """What one operation inserted and no request has used yet: its end, once a request has used the rest."""

    operation: Operation
    prefix: Prefix
    start_tokens: int
    end_tokens: int
    read_s: float
    """How long storage was read for it."""


class Use(NamedTuple):
    """A request's use of what none had used before."""

    operation: Operation
    tokens: int
    saved_s: float
    """Time that reading those tokens on request would have taken, as the restore took it."""


class Usage:
    """Spans that nobody has used yet, by operation id."""

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        """What was inserted and not used yet."""
        return iter(self._spans.values())

    def watch(self, operation: Operation, prefix: Prefix) -> None:
        """Begin to watch what an operation that ended has inserted."""
        if operation.inserted_tokens == 0:
            return
        start = operation.resident_tokens
        since = operation.queried_at or operation.accepted_at
        read_s = max(0.0, (operation.read_at or since) - since)
        self._spans[operation.operation_id] = Span(
            operation, prefix, start, start + operation.inserted_tokens, read_s
        )

    def used_by(self, prefix: Prefix, cached_tokens: int) -> list[Use]:
        """A request found ``cached_tokens`` of its prompt in the cache: note whose spans it used."""
        uses = []
        for operation_id, span in list(self._spans.items()):
            end = min(prefix.shared_tokens(span.prefix), cached_tokens, span.end_tokens)
            if end > span.start_tokens:
                tokens = end - span.start_tokens
                span.operation.used_tokens += tokens
                saved_s = span.read_s * tokens / (span.end_tokens - span.start_tokens)
                uses.append(Use(span.operation, tokens, saved_s))
                if end == span.end_tokens:
                    del self._spans[operation_id]
                else:
                    self._spans[operation_id] = span._replace(start_tokens=end, read_s=span.read_s - saved_s)
        return uses

    def forget(self, operation: Operation) -> int:
        """Stop watching; returns the tokens that were never used."""
        span = self._spans.pop(operation.operation_id, None)
        return 0 if span is None else span.end_tokens - span.start_tokens

    def forget_all(self) -> int:
        """The cache was dropped; returns the tokens that were never used."""
        unused = sum(span.end_tokens - span.start_tokens for span in self._spans.values())
        self._spans.clear()
        return unused
