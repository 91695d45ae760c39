"""The restore: what lands, what the continuation then uses, and what the outcome says."""

from typing import Any

import pytest
from harness import PAGE, Prompt, Server

from toolgap.protocol import Reason, State

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("extra_tokens", [-1, 0, 1])
def test_the_continuation_is_served_from_host_memory(
    server: Server, prompt: Prompt, extra_tokens: int
) -> None:
    prefix = prompt(40 * PAGE + extra_tokens)
    aligned = len(prefix) // PAGE * PAGE
    continuation = prefix + prompt(3 * PAGE)
    recomputed = server.generate(continuation)
    assert recomputed.sources == (0, 0, 0)
    server.flush()
    server.probe.reset()

    submitted = server.toolgap.submit(input_ids=prefix)
    assert submitted.state is State.QUERYING
    assert (submitted.requested_tokens, submitted.aligned_tokens) == (len(prefix), aligned)
    outcome = server.ended(submitted.operation_id)
    assert (outcome.state, outcome.reason) == (State.RESTORED, Reason.COMPLETE)
    assert (outcome.found_tokens, outcome.read_tokens, outcome.inserted_tokens) == (aligned,) * 3
    assert (outcome.resident_tokens, outcome.dropped_tokens, outcome.joined_requests) == (0, 0, 0)
    assert set(server.probe.reads.values()) == {1}
    assert len(server.probe.reads) == aligned // PAGE

    restored = server.generate(continuation)
    assert restored.sources == (0, aligned, 0)
    assert restored.output_ids == recomputed.output_ids
    assert len(server.probe.reads) == aligned // PAGE, "the continuation read storage"


def test_without_a_restore_the_continuation_reads_storage(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = server.store(prefix + [5])
    assert server.generate(prefix + [5]).sources == (0, 0, 40 * PAGE)
    server.flush()
    assert server.generate(prefix + [5]).output_ids == recomputed.output_ids


def test_text_names_the_same_prefix_as_its_tokens(server: Server) -> None:
    text = "The tool returned, and its result was read aloud to the whole crew. " * 40
    reply = server.http.post("/generate", json={"text": text, "sampling_params": {"max_new_tokens": 1}})
    tokens = reply.json()["meta_info"]["prompt_tokens"]
    server.flush()
    submitted = server.toolgap.submit(text=text)
    assert submitted.requested_tokens == tokens
    outcome = server.ended(submitted.operation_id)
    assert (outcome.state, outcome.read_tokens) == (State.RESTORED, outcome.aligned_tokens)


def test_a_resident_prefix_ends_at_once(server: Server, prompt: Prompt) -> None:
    prefix = prompt(30 * PAGE)
    server.generate(prefix + [5])
    server.probe.reset()
    outcome = server.toolgap.submit(input_ids=prefix)
    assert (outcome.state, outcome.reason) == (State.RESTORED, Reason.ALREADY_RESIDENT)
    assert (outcome.resident_tokens, outcome.read_tokens) == (30 * PAGE, 0)
    assert not server.probe.calls


def test_only_what_is_missing_is_read(server: Server, prompt: Prompt) -> None:
    prefix = prompt(60 * PAGE)
    server.store(prefix + [5])
    server.generate(prefix[: 20 * PAGE] + [5])
    server.probe.reset()
    outcome = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    assert outcome.state is State.RESTORED
    assert (outcome.resident_tokens, outcome.read_tokens) == (20 * PAGE, 40 * PAGE)
    assert sum(server.probe.reads.values()) == 40


def test_status_lists_active_and_recent_operations_and_does_not_touch_the_tree(
    server: Server, prompt: Prompt
) -> None:
    prefix = prompt(20 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix, operation_id="watched").operation_id
        wait_until_held()
        overview = server.toolgap.overview()
        assert [(op.operation_id, op.state) for op in overview.active] == [("watched", State.RESTORING)]
        assert overview.engine.reads_in_flight == 1
        assert overview.engine.prefetch_occupied_tokens == 20 * PAGE
    server.ended(operation_id)
    overview = server.toolgap.overview()
    assert not overview.active
    assert overview.recent[0].operation_id == "watched"


def test_recent_outcomes_are_bounded(server: Server, prompt: Prompt) -> None:
    for _ in range(40):
        server.toolgap.submit(input_ids=prompt(PAGE))
    assert len(server.toolgap.overview().recent) == 32


def test_a_short_prefix_is_below_the_threshold(server: Server, prompt: Prompt) -> None:
    outcome = server.toolgap.submit(input_ids=prompt(255))
    assert (outcome.state, outcome.reason) == (State.MISS, Reason.BELOW_THRESHOLD)


def test_what_storage_lacks_is_a_miss(server: Server, prompt: Prompt) -> None:
    outcome = server.ended(server.toolgap.submit(input_ids=prompt(20 * PAGE)).operation_id)
    assert (outcome.state, outcome.reason) == (State.MISS, Reason.NOT_IN_STORAGE)
    assert (outcome.found_tokens, outcome.read_tokens) == (0, 0)


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_another_namespace_restores_nothing(server: Server, prompt: Prompt, field: str) -> None:
    prefix = prompt(20 * PAGE)
    mine: dict[str, Any] = {field: "mine"}
    server.store(prefix + [5], **mine)
    other = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    assert (other.state, other.read_tokens) == (State.MISS, 0)
    same = server.ended(server.call(action="submit", input_ids=prefix, **mine).json()["operation_id"])
    assert (same.state, same.read_tokens) == (State.RESTORED, 20 * PAGE)
    assert server.generate(prefix + [5], **mine).sources == (0, 20 * PAGE, 0)


def test_restored_pages_are_ordinary_host_memory(server: Server, prompt: Prompt) -> None:
    """Nothing pins them: other traffic evicts them, and the continuation falls back to storage."""
    prefix = prompt(40 * PAGE)
    recomputed = server.store(prefix + [5])
    server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    total = server.toolgap.overview().engine.host_total_tokens
    for _ in range(total // (200 * PAGE) + 2):
        server.generate(prompt(200 * PAGE), tokens=1)
    again = server.generate(prefix + [5])
    assert again.sources == (0, 0, 40 * PAGE)
    assert again.output_ids == recomputed.output_ids
