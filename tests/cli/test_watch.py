"""The live view: what a frame shows, and how the command looks again and again."""

import json
import signal
from typing import Any

import httpx
import msgspec
import pytest
from command import RESTORED, Server, operation, reply, run, serving, words
from rich.console import Console

from samples import ENGINE
from toolgap.cli import watch as command
from toolgap.cli.watch import Look, frame, landed_tokens, read_rate, total_rate
from toolgap.protocol import Estimate, OperationStatus, Overview, Reason, State
from toolgap.terminal import Exit


def look(at_s: float, *active: OperationStatus, recent: tuple[OperationStatus, ...] = ()) -> Look:
    return Look(at_s, Overview(active=list(active), recent=list(recent), engine=ENGINE))


def shown(now: Look, before: Look | None = None, rows: int | None = None, width: int = 140) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(frame(now, before, width, rows))
    return console.export_text()


# ---- a frame ----


def test_a_frame_has_the_engine_and_every_operation() -> None:
    reading = operation(resident_tokens=192, read_tokens=304)
    missed = operation(State.MISS, Reason.NOT_IN_STORAGE, operation_id="op-2")
    text = words(shown(look(1.0, reading, recent=(missed,))))
    assert "storage file" in text
    assert "host 192/8,192" in text
    assert "1 active of 16, 1 recent" in text
    assert "op-1 restoring" in text
    assert "496/992" in text
    assert "not_in_storage" in text
    assert "tokens/s" not in text


def test_what_is_wrong_with_the_engine_is_seen() -> None:
    engine = msgspec.structs.replace(
        ENGINE, paused=True, stalled_reads=2, quarantined_tokens=640, waiting_joins=3
    )
    text = words(shown(Look(1.0, Overview(active=[], recent=[], engine=engine))))
    assert text.startswith("paused 2 stalled with 640 tokens storage file")


def test_every_replica_has_a_line() -> None:
    replicas = [msgspec.structs.replace(ENGINE, dp_rank=rank) for rank in (0, 1)]
    view = Overview(active=[], recent=[], engine=replicas[0], replicas=replicas)
    assert words(shown(Look(1.0, view))).count("replica") == 2


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = look(1.0, operation(read_tokens=100))
    now = look(3.0, operation(read_tokens=300), operation(operation_id="op-2", read_tokens=50))
    assert read_rate(now.overview.active[0], now, before) == 100.0
    assert read_rate(now.overview.active[1], now, before) == 25.0
    assert total_rate(now, before) == 125.0
    assert total_rate(now, None) is None
    assert read_rate(operation(read_tokens=100), now, before) is None
    assert "125 tokens/s read" in words(shown(now, before))


def test_what_landed_is_never_more_than_there_is() -> None:
    assert landed_tokens(operation(resident_tokens=900, read_tokens=200)) == 992
    ended = operation(
        State.PARTIAL, Reason.HOST_CAPACITY, resident_tokens=16, read_tokens=64, inserted_tokens=32
    )
    assert landed_tokens(ended) == 48
    nothing = operation(State.MISS, Reason.BELOW_THRESHOLD, aligned_tokens=0)
    assert landed_tokens(nothing) == 0
    assert "0/0" in shown(look(1.0, nothing))


def test_what_is_due_is_what_somebody_expects() -> None:
    estimate = Estimate(
        missing_tokens=992,
        restore_s=0.5,
        recompute_s=2.5,
        gap_s=20.0,
        queued_tokens=0,
        restore_tokens_per_s=2000.0,
        prefill_tokens_per_s=400.0,
        worthwhile=True,
    )
    assert "19.8" in shown(look(1.0, operation(estimate=estimate)))
    assert "19.8" not in shown(look(1.0, operation(estimate=estimate, ttl_s=20.0)))
    ended = operation(State.RESTORED, Reason.COMPLETE, estimate=estimate)
    assert "19.8" not in shown(look(1.0, recent=(ended,)))


