"""Plays recorded sessions of agents through a policy, with host memory and storage simulated. No I/O.

Host memory is a budget of tokens in which the conversation that was quiet longest loses the end of its prefix
first. Storage is read piece by piece by one reader, for requests first. The engine itself is never short:
prompts are computed and answers made at given rates, however many at once.
"""

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from toolgap.bench.spread import percentile
from toolgap.bench.workload import Session, prompt_tokens
from toolgap.gateway.policy import Action, Policy, Restore, Settings, Stop, When


class Machine(NamedTuple):
    """What is simulated."""

    agents: int
    """Sessions at once; when one ends, the next begins."""
    host_tokens: int
    """What host memory holds."""
    read_tokens_per_s: float
    timeout_s: tuple[float, float]
    """How long a request waits for storage at most: in all cases, and for 1,024 tokens of its prompt."""
    piece_tokens: int
    """Of a read that is not interrupted."""
    prefill_tokens_per_s: float
    output_tokens_per_s: float
    """Of one answer."""
    lease_share: float
    """Of host memory that leases may hold."""


class Hint(NamedTuple):
    """Somebody who knows how long a gap lasts."""

    at: float
    """The share of the gap after which that is said."""


class Names(NamedTuple):
    """Tools that have names, made up, since the trace has none: by how long they take, and no better than that."""

    ratio: float
    """Between the longest and the shortest gap of one tool."""

    def of(self, gap_s: float) -> str:
        """The tool's name."""
        return str(round(math.log(max(gap_s, 1.0), self.ratio)))


class Compared(NamedTuple):
    """A policy, and what it is told."""

    settings: Settings | None
    """None restores nothing."""
    hint: Hint | None = None
    names: Names | None = None


class Played(NamedTuple):
    """What came of a policy."""

    continuations: int
    stalled: int
    """Those that found a part of their prefix missing in host memory."""
    stall_s: float
    """What all continuations waited for their prefix, reads and recomputation."""
    stall_p50_s: float
    """Of those that stalled."""
    stall_p99_s: float
    """Of all continuations."""
    requested_tokens: int
    """Read from storage for requests."""
    restored_tokens: int
    """Read ahead."""
    wasted_tokens: int
    """Read ahead and evicted again, or never used."""
    evicted_tokens: int
    """Of other conversations, to make room for what was read ahead."""
    submits: int
    """Most of which found everything resident."""


class _Read:
    """A conversation's prefix being read, for a restore or for a request."""

    def __init__(self, target_tokens: int, begun_s: float, deadline_s: float, operation: int | None) -> None:
        self.target_tokens, self.begun_s, self.deadline_s = target_tokens, begun_s, deadline_s
        self.operation = operation
        self.is_urgent = operation is None


