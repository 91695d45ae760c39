"""Which conversation a request belongs to. Pure: no I/O, no clock; keeps hashes of messages, not their text.

A conversation is a sequence of requests of which each goes on from the one before. A client that names its
session makes it certain; but under one name an agent also asks things beside (a title, a summary), which must
not be taken for the conversation's next step. So a name limits where a conversation is looked for, and the
messages decide.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec

from toolgap.gateway.apis.answers import Json

MAX_CONVERSATIONS = 4096

SESSION_HEADERS = (
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("x-session-id", None),
    ("session-id", None),
    ("session_id", None),
    ("conversation_id", None),
)
"""Of Claude Code (whose subagents have an id of their own), OpenCode, and Codex, now and before."""

SESSION_FIELDS = ("session_id", "prompt_cache_key")
"""Of a body: SGLang's session, and the key that Codex gives every session a new one of."""

SCOPE_FIELDS = ("user", "safety_identifier")
"""Whose conversations these are, not which."""

BLOCK_CHARACTERS = 1024
"""A prompt without messages is compared in blocks of so much text."""

BLOCK_TOKENS = 256

MOVED_BACK = 2
"""By so many messages a conversation without a name may go back and stay itself: the last one is edited, or the
last answer is asked for again."""

MARKED_DEPTH = 8
"""How deep in a message what means the same is looked for."""

ANSWERS = 4
"""Names of answers that are remembered, times the conversations."""

_DIGEST_BYTES = 12


class Conversation(NamedTuple):
    """Where a request belongs."""

    key: str
    """Its conversation's name in this process: no client's name can be read from it."""
    affinity: str
    """The same for all requests of a conversation, in every gateway: what a worker is chosen by."""
    session: str | None
    """The client's own name of its session, if it gives one."""
    continues: bool
    """Whether the conversation is known: then this request's state replaces the one before."""
    forgotten: tuple[str, ...] = ()
    """Keys of conversations that had to make room."""

    @property
    def is_named(self) -> bool:
        """Whether the client has named its session."""
        return self.session is not None


class _Known:
    """The state of a conversation: of its last request."""

    def __init__(self, key: str, scope: bytes, affinity: str) -> None:
        self.key, self.scope, self.affinity = key, scope, affinity
        self.frame = b""
        self.chain: tuple[bytes, ...] = ()
        self.indexed: tuple[bytes, ...] = ()


