"""The tool calls of one session, as far as restores depend on them. Pure: no I/O, no clock.

A session is one conversation: its requests follow each other, each prompt the longer. An answer with tool
calls begins a *turn*, which ends with the next answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any, NamedTuple, cast

from toolgap.client import PrefixFields
from toolgap.protocol import Api

IMMINENT_S = 0.05
"""The gap once every call of a turn has ended: the continuation comes as soon as the agent has sent it."""

Message = dict[str, Any]


class Submit(NamedTuple):
    """Restore a prefix."""

    operation_id: str
    names: tuple[PrefixFields, ...]
    """Names of the prefix, the most exact one first: the next is for a server that does not know this one."""
    expected_gap_s: float | None = None
    unless_active: tuple[str, ...] = ()
    """Operations of the same prefix: as long as one of them reads, there is nothing to submit."""


class Cancel(NamedTuple):
    """Stop an operation, if it has not ended."""

    operation_id: str


Step = Submit | Cancel


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A model's answer, and what is known of the request that it answers."""

    request_id: str | None = None
    """The ``id`` of its chat completion: names prompt and answer, token for token."""
    request: PrefixFields = field(default_factory=PrefixFields)
    """Of the request's body what shapes the prompt, ``messages`` among it; empty if that is not known."""
    messages: Sequence[Message] = ()
    """The answer as the next request will show it."""
    calls: Sequence[str] = ()
    """Ids of its tool calls, in order; empty if it has none, or if they are not known yet."""

    @property
    def is_known(self) -> bool:
        """Whether there is anything to name its prefix by."""
        return self.request_id is not None or bool(self.request.get("messages"))


class ToolCalls:
    """The state machine of a session. Every method returns what is to be sent, in order.

    Args:
        session: Begins the ids of its operations: letters, digits, ``.``, ``_``, ``:`` and ``-``.
    """

    def __init__(self, session: str) -> None:
        self._ids: Iterator[str] = (f"{session}.{number}" for number in count(1))
        self._operations: list[str] = []
        self._answer = Answer()
        self._calls: list[str] = []
        self._open: set[str] = set()
        self._results: dict[str, Message | None] = {}
        self._submitted: tuple[PrefixFields, ...] = ()
        self._same: list[str] = []

    @property
    def open_calls(self) -> frozenset[str]:
        """Calls that have started, or are known to be about to, and have not ended."""
        return frozenset(self._open)

    def answered(self, answer: Answer, expected_gap_s: float | None = None) -> list[Step]:
        """A model has answered: what was restored for this request is over, and its own turn begins."""
        steps: list[Step] = self._cancel_all()
        self._answer = answer
        self._calls, self._open, self._results = list(answer.calls), set(answer.calls), {}
        self._submitted = ()
        if answer.calls:
            steps += self._submit(expected_gap_s)
        return steps

    def started(self, call: str, expected_gap_s: float | None = None) -> list[Step]:
        """A tool call of the turn starts. The calls of one turn share one operation."""
        if call in self._results:
            return []
        waited = not self._open
        self._open.add(call)
        if call not in self._calls:
            self._calls.append(call)
        if not self._submitted:
            return self._submit(expected_gap_s)
        return self._again(expected_gap_s) if waited else []

    def ended(self, call: str, result: Message | None = None) -> list[Step]:
        """A tool call has ended, with its result as the next request will show it, if that is known."""
        if call not in self._open:
            return []
        self._open.discard(call)
        self._results[call] = result
        return self.again(None)

    def again(self, expected_gap_s: float | None) -> list[Step]:
        """The turn's prefix may have left host memory, or more of it is certain, or its gap is better known."""
        if not self._submitted:
            return []
        gap_s = expected_gap_s if self._open else IMMINENT_S
        names = self._names()
        return self._submit(gap_s) if names != self._submitted else self._again(gap_s)

    def closed(self) -> list[Step]:
        """The session has ended."""
        steps = self._cancel_all()
        self._answer, self._submitted = Answer(), ()
        self._calls, self._open, self._results = [], set(), {}
        return steps

    def _submit(self, expected_gap_s: float | None) -> list[Step]:
        if not self._answer.is_known:
            return []
        self._submitted, self._same = self._names(), []
        return self._again(expected_gap_s)

    def _again(self, expected_gap_s: float | None) -> list[Step]:
        same, operation = tuple(self._same), next(self._ids)
        self._same.append(operation)
        self._operations.append(operation)
        return [Submit(operation, self._submitted, expected_gap_s, unless_active=same)]

    def _cancel_all(self) -> list[Step]:
        steps: list[Step] = [Cancel(operation) for operation in self._operations]
        self._operations.clear()
        return steps

    def _names(self) -> tuple[PrefixFields, ...]:
        return prefix_names(self._answer, self._calls, self._results)


def prefix_names(
    answer: Answer, calls: Sequence[str], results: Mapping[str, Message | None]
) -> tuple[PrefixFields, ...]:
    """Names of what the next prompt will certainly begin with, the most exact one first.

    Args:
        answer: The turn's.
        calls: Ids of its tool calls, in order.
        results: Of the calls that have ended, by id; None where the result is not known.
    """
    certain = _certain_results(answer, calls, results)
    by_request: PrefixFields = {"request_id": answer.request_id}
    names = [by_request] if answer.request_id is not None else []
    if answer.request.get("messages"):
        messages = [*(answer.request["messages"] or ()), *answer.messages]
        if answer.request.get("api") is Api.ANTHROPIC:
            messages += [{"role": "user", "content": certain}] if certain else []
        else:
            messages += certain
        by_messages = cast("PrefixFields", {**answer.request, "messages": messages})
        # With results the messages name more than the request did.
        names.insert(0 if certain else len(names), by_messages)
    return tuple(names)


def _certain_results(
    answer: Answer, calls: Sequence[str], results: Mapping[str, Message | None]
) -> list[Message]:
    """Results of the first calls: that of a later one stands behind those that are still missing."""
    if not answer.messages:
        return []
    first = takewhile(lambda result: result is not None, map(results.get, calls))
    return [result for result in first if result is not None]