class _Host:
    """Host memory: how much of each conversation's prefix is resident, the quietest first."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.resident: OrderedDict[int, int] = OrderedDict()
        self.unused: dict[int, int] = {}
        """Of a prefix the last part, which was read ahead and is not used yet."""
        self.held: set[int] = set()
        self.leased: OrderedDict[int, float] = OrderedDict()
        self.used_tokens = 0
        self.wasted_tokens = 0

    def touch(self, name: int) -> None:
        if name in self.resident:
            self.resident.move_to_end(name)

    def lease(self, name: int, until_s: float) -> None:
        share = self._machine.lease_share * self._machine.host_tokens
        others = sum(self.resident.get(other, 0) for other in self.leased if other != name)
        if others + self.resident.get(name, 0) <= share:
            self.leased[name] = until_s

    def grow(self, name: int, target_tokens: int, now_s: float) -> int:
        """Make a prefix resident up to a length, as far as there is room; what others lost."""
        missing = target_tokens - self.resident.get(name, 0)
        if missing <= 0:
            return 0
        free = self._machine.host_tokens - self.used_tokens
        evicted = self._evict(missing - free, name, now_s) if missing > free else 0
        got = min(missing, free + evicted)
        self.resident[name] = self.resident.get(name, 0) + got
        self.resident.move_to_end(name)
        self.used_tokens += got
        return evicted

    def _evict(self, wanted: int, grower: int, now_s: float) -> int:
        evicted = 0
        for name in self._victims(grower, now_s):
            taken = min(self.resident[name], wanted - evicted)
            wasted = min(self.unused.get(name, 0), taken)
            self.wasted_tokens += wasted
            self.unused[name] = self.unused.get(name, 0) - wasted
            self.resident[name] -= taken
            self.used_tokens -= taken
            evicted += taken
            if not self.resident[name]:
                del self.resident[name]
            if evicted >= wanted:
                break
        return evicted

    def _victims(self, grower: int, now_s: float) -> list[int]:
        kept = {name for name, until_s in self.leased.items() if until_s > now_s}
        names = [name for name in self.resident if name not in self.held and name != grower]
        # Leases give way, the oldest first, when nothing else is left.
        return [n for n in names if n not in kept] + [n for n in self.leased if n in kept and n in names]


class _Simulation:
    def __init__(self, sessions: Sequence[Session], machine: Machine, compared: Compared, seed: int) -> None:
        self.machine, self.hint, self.names = machine, compared.hint, compared.names
        self.policy = Policy(compared.settings) if compared.settings is not None else None
        self.host = _Host(machine)
        self.sessions = sessions
        self.prompts = [prompt_tokens(session) for session in sessions]
        # Seeded to be repeatable.
        rng = random.Random(f"policies/{seed}")  # noqa: S311
        self.waiting = list(range(len(sessions)))
        rng.shuffle(self.waiting)
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = count()
        self.reads: dict[int, _Read] = {}
        self.is_reading = False
        self.arrived_s: dict[int, float] = {}
        self.turn = [0] * len(sessions)
        self.stalls_s: list[float] = []
        self.stalled = self.requested_tokens = self.restored_tokens = 0
        self.evicted_tokens = self.submits = 0
        for _ in range(min(machine.agents, len(sessions))):
            # Agents do not begin all at once.
            self.at(rng.uniform(0.0, 600.0), self.begin)

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when_s, next(self.numbers), event))

    def run(self) -> Played:
        while self.events:
            next_s = self.policy.next_s if self.policy is not None else None
            if self.policy is not None and next_s is not None and next_s <= self.events[0][0]:
                self.now_s = max(self.now_s, next_s)
                self.carry_out(self.policy.due(self.now_s))
                continue
            self.now_s, _, event = heapq.heappop(self.events)
            event()
        stalls = sorted(self.stalls_s)
        waited = [stall_s for stall_s in stalls if stall_s > 0]
        return Played(
            continuations=len(stalls),
            stalled=self.stalled,
            stall_s=round(sum(stalls), 3),
            stall_p50_s=round(percentile(waited, 50), 3) if waited else 0.0,
            stall_p99_s=round(percentile(stalls, 99), 3),
            requested_tokens=self.requested_tokens,
            restored_tokens=self.restored_tokens,
            wasted_tokens=self.host.wasted_tokens,
            evicted_tokens=self.evicted_tokens,
            submits=self.submits,
        )

    # ---- agents ----

    def begin(self) -> None:
        if self.waiting:
            self.serve(self.waiting.pop(), recomputed=0)

    def arrive(self, name: int) -> None:
        if self.policy is not None:
            self.carry_out(self.policy.returned(str(name), self.now_s))
        self.arrived_s[name] = self.now_s
        self.host.held.add(name)
        missing = self.prefix_tokens(name) - self.host.resident.get(name, 0)
        self.stalled += missing > 0
        if missing <= 0:
            self.go_on(name)
        elif name in self.reads:
            self.reads[name].is_urgent = True
            self.limit(name)
        else:
            self.limit(name)
            self.reads[name] = _Read(self.prefix_tokens(name), self.now_s, self.now_s, None)
            self.read_next()

    def limit(self, name: int) -> None:
        turn, (base_s, per_1024_s) = self.turn[name], self.machine.timeout_s
        waits_s = base_s + per_1024_s * self.prefix_tokens(name) / 1024
        self.at(self.now_s + waits_s, lambda: self.give_up(name, turn))

    def give_up(self, name: int, turn: int) -> None:
        """A request has waited long enough; what is missing is recomputed."""
        if name in self.arrived_s and self.turn[name] == turn:
            read = self.reads.pop(name, None)
            if read is not None and read.operation is not None and self.policy is not None:
                self.policy.ended(str(name), read.operation, self.now_s - read.begun_s)
            self.go_on(name)

    def go_on(self, name: int) -> None:
        """The prefix is there, or as much of it as will be."""
        arrived_s = self.arrived_s.pop(name)
        self.host.unused.pop(name, None)
        self.host.leased.pop(name, None)
        recomputed = max(self.prefix_tokens(name) - self.host.resident.get(name, 0), 0)
        self.stalls_s.append(self.now_s - arrived_s + recomputed / self.machine.prefill_tokens_per_s)
        self.turn[name] += 1
        self.serve(name, recomputed)

    def serve(self, name: int, recomputed: int) -> None:
        session, turn = self.sessions[name], self.turn[name]
        new = session.turns[turn - 1].append_tokens if turn else session.first_prompt_tokens
        output = session.turns[turn].output_tokens if turn < len(session.turns) else 0
        self.host.held.add(name)
        self.host.grow(name, self.prompts[name][turn], self.now_s)
        self.host.touch(name)
        took_s = (
            new + recomputed
        ) / self.machine.prefill_tokens_per_s + output / self.machine.output_tokens_per_s
        self.at(self.now_s + took_s, lambda: self.answer(name))

    def answer(self, name: int) -> None:
        session, turn = self.sessions[name], self.turn[name]
        self.host.held.discard(name)
        self.host.touch(name)
        if turn == len(session.turns):
            if self.policy is not None:
                self.carry_out(self.policy.closed(str(name)))
            self.host.leased.pop(name, None)
            self.begin()
            return
        self.host.grow(name, self.prefix_tokens(name), self.now_s)
        gap_s = session.turns[turn].gap_s
        self.at(self.now_s + gap_s, lambda: self.arrive(name))
        if self.policy is not None:
            tools = (self.names.of(gap_s),) if self.names is not None else ()
            self.carry_out(self.policy.paused(str(name), tools, self.now_s))
            if self.hint is not None:
                self.at(self.now_s + gap_s * self.hint.at, lambda: self.tell(name, turn, gap_s))

    def tell(self, name: int, turn: int, gap_s: float) -> None:
        if self.policy is not None and self.hint is not None and self.turn[name] == turn:
            left_s = gap_s * (1 - self.hint.at)
            self.carry_out(self.policy.hinted(str(name), left_s, self.now_s))

    def prefix_tokens(self, name: int) -> int:
        """What the next continuation begins with: the last prompt and its answer."""
        turn = self.turn[name]
        return self.prompts[name][turn] + self.sessions[name].turns[turn].output_tokens

    # ---- restores ----

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            name = int(action.conversation)
            read = self.reads.get(name)
            if isinstance(action, Stop):
                if read is not None and read.operation == action.operation and not read.is_urgent:
                    del self.reads[name]
                    self.host.held.discard(name)
                continue
            self.submits += 1
            self.host.touch(name)
            if read is not None or self.host.resident.get(name, 0) >= self.prefix_tokens(name):
                self.restored(name, action, None)
                continue
            deadline_s = self.now_s + (action.expected_gap_s if action.expected_gap_s is not None else 600.0)
            self.reads[name] = _Read(self.prefix_tokens(name), self.now_s, deadline_s, action.operation)
            self.host.held.add(name)
            if action.lease_s is not None:
                self.host.lease(name, self.now_s + action.lease_s)
            self.read_next()

    def restored(self, name: int, action: Restore, took_s: float | None) -> None:
        assert self.policy is not None
        self.policy.ended(str(name), action.operation, took_s)
        if action.lease_s is not None:
            self.host.lease(name, self.now_s + action.lease_s)

    def read_next(self) -> None:
        if self.is_reading or not self.reads:
            return
        name = min(
            self.reads,
            key=lambda name: (not self.reads[name].is_urgent, self.reads[name].deadline_s, name),
        )
        read = self.reads[name]
        before = self.host.resident.get(name, 0)
        piece = min(self.machine.piece_tokens, read.target_tokens - before)
        evicted = self.host.grow(name, before + piece, self.now_s)
        got = self.host.resident.get(name, 0) - before
        if read.operation is None:
            self.requested_tokens += got
        else:
            self.restored_tokens += got
            self.evicted_tokens += evicted
            self.host.unused[name] = self.host.unused.get(name, 0) + got
        self.is_reading = True
        is_last = got < piece or self.host.resident.get(name, 0) >= read.target_tokens
        self.at(
            self.now_s + got / self.machine.read_tokens_per_s,
            lambda: self.piece_read(name, read, is_last=is_last),
        )

    def piece_read(self, name: int, read: _Read, *, is_last: bool) -> None:
        self.is_reading = False
        if is_last and self.reads.get(name) is read:
            del self.reads[name]
            if read.operation is not None:
                assert self.policy is not None
                self.policy.ended(str(name), read.operation, self.now_s - read.begun_s)
            if name in self.arrived_s:
                self.go_on(name)
            else:
                self.host.held.discard(name)
        self.read_next()


def play(sessions: Sequence[Session], machine: Machine, compared: Compared, *, seed: int = 0) -> Played:
    """Play every session once; the same for the same arguments.

    Args:
        sessions: Of agents.
        machine: What they run on.
        compared: The policy, and what it is told.
        seed: Of the order of the sessions and of when agents begin.
    """
    return _Simulation(sessions, machine, compared, seed).run()


NOTHING, DEFAULT = "nothing", "at the pause (the default)"
POLICIES = {
    NOTHING: Compared(None),
    DEFAULT: Compared(Settings(When.AT_PAUSE)),
    f"{DEFAULT}, a hint at half the gap": Compared(Settings(When.AT_PAUSE), Hint(0.5)),
    f"{DEFAULT}, the gap is known": Compared(Settings(When.AT_PAUSE), Hint(0.0)),
    "on a hint, at half the gap": Compared(Settings(When.ON_HINT), Hint(0.5)),
    "before the end, predictable or not": Compared(Settings(When.BEFORE_END, spread=math.inf)),
    "before the end, if predictable": Compared(Settings(When.BEFORE_END)),
    "before the end, if predictable, tools named": Compared(Settings(When.BEFORE_END), names=Names(2.0)),
    "keep warm, eight leases at most": Compared(Settings(When.KEEP_WARM, most=8)),
}
"""What is compared: ways to choose the time, some of them with what somebody may know."""
