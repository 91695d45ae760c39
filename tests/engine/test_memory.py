"""Where restored KV goes: promotion to the device, and leases in host memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PAGE, Prompt, Server, until

from toolgap.engineclient import read_samples
from toolgap.protocol import Code, OperationStatus, Reason, State, Target

pytestmark = pytest.mark.engine

HOST_PAGES = 1024
"""L2 of the servers here; L1 is half of it."""


@pytest.fixture(scope="module")
def memory_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {
        "TOOLGAP_LEASE_SHARE": "0.75",
        "TOOLGAP_MAX_LEASE_S": "600",
        "TOOLGAP_STALL_TIMEOUT_S": "600",
        "TOOLGAP_STOP_GRACE_S": "600",
        "TOOLGAP_DEFAULT_TTL_S": "600",
    }
    with Server(model, tmp_path_factory.mktemp("memory"), environment=environment) as server:
        yield server


@pytest.fixture
def server(memory_server: Server) -> Iterator[Server]:
    with memory_server.left_as_found():
        yield memory_server


def restore(server: Server, prefix: list[int], **fields: object) -> OperationStatus:
    return server.ended(server.toolgap.submit(input_ids=prefix, **fields).operation_id)  # type: ignore[arg-type]


def leased(server: Server) -> int:
    return server.toolgap.overview().engine.leased_tokens


# ---- promotion ----


def test_promoted_kv_is_on_the_device_when_the_continuation_comes(server: Server, prompt: Prompt) -> None:
    prefix = prompt(200 * PAGE)
    recomputed = server.store(prefix + [5])
    outcome = restore(server, prefix, target=Target.DEVICE)
    assert (outcome.state, outcome.reason) == (State.RESTORED, Reason.COMPLETE)
    assert outcome.inserted_tokens == outcome.promoted_tokens == 200 * PAGE
    answer = server.generate(prefix + [5])
    assert answer.sources == (200 * PAGE, 0, 0)
    assert answer.output_ids == recomputed.output_ids


def test_what_is_in_host_memory_already_is_promoted_without_a_read(server: Server, prompt: Prompt) -> None:
    prefix = prompt(100 * PAGE)
    recomputed = server.store(prefix + [5])
    restore(server, prefix)
    server.probe.reset()
    outcome = restore(server, prefix, target=Target.DEVICE)
    assert (outcome.reason, outcome.promoted_tokens) == (Reason.ALREADY_RESIDENT, 100 * PAGE)
    assert not server.probe.calls
    answer = server.generate(prefix + [5])
    assert answer.sources == (100 * PAGE, 0, 0)
    assert answer.output_ids == recomputed.output_ids
    assert restore(server, prefix, target=Target.DEVICE).promoted_tokens == 0


def test_a_part_is_promoted_too(server: Server, prompt: Prompt) -> None:
    prefix, rest = prompt(60 * PAGE), prompt(60 * PAGE)
    server.store(prefix + [5])
    outcome = restore(server, prefix + rest, target=Target.DEVICE)
    assert (outcome.state, outcome.reason) == (State.PARTIAL, Reason.STORAGE_SHORTFALL)
    assert outcome.promoted_tokens == 60 * PAGE
    assert server.generate(prefix + [5]).sources == (60 * PAGE, 0, 0)


def test_promotion_evicts_nothing(server: Server, prompt: Prompt) -> None:
    """The device is full of what other requests left there: it stays, and the prefix stays in host memory."""
    prefix = prompt(100 * PAGE)
    others = [prompt(150 * PAGE) for _ in range(3)]
    recomputed = server.store(prefix + [5])
    for other in others:
        server.generate(other, tokens=1)
    outcome = restore(server, prefix, target=Target.DEVICE)
    assert (outcome.state, outcome.reason) == (State.RESTORED, Reason.DEVICE_CAPACITY)
    assert outcome.promoted_tokens == 0
    for other in others:
        assert server.generate(other + [5], tokens=1).device_tokens == 150 * PAGE
    answer = server.generate(prefix + [5])
    assert answer.sources == (0, 100 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids


def test_metrics_tell_what_was_restored_promoted_and_used(server: Server, prompt: Prompt) -> None:
    prefix, unused = prompt(80 * PAGE), prompt(40 * PAGE)
    server.store(prefix + [5])
    server.store(unused + [5])

    def samples() -> dict[str, float]:
        return read_samples(server.http.get("/metrics", follow_redirects=True).text)

    before = samples()
    restore(server, prefix, target=Target.DEVICE)
    restore(server, unused)
    server.generate(prefix + [5])
    assert server.call(action="submit", input_ids=prefix, namespace="another").status_code == 409
    server.flush()  # nobody can use the other one any more

    def grown() -> dict[str, float]:
        return {name: value - before.get(name, 0.0) for name, value in samples().items()}

    name = "sglang:hicache_restore_{}_total".format
    until("what was not used is counted", lambda: grown().get(name("wasted_tokens")))
    after = grown()
    expected = {
        "accepted": 2,
        "refused": 1,
        "operations": 2,
        "read_tokens": 120 * PAGE,
        "inserted_tokens": 120 * PAGE,
        "promoted_tokens": 80 * PAGE,
        "used_tokens": 80 * PAGE,
        "wasted_tokens": 40 * PAGE,
    }
    assert {metric: after.get(name(metric), 0.0) for metric in expected} == expected
    assert after[name("saved_seconds")] > 0
    assert after["sglang:hicache_restore_duration_seconds_count"] == 2
    assert after["sglang:hicache_restore_bandwidth_bytes_per_second_count"] == 2


# ---- leases ----


def fill(server: Server, *prefixes: list[int]) -> None:
    for prefix in prefixes:
        restore(server, prefix)


@pytest.mark.parametrize("lease_s", [None, 500.0])
def test_a_lease_outlasts_what_would_evict_the_prefix(
    server: Server, prompt: Prompt, lease_s: float | None
) -> None:
    prefix = prompt(100 * PAGE)
    others = [prompt(400 * PAGE) for _ in range(4)]
    recomputed = server.store(prefix + [5])
    for other in others:
        server.store(other + [5])
    outcome = restore(server, prefix, lease_s=lease_s)
    assert outcome.leased_tokens == leased(server) == (100 * PAGE if lease_s else 0)
    fill(server, *others)
    server.probe.reset()
    answer = server.generate(prefix + [5])
    assert answer.output_ids == recomputed.output_ids
    if lease_s is None:
        assert answer.host_tokens == 0
    else:
        assert answer.sources == (0, 100 * PAGE, 0)
        status = server.toolgap.status(outcome.operation_id)
        assert (status.used_tokens, status.leased_tokens) == (100 * PAGE, 0)  # the use has ended it
    assert leased(server) == 0


def test_a_lease_ends_with_its_time(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    server.store(prefix + [5])
    restore(server, prefix, lease_s=0.3)
    until("the lease is over", lambda: leased(server) == 0)
    assert server.generate(prefix + [5]).sources == (0, 40 * PAGE, 0)


def test_a_lease_ends_when_the_operation_is_cancelled_afterwards(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    server.store(prefix + [5])
    outcome = restore(server, prefix, lease_s=500)
    status = server.toolgap.cancel(outcome.operation_id)
    assert (status.state, status.leased_tokens, leased(server)) == (State.RESTORED, 0, 0)


def test_another_requests_use_of_a_part_does_not_end_a_lease(server: Server, prompt: Prompt) -> None:
    prefix = prompt(80 * PAGE)
    server.store(prefix + [5])
    outcome = restore(server, prefix, lease_s=500)
    server.generate(prefix[: 40 * PAGE] + prompt(PAGE))
    assert server.toolgap.status(outcome.operation_id).used_tokens == 40 * PAGE
    assert leased(server) == 80 * PAGE
    server.toolgap.cancel(outcome.operation_id)


def test_a_flush_ends_leases(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    server.store(prefix + [5])
    outcome = restore(server, prefix, lease_s=500)
    server.flush()
    assert leased(server) == 0
    assert server.toolgap.status(outcome.operation_id).leased_tokens == 0
    assert server.generate(prefix + [5]).host_tokens == 0


def test_what_leases_hold_is_bounded(server: Server, prompt: Prompt) -> None:
    prefixes = [prompt(400 * PAGE), prompt(400 * PAGE)]
    for prefix in prefixes:
        server.store(prefix + [5])
    outcome = restore(server, prefixes[0], lease_s=500)
    reply = server.call(action="submit", input_ids=prefixes[1], lease_s=500)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, Code.LEASE_BUDGET)
    assert reply.json()["error"]["retry_after_s"] > 0
    assert restore(server, prefixes[1]).state is State.RESTORED
    server.toolgap.cancel(outcome.operation_id)


def test_leases_give_way_to_ordinary_requests(server: Server, prompt: Prompt) -> None:
    """L1 takes half of L2 for its copies, and leases three quarters: both do not fit."""
    held = [prompt(250 * PAGE) for _ in range(3)]
    ordinary = [prompt(160 * PAGE) for _ in range(3)]
    for prefix in held:
        server.store(prefix + [5])
    outcomes = [restore(server, prefix, lease_s=500) for prefix in held]
    assert leased(server) == 750 * PAGE
    for prefix in ordinary:
        server.generate(prefix, tokens=1)
    until("backups are done", lambda: server.state()["host_locks"] <= 3)
    left = [server.toolgap.status(outcome.operation_id).leased_tokens for outcome in outcomes]
    assert left[0] == 0
    assert left[-1] == 250 * PAGE
    # Every ordinary prompt got its copy in host memory, hence in storage.
    server.flush()
    for prefix in ordinary:
        assert server.generate(prefix + [5], tokens=1).storage_tokens == 160 * PAGE
