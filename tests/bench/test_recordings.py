"""Recordings become sessions to be played: in their order, with their gaps, cut to what a machine can take."""

from pathlib import Path
from typing import Any

import pytest

from toolgap.bench.errors import BenchError
from toolgap.bench.plan import Plan
from toolgap.bench.recipes.replay import Replay, chosen
from toolgap.bench.recordings import continuations, read, scaled, sessions
from toolgap.gateway.record import Recorded
from toolgap.protocol import Api

CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "a"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "b"}


def turn(
    asked_s: float, whole_s: float, prompt_tokens: int | None, *, session: str = "s", **fields: Any
) -> Recorded:
    fields = {"output_tokens": 10, "num_calls": 1, "request_bytes": 400, "path": CHAT, **fields}
    return Recorded(session=session, asked_s=asked_s, whole_s=whole_s, prompt_tokens=prompt_tokens, **fields)


def said(asked_s: float, messages: list[dict[str, Any]], **fields: Any) -> Recorded:
    request = {"model": "m", "temperature": 0, "messages": messages}
    response = {"choices": [{"index": 0, "message": ANSWER}]}
    size = 100 * len(messages)
    more = {"request": request, "response": response, "api": Api.OPENAI, **fields}
    return turn(asked_s, asked_s + 1, size, **more)


def written(path: Path, *turns: Recorded) -> Path:
    path.write_bytes(b"".join(one.line() for one in turns))
    return path


def plan(path: Path, **options: Any) -> Plan:
    return Plan(
        recipe=Replay.name,
        seed=1,
        rounds=1,
        prompt_tokens=(1024,),
        gaps_ms=(0.0,),
        arms=Replay.defaults["arms"],
        page_tokens=16,
        page_cache="warm",
        options={"recording": str(path), **options},
    )


def test_sessions_begin_and_wait_as_they_were_recorded() -> None:
    found = sessions(
        [turn(5, 6, 100), turn(6.5, 7, 50, session="t"), turn(8, 9, 200, num_calls=0), turn(10, 11, 300)]
    )
    assert [(one.begin_s, len(one.requests)) for one in found] == [(0.0, 3), (1.5, 1)]
    assert [request.gap_s for request in found[0].requests] == [2.0, 1.0, 0.0]
    assert [request.calls for request in found[0].requests] == [True, False, True]
    assert continuations(found[0]) == 1


def test_what_is_asked_beside_and_what_got_shorter_are_sessions_of_their_own() -> None:
    # A title is asked for while the answer is made; later the conversation is compacted.
    title = turn(1, 2, 60, num_calls=0)
    found = sessions([turn(0, 5, 100), title, turn(6, 7, 200), turn(8, 9, 50), turn(10, 11, 90)])
    assert [[r.prompt_tokens for r in one.requests] for one in found] == [[100, 200], [60], [50, 90]]


def test_sizes_that_the_server_did_not_say_are_estimated() -> None:
    (one,) = sessions([turn(0, 1, None, output_tokens=None, answer_bytes=80)])
    (request,) = one.requests
    assert (request.prompt_tokens, request.output_tokens, request.is_estimated) == (100, 20, True)


def test_what_was_said_names_prompts_and_what_is_certain_of_the_next() -> None:
    (one,) = sessions([said(0, [USER]), said(3, [USER, ANSWER, USER])])
    first = one.requests[0]
    assert first.prompt == {"messages": [USER]}
    assert first.ahead == {"messages": [USER, ANSWER]}
    # Next to one that is of no such API nothing can be made of what was said.
    (other,) = sessions([said(0, [USER]), said(3, [USER, ANSWER, USER], api=None)])
    assert [request.prompt for request in other.requests] == [None, None]
    # Where it is known what was said, it decides, and not how long it was.
    assert len(sessions([said(0, [USER]), said(3, [ANSWER, USER, USER])])) == 2


def test_a_session_is_cut_to_what_a_machine_can_take() -> None:
    (one,) = sessions([turn(10, 11, 1000), turn(15, 16, 2000), turn(17, 18, 4000)])
    half = scaled(one, speed=2, tokens=0.5, most_prompt_tokens=1500, most_output_tokens=3)
    assert half is not None
    assert [(r.prompt_tokens, r.output_tokens, r.gap_s) for r in half.requests] == [
        (500, 3, 2.0),
        (1000, 3, 0.5),
    ]
    assert scaled(one, speed=1, tokens=1, most_prompt_tokens=999, most_output_tokens=3) is None


def test_a_recording_is_read_though_it_is_still_being_written(tmp_path: Path) -> None:
    path = written(tmp_path / "turns.jsonl", turn(5, 6, 2), turn(1, 2, 1))
    path.write_bytes(path.read_bytes() + b'{"session": "s", "asked')
    assert [one.asked_s for one in read(path)] == [1, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no turns"),
        (b"{}\n", "line 1"),
        (b"\n[]\n", "line 2"),
        (b"\xff\n", "line 1"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_recording_is_said(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "turns.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BenchError, match=message):
        read(path)


def test_a_recording_of_which_nothing_can_be_played_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "turns.jsonl", turn(0, 1, 1000), turn(2, 3, 2000))
    with pytest.raises(BenchError, match="1 continuations of tool calls, and none"):
        Replay().check(plan(path))
    (one,) = chosen(plan(path, tokens_scale=0.5), sessions(read(path)))
    assert [request.prompt_tokens for request in one.requests] == [500, 1000]
    with pytest.raises(BenchError, match="greater than 0"):
        Replay().check(plan(path, speed=0))