class Sessions:
    """The conversations that are remembered, the one that was quiet longest forgotten first.

    Args:
        max_conversations: How many.
    """

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max = max_conversations
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._ends: dict[bytes, str] = {}
        """The conversation whose messages end, or nearly end, with this state, of any frame or of its own."""
        self._frames: dict[bytes, str] = {}
        """Within a named session: the conversation that was last asked with this frame."""
        self._answers: OrderedDict[bytes, str] = OrderedDict()
        """The conversation of an answer, by hashes of the answer's id and of its tool calls' ids."""
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, path: str, headers: Mapping[str, str], request: Json) -> Conversation:
        """The conversation of a request, which becomes its newest state.

        Args:
            path: Of the URL.
            headers: By lower-case name.
            request: The body, of whatever shape.
        """
        name = session_name(headers, request)
        scope = _digest(
            path.encode(errors="replace"),
            *(headers.get(key, "").encode(errors="replace") for key in _CREDENTIALS),
            *name,
        )
        if not name:
            scope = _digest(scope, *(_canonical([key, request.get(key)]) for key in SCOPE_FIELDS))
        frame = _digest(scope, _canonical(_frame(request)))
        chain = tuple(_chain(scope, _messages(request)))
        previous, calls = request.get("previous_response_id"), _last_calls(request)
        known = self._find(scope, frame, chain, previous, calls, is_named=bool(name))
        continues = known is not None
        if known is None:
            # A session's requests go to one worker, which has the prefix that its agents share.
            affinity = scope if name else _digest(frame, *chain[:1])
            known = _Known(f"{scope.hex()[:12]}-{next(self._numbers)}", scope, affinity.hex())
            self._known[known.key] = known
        self._renew(known, frame, chain, is_named=bool(name))
        forgotten = []
        while len(self._known) > self._max:
            key, oldest = self._known.popitem(last=False)
            self._unindex(oldest)
            forgotten.append(key)
        session = name[1].decode(errors="replace") if name else None
        return Conversation(known.key, known.affinity, session, continues, tuple(forgotten))

    def answered(self, key: str, response_id: str | None = None, calls: Iterable[str] = ()) -> None:
        """A conversation has its answer, and what names it goes on with this conversation.

        Args:
            key: The conversation's.
            response_id: The answer's, if the next request may name it as the one before.
            calls: Ids of its tool calls.
        """
        known = self._known.get(key)
        if known is None:
            return
        names = [_named(known.scope, call) for call in calls]
        if response_id is not None:
            names.append(_named(known.scope, response_id))
        for name in names:
            self._answers[name] = key
            self._answers.move_to_end(name)
        while len(self._answers) > ANSWERS * self._max:
            self._answers.popitem(last=False)

    def forget(self, key: str) -> None:
        """A conversation has ended."""
        known = self._known.pop(key, None)
        if known is not None:
            self._unindex(known)

    def _find(
        self,
        scope: bytes,
        frame: bytes,
        chain: tuple[bytes, ...],
        previous: Any,
        calls: Iterable[str],
        *,
        is_named: bool,
    ) -> _Known | None:
        if isinstance(previous, str):
            answered = self._known.get(self._answers.get(_named(scope, previous), ""))
            if answered is not None:
                return answered
        for call in calls:
            # Several may have been asked the same; only one was answered with this call.
            known = self._known.get(self._answers.get(_named(scope, call), ""))
            if known is not None and known.chain and chain[: len(known.chain)] == known.chain:
                return known
        for length in range(len(chain), 0, -1):
            # Others may have been asked the same in another frame; one that changes its frame is found after them.
            for state in (_digest(frame, chain[length - 1]), chain[length - 1]):
                known = self._known.get(self._ends.get(state, ""))
                if known is None:
                    continue
                goes_on = length == len(known.chain) and length < len(chain)
                # A whole chain of one message is no more than a beginning that others may have as well.
                again = known.frame == frame and (length >= 2 or is_named)
                if goes_on or again:
                    return known
        # What a session asks in the same frame but from other messages was compacted.
        return self._known.get(self._frames.get(frame, "")) if is_named else None

    def _renew(self, known: _Known, frame: bytes, chain: tuple[bytes, ...], *, is_named: bool) -> None:
        self._unindex(known)
        known.frame, known.chain = frame, chain
        last = chain[-1 - MOVED_BACK :]
        known.indexed = (*last, *(_digest(frame, state) for state in last))
        for state in known.indexed:
            self._ends[state] = known.key
        if is_named:
            self._frames[frame] = known.key
        self._known.move_to_end(known.key)

    def _unindex(self, known: _Known) -> None:
        for state in known.indexed:
            if self._ends.get(state) == known.key:
                del self._ends[state]
        if self._frames.get(known.frame) == known.key:
            del self._frames[known.frame]

    def check_integrity(self) -> None:
        """Raises AssertionError if something is kept of a conversation that is not remembered."""
        assert len(self._known) <= self._max
        assert len(self._answers) <= ANSWERS * self._max
        assert set(self._ends.values()) <= set(self._known)
        assert set(self._frames.values()) <= set(self._known)
        assert len(self._ends) <= 2 * (1 + MOVED_BACK) * len(self._known)
        assert len(self._frames) <= len(self._known)


_CREDENTIALS = ("authorization", "x-api-key")
"""Conversations of different keys are different; only a hash of all is kept."""


