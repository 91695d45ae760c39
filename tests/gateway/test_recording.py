"""Recordings are written by the gateway, one line a turn, and never in its way."""

import json
import logging
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from toolgap.gateway.apis.answers import Usage
from toolgap.gateway.recording import Recording, RecordingError
from toolgap.gateway.watch import Asked, Seen
from toolgap.hooks.restores import Call
from toolgap.hooks.tool_calls import Answer
from toolgap.prefixes.turns import TurnsError, read_turns

ASKED = Asked("/v1/chat/completions", {"messages": [{"role": "user", "content": "secret"}]})
SEEN = Seen(
    answer=Answer(request_id="r", messages=({"role": "assistant", "content": "yes"},), calls=["c"]),
    calls=(Call("c", "bash"),),
    finish="tool_calls",
    answer_id="r",
    reasoned=False,
    usage=Usage(7, 3),
    calling_s=2.0,
    whole_s=3.0,
)
RESPONSES = Asked("/v1/responses", {"input": "secret"})


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@contextmanager
def no_file_longer_than(size_bytes: int) -> Iterator[None]:
    """The nearest that a test without a file system of its own comes to a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_every_turn_is_there_at_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    with Recording(path, content=True) as recording:
        recording.turn("a", ASKED, SEEN, 1.0)
        (line,) = lines(path)
        recording.turn("a", RESPONSES, SEEN, 4.0)
    assert recording.turns == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (json.loads(line)["asked_s"], json.loads(line)["path"]) == (1.0, ASKED.path)
    # What has no messages is no turn of check-prefix, and does not make the file unreadable.
    (turn,) = read_turns(path.read_bytes())
    assert turn.request == ASKED.request


def test_without_content_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    with Recording(path, content=False) as recording:
        recording.turn("a", ASKED, SEEN, 1.0)
    assert b"secret" not in path.read_bytes()
    assert b"bash" not in path.read_bytes()
    with pytest.raises(TurnsError, match="without content"):
        read_turns(path.read_bytes())


def test_recordings_after_each_other_do_not_mix_their_sessions(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    for _ in range(2):
        with Recording(path, content=True) as recording:
            recording.turn("a", ASKED, SEEN, 1.0)
    assert len({turn.session for turn in read_turns(path.read_bytes())}) == 2


@pytest.mark.parametrize("length", [1, 200_000])
def test_a_line_that_was_being_written_is_taken_away(tmp_path: Path, length: int) -> None:
    path = tmp_path / "turns.jsonl"
    with Recording(path, content=True) as recording:
        recording.turn("a", ASKED, SEEN, 1.0)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"session":' + b"x" * length)
    Recording(path, content=True).close()
    assert path.read_bytes() == whole


def test_what_cannot_be_recorded_into_is_said(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    with Recording(path, content=False), pytest.raises(RecordingError, match="already"):
        Recording(path, content=False)
    path.write_text("a letter")
    with pytest.raises(RecordingError, match="no recording"):
        Recording(path, content=False)
    assert path.read_text() == "a letter"
    for other in (tmp_path / "absent" / "turns.jsonl", Path("/dev/null")):
        with pytest.raises(RecordingError, match="cannot be recorded into"):
            Recording(other, content=False)


def test_a_full_disk_costs_turns_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "turns.jsonl"
    with Recording(path, content=True) as recording, caplog.at_level(logging.WARNING):
        recording.turn("a", ASKED, SEEN, 1.0)
        (line,) = lines(path)
        with no_file_longer_than(len(line) + 10):
            for _ in range(3):
                recording.turn("a", ASKED, SEEN, 1.0)
        assert (recording.turns, recording.lost) == (1, 3)
        assert lines(path) == [line]
        recording.turn("a", ASKED, SEEN, 1.0)
    assert lines(path) == [line, line]
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text