def test_a_divergence_comes_before_the_reason() -> None:
    status = operation(State.RESTORED, Reason.COMPLETE, first_divergent_token=1640)
    assert "diverged at token 1,640" in shown(look(1.0, recent=(status,)))


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_numbers_are_seen_at_any_width_and_a_row_is_one_line(width: int) -> None:
    status = operation(
        operation_id="x" * 128, aligned_tokens=30_000, read_tokens=12_345, first_divergent_token=7
    )
    lines = shown(look(1.0, status), width=width).splitlines()
    assert len(lines) == 4
    assert "12,345/30,000" in lines[-1]
    assert "restoring" in lines[-1]
    assert ("━" in lines[-1]) == (width >= 110)


def test_a_frame_fits_into_its_rows() -> None:
    many = [operation(operation_id=f"op-{number}") for number in range(30)]
    text = shown(look(1.0, *many), rows=10)
    assert len(text.strip("\n").splitlines()) <= 10
    assert "and 24 more" in text
    assert "op-0" in text
    assert "op-29" in shown(look(1.0, *many))
    assert "and 30 more" in shown(look(1.0, *many), rows=1)


@pytest.mark.parametrize("waits", ["stopping", "queued", "following"])
def test_what_an_operation_waits_for_is_its_state(waits: str) -> None:
    status = operation(stopping=waits == "stopping", queued=waits == "queued", following=waits == "following")
    assert f"op-1 {waits}" in words(shown(look(1.0, status)))


# ---- the command ----


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = serving(monkeypatch)
    server.reply = lambda _: reply(look(1.0, operation(), recent=(RESTORED,)).overview)
    return server


def test_once_is_one_look(server: Server) -> None:
    result = run("watch", "--once", environ={"COLUMNS": "140"})
    assert result.exit_code == Exit.OK
    assert server.bodies == [{"action": "status"}]
    assert "1 active of 16, 1 recent" in result.stdout


def test_json_is_one_line_a_look_until_it_is_interrupted(server: Server) -> None:
    def overview(_: dict[str, Any]) -> httpx.Response:
        if len(server.bodies) == 3:
            signal.raise_signal(signal.SIGINT)
        return reply(look(1.0, operation()).overview)

    server.reply = overview
    result = run("watch", "--json", "--interval", "0.1")
    assert result.exit_code == Exit.OK
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert all(json.loads(line)["active"][0]["operation_id"] == "op-1" for line in lines)


def test_another_signal_ends_it_as_signals_do(server: Server) -> None:
    def overview(_: dict[str, Any]) -> httpx.Response:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("unreachable")

    server.reply = overview
    assert run("watch").exit_code == 128 + signal.SIGTERM


def test_what_ends_every_command_ends_it_too(server: Server) -> None:
    server.reply = lambda _: httpx.Response(401, json={"error": "Unauthorized"})
    assert run("watch").exit_code == Exit.REFUSED
    server.reply = lambda _: httpx.Response(404, json={})
    assert run("watch", "--json").exit_code == Exit.UNREACHABLE
    assert run("watch", "--interval", "0").exit_code == Exit.USAGE
    assert run("watch", "--interval", "nan").exit_code == Exit.USAGE
    assert run("watch", "--interval", "inf").exit_code == Exit.USAGE
    assert run("watch", "--url", "nowhere").exit_code == Exit.USAGE


class NoKeys:
    """Lets it look a number of times, then q is pressed."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __enter__(self) -> "NoKeys":
        return self

    def __exit__(self, *exception: object) -> None:
        return

    def pressed(self, key: str, within_s: float) -> bool:
        assert (key, within_s) == ("q", 0.5)
        self.looks -= 1
        return self.looks == 0


def test_the_live_view_outlasts_a_server_that_is_away(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [
        reply(look(1.0, operation()).overview),
        httpx.Response(502),
        reply(look(1.0, operation()).overview),
    ]
    server.reply = lambda _: answers.pop(0)
    monkeypatch.setattr(command, "Keys", lambda _: NoKeys(3))
    console = Console(width=140, height=30, force_terminal=True, record=True, highlight=False)
    monkeypatch.setattr(command, "Console", lambda **_: console)
    result = run("watch", "--interval", "0.5")
    assert result.exit_code == Exit.OK, result.output
    assert not answers
    assert "answered 502" in result.stdout
    assert "q ends" in result.stdout