def session_name(headers: Mapping[str, str], request: Json) -> tuple[bytes, ...]:
    """The client's own name of a session, in parts; empty if it gives none."""
    for header, part in SESSION_HEADERS:
        if headers.get(header):
            return tuple(
                value.encode(errors="replace")
                for value in (header, headers[header], headers.get(part, "") if part else "")
            )
    for field in SESSION_FIELDS:
        value = request.get(field)
        if isinstance(value, str) and value:
            return (field.encode(errors="replace"), value.encode(errors="replace"))
    parameters = request.get("session_params")
    session = parameters.get("id") if isinstance(parameters, dict) else None
    return (b"session_params", session.encode(errors="replace")) if isinstance(session, str) else ()


def _frame(request: Json) -> Json:
    """What the requests of a conversation have in common beside its messages."""
    tools = request.get("tools")
    return {
        "model": request.get("model"),
        "system": [request.get("system"), request.get("instructions"), _leading(request.get("messages"))],
        "tools": [
            tool.get("name") or (tool.get("function") or {}).get("name")
            for tool in (tools if isinstance(tools, list) else ())
            if isinstance(tool, dict) and isinstance(tool.get("function") or {}, dict)
        ],
    }


def _leading(messages: Any) -> list[Any]:
    leading = []
    for message in messages if isinstance(messages, list) else ():
        if not _is_system(message):
            break
        leading.append(message)
    return leading


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def _messages(request: Json) -> Iterable[Any]:
    """The parts of a prompt of which each next request has more."""
    messages, items, prompt = request.get("messages"), request.get("input"), request.get("prompt")
    if isinstance(messages, list):
        return messages[len(_leading(messages)) :]
    if isinstance(items, list):
        return items
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if isinstance(prompt, str):
        return _blocks(prompt, BLOCK_CHARACTERS)
    if isinstance(prompt, list):
        return _blocks(prompt, BLOCK_TOKENS)
    return ()


def _last_calls(request: Json) -> list[str]:
    """Ids of the tool calls of the last answer that a prompt shows."""
    for field in ("messages", "input"):
        parts = request.get(field)
        for part in reversed(parts) if isinstance(parts, list) else ():
            if calls := _calls(part):
                return calls
    return []


def _calls(part: Any) -> list[str]:
    """Of a message, in OpenAI's or Anthropic's form, or of an item."""
    if not isinstance(part, dict):
        return []
    content, calls = part.get("content"), part.get("tool_calls")
    named = [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    if isinstance(content, list):
        blocks = (block for block in content if isinstance(block, dict))
        named += [block.get("id") for block in blocks if block.get("type") == "tool_use"]
    if str(part.get("type", "")).endswith("_call"):
        named.append(part.get("call_id"))
    return [name for name in named if isinstance(name, str)]


def _named(scope: bytes, name: str) -> bytes:
    return _digest(scope, name.encode(errors="replace"))


def _blocks(prompt: Sequence[Any], length: int) -> Iterable[Any]:
    """Its whole blocks: the last part will be longer next time."""
    return (prompt[start : start + length] for start in range(0, len(prompt) - length + 1, length))


def _chain(scope: bytes, messages: Iterable[Any]) -> Iterable[bytes]:
    """A hash for each message, of it and all that are before it."""
    state = scope
    for message in messages:
        state = _digest(state, _canonical(message))
        yield state


def _canonical(value: Any) -> bytes:
    try:
        return msgspec.json.encode(without_marks(value), order="deterministic")
    except (ValueError, OverflowError, RecursionError):
        # What cannot be written as JSON again, such as numbers beyond 64 bits, is like nothing else of its kind.
        return b"?"


def without_marks(value: Any, depth: int = MARKED_DEPTH) -> Any:
    """Without what a client writes otherwise from request to request though it means the same.

    Marks of what to cache move on with every request, and a text alone may stand in a list or not.

    Args:
        value: Of a request's JSON.
        depth: What is deeper in it stays as it is.
    """
    if not depth:
        return value
    if isinstance(value, list):
        return [without_marks(item, depth - 1) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {key: without_marks(item, depth - 1) for key, item in value.items() if key != "cache_control"}
    content = plain.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        (block,) = content
        if block.keys() == {"type", "text"} and block["type"] == "text":
            plain["content"] = block["text"]
    return plain


def _digest(*parts: bytes) -> bytes:
    hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()
