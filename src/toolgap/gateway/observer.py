"""The gateway's observer: whose a request is, and what its answer was. Runs in the observer's thread."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from toolgap.gateway import watch
from toolgap.gateway.apis.answers import Json
from toolgap.gateway.headers import Headers
from toolgap.gateway.observing import Asked, Ending, Observation, Place
from toolgap.gateway.restoring import Restoring
from toolgap.gateway.sessions import Conversation, Sessions
from toolgap.gateway.turns import Owner
from toolgap.gateway.upstreams import weight

MAX_EARLY = 1024
"""Requests whose session was asked for, and that have not been shown yet."""

REPLICA_HEADER = "x-data-parallel-rank"
"""Of SGLang: which of its data-parallel replicas is to take a request."""

REPLICA_FIELDS = ("routed_dp_rank", "data_parallel_rank")
"""The same in a body."""

ROUTING_HEADER = "x-smg-routing-key"
"""Of SGLang's router: requests of one key go to one worker, with a policy that looks at it."""


class Recorder(Protocol):
    """Keeps turns."""

    turns: int
    """How many it has kept."""
    lost: int
    """How many it could not keep."""

    def turn(self, session: str, asked: watch.Asked, seen: watch.Seen, asked_s: float) -> None:
        """A turn: the conversation's key, the request, its answer, and when it came, in Unix time."""


class Watcher:
    """An :class:`toolgap.gateway.observing.Observer` that lets conversations be restored.

    Args:
        restoring: Takes what was seen; without it nothing is restored.
        sessions: Tells conversations apart.
        recording: Gets every whole turn, if given.
        replicas: How many data-parallel replicas a server has; a conversation goes to one of them.
        routed: Whether the upstream is a router, which is told what belongs together.
        clock: That of ``restoring``: Unix time that never jumps, in seconds.
    """

    def __init__(
        self,
        restoring: Restoring | None,
        sessions: Sessions,
        *,
        recording: Recorder | None = None,
        replicas: int = 1,
        routed: bool = False,
        clock: Callable[[], float],
    ) -> None:
        self._restoring, self._sessions, self._recording = restoring, sessions, recording
        self._replicas, self._routed = replicas, routed
        self._clock = clock
        self._early: OrderedDict[int, _Early] = OrderedDict()

    def place(self, request: Asked) -> Place | None:
        """Where a request is to go; it is shown again, by :meth:`asked`."""
        known = self._read(request)
        self._early[id(request)] = _Early(request, known)
        while len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)
        if known is None:
            return None
        headers = {}
        if known.replica is not None:
            headers[REPLICA_HEADER] = str(known.replica)
        if self._routed:
            headers[ROUTING_HEADER] = known.conversation.affinity
        return Place(
            known.conversation.affinity,
            tuple((name.encode(), text.encode()) for name, text in headers.items()),
        )

    def asked(self, request: Asked) -> Observation | None:
        """A request is under way; its conversation's gap, if there was one, is over."""
        early = self._early.pop(id(request), None)
        known = self._read(request) if early is None else early.known
        if known is None:
            return None
        if self._restoring is not None:
            self._restoring.asked(known.conversation.key)
        return _Exchange(self, known)

    def answered(self, known: "_Request", upstream: str, seen: watch.Seen) -> None:
        """A whole answer has passed."""
        conversation = known.conversation
        response_id = seen.answer_id if known.asked.path == "/v1/responses" else None
        self._sessions.answered(conversation.key, response_id, [call.id for call in seen.calls])
        if self._restoring is not None:
            owner = Owner(
                conversation.affinity, known.headers.get("authorization"), conversation.session, known.replica
            )
            self._restoring.answered(conversation.key, owner, upstream, seen)
        if self._recording is not None:
            self._recording.turn(conversation.key, known.asked, seen, known.asked_s)

    @property
    def now_s(self) -> float:
        """The time."""
        return self._clock()

    def _read(self, request: Asked) -> "_Request | None":
        if request.body is None:
            return None
        headers = plain(request.headers)
        asked = watch.asked(request.path, headers, request.body)
        if asked is None:
            return None
        conversation = self._sessions.of(request.path, headers, asked.request)
        if self._restoring is not None:
            for forgotten in conversation.forgotten:
                self._restoring.forgotten(forgotten)
        replica = named_replica(headers, asked.request)
        if replica is None and self._replicas > 1:
            replica = replica_of(conversation.affinity, self._replicas)
        return _Request(asked, conversation, headers, replica, self.now_s)


class _Early(NamedTuple):
    request: Asked
    """Kept, so that no other object can have its identity."""
    known: "_Request | None"


class _Request:
    def __init__(
        self,
        asked: watch.Asked,
        conversation: Conversation,
        headers: Mapping[str, str],
        replica: int | None,
        asked_s: float,
    ) -> None:
        self.asked, self.conversation, self.headers = asked, conversation, headers
        self.replica, self.asked_s = replica, asked_s


class _Exchange:
    """One request's answer."""

    def __init__(self, watcher: Watcher, known: _Request) -> None:
        self._watcher, self._known = watcher, known
        self._watch: watch.Watch | None = None
        self._upstream = ""

    def answering(self, upstream: str, status: int, headers: Headers) -> None:
        self._upstream = upstream
        self._watch = watch.Watch(self._known.asked, status, plain(headers))

    def data(self, chunk: bytes) -> None:
        if self._watch is not None:
            self._watch.feed(chunk, self._watcher.now_s)

    def ended(self, ending: Ending) -> None:
        # A client may leave as soon as it has read the last event: whether the answer is whole, it tells itself.
        seen = None if self._watch is None else self._watch.ended(self._watcher.now_s)
        if seen is not None and ending in (Ending.COMPLETE, Ending.CLIENT_LEFT):
            self._watcher.answered(self._known, self._upstream, seen)


def replica_of(affinity: str, replicas: int) -> int:
    """The replica that a conversation goes to: the same in every gateway."""
    return max(range(replicas), key=lambda replica: weight(affinity, f"replica {replica}"))


def named_replica(headers: Mapping[str, str], request: Json) -> int | None:
    """The replica that the client itself names; SGLang goes by the header first."""
    told = headers.get(REPLICA_HEADER, "")
    if told.isascii() and told.isdigit():
        return int(told)
    named = (request.get(field) for field in REPLICA_FIELDS)
    return next((replica for replica in named if type(replica) is int and replica >= 0), None)


def plain(headers: Headers) -> dict[str, str]:
    """Headers by lower-case name; of several of one name the last."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
