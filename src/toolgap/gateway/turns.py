"""The conversations in a gap: what to restore for each, and, by the policy, when. Pure: no I/O, no clock.

Every method takes the time and returns what is to be sent, in order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from toolgap.client import PrefixFields
from toolgap.gateway.policy import Action, Policy, Settings, Stop
from toolgap.hooks.gaps import Gaps
from toolgap.hooks.restores import Call
from toolgap.hooks.tool_calls import Answer, Message, prefix_names


@dataclass(frozen=True)
class Owner:
    """Whose restores these are."""

    affinity: str
    """By which a worker is chosen."""
    authorization: str | None = field(default=None, repr=False)
    """The ``Authorization`` header of the conversation's last request; goes into no log."""
    session: str | None = None
    """The client's own name of its session, if it has one."""
    replica: int | None = None
    """The data-parallel replica that its requests go to, if they go to one."""


class Submit(NamedTuple):
    """Restore a prefix."""

    conversation: str
    operation: int
    operation_id: str
    owner: Owner
    names: tuple[PrefixFields, ...]
    """Names of the prefix, the most exact one first: the next is for a server that does not know this one."""
    expected_gap_s: float | None
    lease_s: float | None


class Cancel(NamedTuple):
    """Stop an operation, if it has not ended."""

    conversation: str
    operation: int
    operation_id: str


Step = Submit | Cancel


class UnknownCallError(LookupError):
    """No conversation in a gap waits for this tool call."""


class AmbiguousCallError(LookupError):
    """Several conversations wait for a tool call of this id."""


class _Turn:
    def __init__(self, owner: Owner, answer: Answer, paused_s: float) -> None:
        self.owner, self.answer, self.paused_s = owner, answer, paused_s
        self.open = set(answer.calls)
        self.results: dict[str, Message | None] = {}
        self.submitted: tuple[PrefixFields, ...] = ()
        self.returned = False

    @property
    def names(self) -> tuple[PrefixFields, ...]:
        return prefix_names(self.answer, self.answer.calls, self.results)


