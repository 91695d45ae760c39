"""What a gateway has recorded, as sessions to be played again. The only I/O is reading the file.

A session is a row of requests of which each waits for the answer to the one before; what a conversation asks
beside that, at the same time, is a session of its own. So is what follows a prompt that has become shorter.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from toolgap.bench.errors import BenchError
from toolgap.client import PrefixFields
from toolgap.gateway.record import Recorded, turn_of
from toolgap.gateway.sessions import without_marks
from toolgap.protocol import PROMPT_FIELDS, Api

BYTES_PER_TOKEN = 4
"""Where the server did not say how many tokens there were: about right for English, code and JSON."""


class Request(NamedTuple):
    """One request and its answer, as sizes, and as what was said if that was recorded."""

    prompt_tokens: int
    output_tokens: int
    gap_s: float
    """From the answer until the next request of the session; 0 for the last one."""
    calls: bool
    """Whether the answer calls tools: what follows is their continuation."""
    is_estimated: bool
    """Whether the server did not say how long the prompt was."""
    prompt: PrefixFields | None = None
    """Names the prompt; None if it was recorded without content, or has no messages."""
    ahead: PrefixFields | None = None
    """Names what the next prompt certainly begins with."""


class Session(NamedTuple):
    """Requests of which each waited for the one before."""

    begin_s: float
    """From the begin of the recording."""
    requests: tuple[Request, ...]


def read(path: Path) -> list[Recorded]:
    """The turns of a recording, in the order of their requests.

    Raises:
        BenchError: it cannot be read, or is no recording; the text names the line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    # The last line has no end if a gateway is writing it, or was killed while it did.
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    decoder = msgspec.json.Decoder(Recorded)
    turns = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                turns.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BenchError(f"{path}, line {number} is no turn of a recording: {error}") from None
    if not turns:
        raise BenchError(f"{path} is no recording: it has no turns")
    return sorted(turns, key=lambda turn: turn.asked_s)


def sessions(turns: Sequence[Recorded]) -> list[Session]:
    """Turns as sessions, in the order of their begins.

    Args:
        turns: In the order of their requests.
    """
    begin_s = turns[0].asked_s if turns else 0.0
    named = sorted(turns, key=lambda turn: turn.session)
    rows = [row for _, own in groupby(named, key=lambda turn: turn.session) for row in _rows(own)]
    found = [Session(row[0].asked_s - begin_s, _requests(row)) for row in rows]
    return sorted(found, key=lambda session: session.begin_s)


def scaled(
    session: Session, *, speed: float, tokens: float, most_prompt_tokens: int, most_output_tokens: int
) -> Session | None:
    """A session for a smaller machine; None if nothing of it fits.

    Args:
        session: As recorded.
        speed: Times that gaps are divided by.
        tokens: What made-up prompts and answers are multiplied by; recorded ones stay what they are.
        most_prompt_tokens: The session ends before a longer prompt.
        most_output_tokens: A longer answer is cut.
    """
    requests: list[Request] = []
    for request in session.requests:
        factor = tokens if request.prompt is None else 1.0
        prompt_tokens = max(1, round(request.prompt_tokens * factor))
        if prompt_tokens > most_prompt_tokens:
            break
        requests.append(
            request._replace(
                prompt_tokens=prompt_tokens,
                output_tokens=min(max(1, round(request.output_tokens * factor)), most_output_tokens),
                gap_s=request.gap_s / speed,
            )
        )
    return Session(session.begin_s / speed, tuple(requests)) if requests else None


def continuations(session: Session) -> int:
    """How many of its requests follow an answer that calls tools."""
    return sum(request.calls for request in session.requests[:-1])


def _rows(turns: Iterable[Recorded]) -> list[list[Recorded]]:
    rows: list[list[Recorded]] = []
    for turn in turns:
        before = [row for row in rows if _may_follow(row[-1], turn)]
        if before:
            # An answer that calls tools is gone on with, a title is not; else what was answered last.
            max(before, key=lambda row: (row[-1].num_calls > 0, row[-1].whole_s)).append(turn)
        else:
            rows.append([turn])
    return rows


def _may_follow(before: Recorded, turn: Recorded) -> bool:
    if before.path != turn.path or before.whole_s > turn.asked_s:
        return False
    asked, more = _messages(before), _messages(turn)
    if asked is None or more is None:
        return asked is more and _prompt_tokens(turn) > _prompt_tokens(before)
    return len(asked) < len(more) and without_marks(more[: len(asked)]) == without_marks(asked)


def _messages(turn: Recorded) -> list[Any] | None:
    messages = (turn.request or {}).get("messages")
    return messages if isinstance(messages, list) else None


def _requests(row: Sequence[Recorded]) -> tuple[Request, ...]:
    gaps = [after.asked_s - turn.whole_s for turn, after in pairwise(row)]
    # Of several prompts either all have been recorded or all are made up, since each goes on from the one before.
    whole = all(_fields(turn) is not None for turn in row)
    return tuple(
        Request(
            prompt_tokens=_prompt_tokens(turn),
            output_tokens=_output_tokens(turn),
            gap_s=gap_s,
            calls=turn.num_calls > 0,
            is_estimated=turn.prompt_tokens is None,
            prompt=_fields(turn) if whole else None,
            ahead=_ahead(turn) if whole else None,
        )
        for turn, gap_s in zip(row, [*gaps, 0.0], strict=True)
    )


def _prompt_tokens(turn: Recorded) -> int:
    return turn.prompt_tokens or max(1, turn.request_bytes // BYTES_PER_TOKEN)


def _output_tokens(turn: Recorded) -> int:
    return turn.output_tokens or max(1, (turn.answer_bytes or 0) // BYTES_PER_TOKEN)


def _fields(turn: Recorded) -> PrefixFields | None:
    request = turn.request
    if turn.api is None or request is None or _messages(turn) is None:
        return None
    # Under which name the model was served is no part of the prompt.
    names = [name for name in PROMPT_FIELDS if name != "model" and request.get(name) is not None]
    fields: dict[str, Any] = {name: request[name] for name in names}
    if turn.api is not Api.OPENAI:
        fields["api"] = turn.api
    return cast("PrefixFields", fields)


def _ahead(turn: Recorded) -> PrefixFields | None:
    fields, read_again = _fields(turn), turn_of(turn)
    answer = None if read_again is None else read_again.answer()
    if fields is None or answer is None:
        return None
    return cast("PrefixFields", {**fields, "messages": [*(fields["messages"] or ()), answer]})
