"""Admission by estimate: what is slower than a recompute is declined with the numbers, and found out when it is not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import PAGE, PATIENT, Prompt, Server, until

from toolgap.engineclient import read_samples
from toolgap.protocol import Code, Error, ErrorReply, Reason, State

pytestmark = pytest.mark.engine

DECLINING = {**PATIENT, "TOOLGAP_ADMISSION": "decline"}

SLOW_S = 0.02
"""What each page takes longer to be read."""


@pytest.fixture(scope="module")
def admission_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(model, tmp_path_factory.mktemp("admission"), environment=DECLINING) as server:
        yield server


@pytest.fixture
def server(admission_server: Server) -> Iterator[Server]:
    with admission_server.left_as_found():
        yield admission_server


def refusal(server: Server, **submit: Any) -> Error:
    reply = server.call(action="submit", **submit)
    assert reply.status_code in (409, 429), reply.text
    return msgspec.json.decode(reply.content, type=ErrorReply).error


def measured(server: Server) -> tuple[float, float]:
    """Tokens a second of storage and of prefill, once both are known to all ranks."""

    def rates() -> tuple[float, float] | None:
        engine = server.toolgap.overview().engine
        if engine.restore_tokens_per_s is None or engine.prefill_tokens_per_s is None:
            return None
        return engine.restore_tokens_per_s, engine.prefill_tokens_per_s

    return until("both rates were measured", rates)


def slow_down(server: Server, prompt: Prompt) -> None:
    """Let storage be slow, and ordinary requests find that out."""
    for _ in range(5):
        prefix = prompt(20 * PAGE)
        server.store(prefix + [5])
        server.probe.delay("get", SLOW_S, rank=0)
        server.ended(server.toolgap.submit(input_ids=prefix, force=True).operation_id)
        server.flush()
    until("it is known to be slow", lambda: measured(server)[0] < 2 * PAGE / SLOW_S)


def test_what_is_slower_than_a_recompute_is_declined_until_storage_is_fast_again(
    server: Server, prompt: Prompt
) -> None:
    prefix = prompt(200 * PAGE)
    recomputed = server.store(prefix + [5])
    slow_down(server, prompt)

    asked = server.probe.calls["exists"]
    declined = refusal(server, input_ids=prefix, expected_gap_s=0.01)
    assert (declined.code, declined.retry_after_s) == (Code.NOT_WORTHWHILE, None)
    estimate = declined.estimate
    assert estimate is not None
    assert not estimate.worthwhile
    assert estimate.missing_tokens == 200 * PAGE
    assert (estimate.gap_s, estimate.queued_tokens) == (0.01, 0)
    assert estimate.restore_s > estimate.recompute_s + estimate.gap_s
    assert f"{estimate.restore_s:.3g} s" in declined.message
    assert f"{estimate.recompute_s:.3g} s" in declined.message
    assert server.toolgap.overview().engine.reads_in_flight == 0
    assert server.probe.calls["exists"] == asked

    # The gap hides it, whatever it takes; without one the TTL stands in for it.
    hidden = server.toolgap.submit(input_ids=prefix)
    assert hidden.estimate is not None
    assert hidden.estimate.worthwhile
    assert hidden.estimate.gap_s == hidden.ttl_s
    # Whoever shares that read has to read nothing, and waits for it.
    shared = refusal(server, input_ids=prefix[: 150 * PAGE], expected_gap_s=0.01)
    assert shared.estimate is not None
    assert shared.estimate.queued_tokens == shared.estimate.missing_tokens == 150 * PAGE
    server.probe.reset()
    outcome = server.ended(hidden.operation_id)
    assert (outcome.state, outcome.used_after_s) == (State.RESTORED, None)
    assert outcome.estimate == hidden.estimate
    answer = server.generate(prefix + [5])
    assert answer.sources == (0, 200 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids
    used = server.toolgap.status(outcome.operation_id)
    assert used.used_after_s is not None
    assert used.used_after_s > outcome.elapsed_s

    # Forced, it is restored although it is not worthwhile, and so measured anew.
    server.flush()
    assert refusal(server, input_ids=prefix, expected_gap_s=0.001).code is Code.NOT_WORTHWHILE
    for _ in range(5):
        forced = server.toolgap.submit(input_ids=prefix, expected_gap_s=0.001, force=True)
        assert server.ended(forced.operation_id).reason is Reason.COMPLETE
        server.flush()
    until("it is known to be fast", lambda: measured(server)[0] > 5 * PAGE / SLOW_S)


def test_the_continuation_of_a_declined_restore_recomputes_once(server: Server, prompt: Prompt) -> None:
    prefix, other = prompt(60 * PAGE), prompt(60 * PAGE)
    recomputed = server.store(prefix + [5])
    server.store(other + [5])
    slow_down(server, prompt)
    server.probe.reset()
    assert refusal(server, input_ids=prefix, expected_gap_s=0.001).code is Code.NOT_WORTHWHILE
    # What only shares a part of it is read as ever, and so is another prefix.
    assert server.generate(prefix[: 40 * PAGE] + [5]).storage_tokens == 40 * PAGE
    assert server.generate(other + [5]).storage_tokens == 60 * PAGE
    server.flush()
    server.probe.reset()
    answer = server.generate(prefix + [5])
    assert (answer.sources, answer.output_ids) == ((0, 0, 0), recomputed.output_ids)
    assert not server.probe.reads
    server.flush()
    assert server.generate(prefix + [5]).storage_tokens == 60 * PAGE


def test_a_declined_restore_that_goes_ahead_later_is_used(server: Server, prompt: Prompt) -> None:
    prefix = prompt(60 * PAGE)
    server.store(prefix + [5])
    slow_down(server, prompt)
    assert refusal(server, input_ids=prefix, expected_gap_s=0.001).code is Code.NOT_WORTHWHILE
    operation = server.toolgap.submit(input_ids=prefix, expected_gap_s=60)
    assert server.generate(prefix + [5]).host_tokens == 60 * PAGE
    assert server.ended(operation.operation_id).joined_requests == 1


def test_reads_of_ordinary_requests_are_measured_too(server: Server, prompt: Prompt) -> None:
    """A declined restore's continuation reads storage itself, and so tells how fast it is now."""
    prefixes = [prompt(40 * PAGE) for _ in range(5)]
    for prefix in prefixes:
        server.store(prefix + [5])
    slow_down(server, prompt)
    server.probe.reset()
    for prefix in prefixes:
        assert server.generate(prefix + [5]).storage_tokens == 40 * PAGE
    until("it is known to be fast", lambda: measured(server)[0] > 5 * PAGE / SLOW_S)