class Turns:
    """All conversations that are in a gap, or whose continuation is under way.

    Args:
        name: Begins the ids of all operations: letters, digits, ``.``, ``_``, ``:`` and ``-``.
        settings: How the time is chosen.
        told_s: Seconds that tools take, by name: they count as hints.
    """

    def __init__(
        self, name: str, settings: Settings | None = None, told_s: Mapping[str, float] | None = None
    ) -> None:
        self.policy = Policy(settings)
        self._name = name
        self._told = Gaps(told_s)
        self._turns: dict[str, _Turn] = {}
        self._by_call: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._turns)

    # ---- what happens ----

    def paused(
        self, conversation: str, owner: Owner, answer: Answer, calls: Iterable[Call], now_s: float
    ) -> list[Step]:
        """An answer with these calls has left. What was before in this conversation is over."""
        if not answer.is_known:
            return self.closed(conversation)
        tools = [call.tool for call in calls]
        self._forget(conversation)
        turn = self._turns[conversation] = _Turn(owner, answer, now_s)
        for call in turn.open:
            self._by_call.setdefault(call, set()).add(conversation)
        actions = self.policy.paused(conversation, tools, now_s)
        told_s = self._told.expected_s(tools)
        if told_s is not None:
            actions += self.policy.hinted(conversation, told_s, now_s)
        return self._steps(actions)

    def returned(self, conversation: str, now_s: float) -> float | None:
        """The continuation has come.

        Returns:
            The gap in seconds; None if the conversation was in none.
        """
        turn = self._turns.get(conversation)
        if turn is None or turn.returned:
            return None
        turn.returned = True
        self._drop_calls(conversation, turn)
        self.policy.returned(conversation, now_s)
        return now_s - turn.paused_s

    def progressed(self, call: str, left_s: float, now_s: float) -> tuple[str, list[Step]]:
        """A tool says how long its call still runs.

        Returns:
            The conversation, and what is to be sent.

        Raises:
            UnknownCallError, AmbiguousCallError
        """
        conversation = self._of(call)
        # The gap ends with the last call: what one of several says is no more than the least.
        if len(self._turns[conversation].open) > 1:
            return conversation, []
        return conversation, self._steps(self.policy.hinted(conversation, left_s, now_s))

    def tool_ended(
        self, call: str, now_s: float, result: Message | None = None
    ) -> tuple[str, bool, list[Step]]:
        """A tool call has ended, with its result as the next request will show it, if that is known.

        Returns:
            The conversation, whether this was its last call, and what is to be sent.

        Raises:
            UnknownCallError, AmbiguousCallError
        """
        conversation = self._of(call)
        turn = self._turns[conversation]
        turn.results[call] = result
        turn.open.discard(call)
        self._drop_call(call, conversation)
        if turn.open:
            return conversation, False, []
        grown = turn.names != turn.submitted
        return conversation, True, self._steps(self.policy.tool_ended(conversation, now_s, grown=grown))

    def moved(self, affinities: Iterable[str], now_s: float) -> list[Step]:
        """The conversations of these affinities go on at another worker."""
        gone = set(affinities)
        moving = [key for key, turn in self._turns.items() if turn.owner.affinity in gone]
        return [step for key in moving for step in self._steps(self.policy.moved(key, now_s))]

    def ended(self, conversation: str, operation: int, took_s: float | None = None) -> None:
        """An operation has ended, or was refused; ``took_s`` as of :meth:`Policy.ended`."""
        self.policy.ended(conversation, operation, took_s)

    def closed(self, conversation: str) -> list[Step]:
        """The conversation has ended, or answers without calling a tool."""
        steps = self._steps(self.policy.closed(conversation))
        self._forget(conversation)
        return steps

    def shut_down(self) -> list[Step]:
        """Everything ends."""
        return [step for conversation in list(self._turns) for step in self.closed(conversation)]

    # ---- time ----

    @property
    def next_s(self) -> float | None:
        """When to ask :meth:`due` again; None if nothing is planned."""
        return self.policy.next_s

    def due(self, now_s: float) -> list[Step]:
        """What is to be done by now."""
        return self._steps(self.policy.due(now_s))

    # ---- what is known ----

    def __contains__(self, conversation: str) -> bool:
        """Whether it is in a gap, or its continuation is under way."""
        return conversation in self._turns

    def is_waiting(self, conversation: str) -> bool:
        """Whether its continuation has not come yet."""
        turn = self._turns.get(conversation)
        return turn is not None and not turn.returned

    def open_affinities(self) -> set[str]:
        """Of the conversations whose continuation has not come."""
        return {turn.owner.affinity for turn in self._turns.values() if not turn.returned}

    def of_session(self, session: str) -> tuple[str, ...]:
        """The conversations of a session that its client has named so."""
        return tuple(key for key, turn in self._turns.items() if turn.owner.session == session)

    def gap_left_s(self, conversation: str, now_s: float) -> float | None:
        """How long its gap is thought to last still, in seconds; None if nothing tells."""
        return self.policy.left_s(conversation, now_s)

    def check_integrity(self) -> None:
        """Raises AssertionError if something is kept without need."""
        self.policy.check_integrity()
        assert len(self._turns) == len(self.policy)
        assert all(conversation in self.policy for conversation in self._turns)
        for call, conversations in self._by_call.items():
            assert conversations
            assert all(call in self._turns[conversation].open for conversation in conversations)

    # ---- how ----

    def _steps(self, actions: Iterable[Action]) -> list[Step]:
        steps = [self._step(action) for action in actions]
        if len(self._turns) > len(self.policy):
            # The policy has given some up.
            for conversation in [key for key in self._turns if key not in self.policy]:
                self._forget(conversation)
        return steps

    def _step(self, action: Action) -> Step:
        operation_id = f"{self._name}.{action.operation}"
        if isinstance(action, Stop):
            return Cancel(action.conversation, action.operation, operation_id)
        turn = self._turns[action.conversation]
        turn.submitted = turn.names
        return Submit(
            action.conversation,
            action.operation,
            operation_id,
            turn.owner,
            turn.submitted,
            action.expected_gap_s,
            action.lease_s,
        )

    def _of(self, call: str) -> str:
        conversations = self._by_call.get(call, set())
        if not conversations:
            raise UnknownCallError(call)
        if len(conversations) > 1:
            raise AmbiguousCallError(call)
        return next(iter(conversations))

    def _forget(self, conversation: str) -> None:
        turn = self._turns.pop(conversation, None)
        if turn is not None:
            self._drop_calls(conversation, turn)

    def _drop_calls(self, conversation: str, turn: _Turn) -> None:
        for call in turn.open:
            self._drop_call(call, conversation)
        turn.open.clear()

    def _drop_call(self, call: str, conversation: str) -> None:
        waiting = self._by_call[call]
        waiting.discard(conversation)
        if not waiting:
            del self._by_call[call]
