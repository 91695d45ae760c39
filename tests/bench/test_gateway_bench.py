"""What ``toolgap bench gateway`` makes of bytes, times and trials; its streams are tested with the gateway."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgap.bench import gateway_evidence
from toolgap.bench.errors import BenchError
from toolgap.bench.evidence import MANIFEST, REPORT, TRIALS
from toolgap.bench.gateway import Arm, Plan, Trial, counts
from toolgap.bench.gateway_child import script
from toolgap.bench.gateway_figures import figures, quantile_ms
from toolgap.bench.gateway_streams import Reply, Stream, read
from toolgap.bench.spread import Spread, percentile
from toolgap.bench.verify import problems

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PLAN = Plan(
    streams=2, requests=1, events=4, events_per_s=10, rounds=2, seed=1, arms=(Arm.DIRECT, Arm.RESTORING)
)


def reply(raw: bytes, cuts: list[int]) -> Reply:
    """These bytes in parts, of which each comes when its last byte does: at its offset."""
    ends = sorted({cut % len(raw) for cut in cuts} - {0}) + [len(raw)]
    starts = [0, *ends[:-1]]
    return Reply("one", 0, ends, [raw[a:b] for a, b in zip(starts, ends, strict=True)], is_whole=True)


@given(cuts=st.lists(st.integers(0, 10_000)), pieces=st.lists(st.integers(1, 40), min_size=1))
def test_a_stream_is_read_however_it_is_cut(cuts: list[int], pieces: list[int]) -> None:
    body = b"data: one\n\ndata: two\n\ndata: [DONE]\n\n"
    chunks, rest = [], body
    for size in [*pieces, len(body)]:
        if rest:
            chunks.append(rest[:size])
            rest = rest[size:]
    raw = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    found, plain = (
        read(reply(raw, cuts)),
        read(reply(HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), [])),
    )
    assert found is not None
    assert plain is not None
    assert found.digest == plain.digest
    assert len(found.events_ns) == 3
    assert (
        len(HEAD)
        < found.first_ns
        <= found.events_ns[0]
        <= found.events_ns[1]
        <= found.events_ns[2]
        <= len(raw)
    )
    # An event is there once a part has come that holds its last byte, and not before.
    assert found.events_ns == [
        next(t for t in reply(raw, cuts).times_ns if t > raw_at(chunks, n)) for n in (10, 21, 35)
    ]


def raw_at(chunks: list[bytes], offset: int) -> int:
    """Where the body's byte at an offset is in the raw bytes."""
    place = len(HEAD)
    for chunk in chunks:
        place += len(b"%x\r\n" % len(chunk))
        if offset < len(chunk):
            return place + offset
        place += len(chunk) + 2
        offset -= len(chunk)
    raise AssertionError(offset)


def test_what_broke_is_no_stream() -> None:
    whole = HEAD + b"1\r\nx\r\n0\r\n\r\n"
    assert isinstance(read(reply(whole, [])), Stream)
    assert read(reply(whole, [])._replace(is_whole=False)) is None
    assert read(reply(b"HTTP/1.1 502 No\r\ncontent-length: 0\r\n\r\n", [])) is None
    assert read(reply(HEAD + b"0\r\n\r\n", [])) is None


def test_what_a_real_server_makes_anew_is_not_compared() -> None:
    one, other = (
        reply(HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), [])
        for body in (b'data: {"id":"a","created":1,"x":2}\n\n', b'data: {"id":"bb","created":33,"x":2}\n\n')
    )
    assert read(one, real=True).digest == read(other, real=True).digest  # type: ignore[union-attr]
    assert read(one).digest != read(other).digest  # type: ignore[union-attr]


@given(st.lists(st.integers(0, 10**9), min_size=1), st.sampled_from([1, 50, 99, 100]))
def test_quantiles_of_what_is_kept_are_those_of_the_values(values_ns: list[int], percent: float) -> None:
    steps = [value // 10_000 * 10 / 1000 for value in values_ns]
    assert quantile_ms(counts(values_ns), percent) == percentile(steps, percent)


def test_a_script_follows_from_its_name() -> None:
    assert script("a", 20, 25) == script("a", 20, 25) != script("b", 20, 25)
    assert len(script("a", 20, 25).events) == len(script("a", 20, 25).delays_s) == 20
    assert script("a", 20, 25).events[-1] == b"data: [DONE]\n\n"


def trial(number: int, arm: Arm, shift_us: int, **other: object) -> Trial:
    made = Trial(
        trial_id=f"r{number}-{arm}",
        round=number,
        arm=arm,
        began_ts=1.0,
        wall_s=1.0,
        asked=2,
        whole=2,
        equal=2,
        unwatched=0,
        events=8,
        first_byte_us=[(100 + shift_us, 1), (200 + shift_us, 1)],
        event_us=[(10 + shift_us, 7), (1000 + shift_us, 1)],
        cpu_s={"client": 1.0} if arm is Arm.DIRECT else {"client": 1.0, "gateway": 0.0008},
        other_cores=0.3 if number else 0.0,
    )
    return msgspec.structs.replace(made, **other)


TRIALS_MADE = [
    trial(0, Arm.DIRECT, 0),
    trial(0, Arm.RESTORING, 200),
    trial(1, Arm.RESTORING, 300),
    trial(1, Arm.DIRECT, 0),
]


def test_what_is_added_is_the_difference_within_a_round() -> None:
    found = figures(PLAN, TRIALS_MADE)
    assert found.direct_ms["event_p99"] == Spread(1.0, 1.0, 1.0, 2)
    [added] = found.added
    assert added.event_ms == {"p50": Spread(0.25, 0.2, 0.3, 2), "p99": Spread(0.25, 0.2, 0.3, 2)}
    assert added.first_byte_ms["p50"] == Spread(0.25, 0.2, 0.3, 2)
    assert (added.equal_streams, added.requests, added.gateway_cpu_us_per_event) == (4, 4, 100.0)
    assert added.busy_rounds == 1
    assert figures(PLAN, TRIALS_MADE[1:3]).added == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recording = gateway_evidence.Recording(tmp_path / "run", PLAN)
    recording.append(TRIALS_MADE[:2])
    recording.append(TRIALS_MADE[2:])
    return recording.folder


def test_a_run_is_verified_also_by_the_command_for_all_runs(folder: Path) -> None:
    assert problems(folder) == gateway_evidence.problems(folder) == []
    with pytest.raises(BenchError, match="another folder"):
        gateway_evidence.Recording(folder, PLAN)


def edit(name: str, old: str, new: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (edit(REPORT, "0.25", "0.20"), "is not what the trials give"),
        (edit(TRIALS, '"equal":2', '"equal":3'), "counts do not agree"),
        (edit(TRIALS, '"unwatched":0', '"unwatched":1'), "missed 1 answers"),
        (edit(TRIALS, '"round":1', '"round":0'), "were planned"),
        (edit(MANIFEST, '"run": "run"', '"run": "other"'), "'other'"),
        (lambda folder: (folder / TRIALS).unlink(), "No such file"),
    ],
)
def test_what_was_spoilt_is_found(folder: Path, spoil: Callable[[Path], object], told: str) -> None:
    spoil(folder)
    assert any(told in problem for problem in problems(folder))


def test_a_run_that_was_moved_is_told(folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    assert problems(moved) == ["the manifest is that of the run 'run'"]