@pytest.mark.parametrize("over", ["used", "cancelled"])
def test_restored_kv_that_is_awaited_earlier_is_not_evicted(
    server: Server, prompt: Prompt, over: str
) -> None:
    """Host memory has 1,024 pages, of which operations may fill half at a time."""
    prefixes = [prompt(400 * PAGE) for _ in range(3)]
    for prefix in prefixes:
        server.store(prefix + [5])
    for prefix in prefixes[:2]:
        first = server.ended(server.toolgap.submit(input_ids=prefix, expected_gap_s=300).operation_id)
        assert first.state is State.RESTORED
    before = server.toolgap.overview().engine.host_free_tokens
    for force in (False, True):
        refused = refusal(server, input_ids=prefixes[2], expected_gap_s=400, force=force)
        assert refused.code is Code.AWAITED_KV
        assert refused.retry_after_s is not None
    assert server.toolgap.overview().engine.host_free_tokens == before
    if over == "used":
        assert server.generate(prefixes[1] + [5]).host_tokens == 400 * PAGE
    else:
        server.toolgap.cancel(first.operation_id)
    submitted = server.toolgap.submit(input_ids=prefixes[2], expected_gap_s=400)
    assert server.ended(submitted.operation_id).state is State.RESTORED


def test_metrics_tell_what_was_declined_and_how_good_estimates_were(server: Server, prompt: Prompt) -> None:
    def samples() -> dict[str, float]:
        return read_samples(server.http.get("/metrics", follow_redirects=True).text)

    prefix = prompt(100 * PAGE)
    server.store(prefix + [5])
    measured(server)
    before = samples()
    outcome = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    assert outcome.estimate is not None
    name = "sglang:hicache_restore_estimate_ratio_count"
    until("its estimate was judged", lambda: samples()[name] == before[name] + 1)
