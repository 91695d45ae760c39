"""Several ranks: tensor and pipeline parallelism take one decision, replicas keep to themselves.

SGLang's rank consensus checker is on: it ends a server whose ranks differ in what they call, with what
and what it returns. The probe tells every rank's own view besides, and the harness compares them.
"""

import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import PAGE, PATIENT, Prompt, Server, until

from toolgap.admission import Rates
from toolgap.client import ToolgapError
from toolgap.protocol import Code, Reason, State

pytestmark = pytest.mark.engine

ENVIRONMENT = {
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    **PATIENT,
    "TOOLGAP_ADMISSION": "decline",
    "TOOLGAP_MAX_OPERATIONS": "24",
    "TOOLGAP_REPLY_TIMEOUT_S": "15",
}
TOPOLOGIES = {
    "tp2": ("--tp-size", "2"),
    "pp2": ("--pp-size", "2"),
    "tp2-pp2": ("--tp-size", "2", "--pp-size", "2"),
    "dp2": ("--dp-size", "2"),
    "attn-dp2": ("--tp-size", "2", "--attn-dp-size", "2"),
}
SHARDED = pytest.mark.parametrize("ranks_server", ["tp2", "pp2"], indirect=True)
EVERY_SHAPE = pytest.mark.parametrize("ranks_server", ["tp2", "pp2", "tp2-pp2"], indirect=True)
REPLICATED = pytest.mark.parametrize("ranks_server", ["dp2"], indirect=True)
APART = pytest.mark.parametrize("ranks_server", ["dp2", "attn-dp2"], indirect=True)
"""Replicas and groups of data-parallel attention; the latter take each step together."""


@pytest.fixture(scope="module")
def ranks_server(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "attn-dp2":
        model = build_tiny_qwen3(model, folder / "model")
    with Server(
        model,
        folder,
        arguments=TOPOLOGIES[request.param],
        environment=ENVIRONMENT,
        ranks=4 if request.param == "tp2-pp2" else 2,
    ) as server:
        yield server


def build_tiny_qwen3(llama: Path, folder: Path) -> Path:
    """A model of the tiny one's shape, of an architecture that SGLang can run with data-parallel attention."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    shape = json.loads((llama / "config.json").read_text())
    shared = {name: shape[name] for name in Qwen3Config().to_dict() if name in shape}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shared | {"model_type": "qwen3", "architectures": None})).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def ranks(ranks_server: Server) -> Iterator[Server]:
    """The module's server with an empty cache; afterwards everything is back where it was, on every rank."""
    with ranks_server.left_as_found():
        yield ranks_server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def wait_until_joined(server: Server, operation_id: str) -> None:
    until("the continuation joined", lambda: server.toolgap.status(operation_id).joined_requests)


# ---- tensor and pipeline parallelism ----


@EVERY_SHAPE
def test_the_continuation_is_served_from_host_memory(ranks: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = ranks.store(prefix + [5])
    outcome = ranks.ended(ranks.toolgap.submit(input_ids=prefix).operation_id)
    assert (outcome.state, outcome.reason, outcome.dp_rank) == (State.RESTORED, Reason.COMPLETE, None)
    assert (outcome.found_tokens, outcome.read_tokens, outcome.inserted_tokens) == (40 * PAGE,) * 3
    ranks.states()
    answer = ranks.generate(prefix + [5])
    assert answer.sources == (0, 40 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids
    for rank in range(ranks.ranks):
        assert len(ranks.probe.reads_of(rank)) == 40
        assert set(ranks.probe.reads_of(rank).values()) == {1}


@SHARDED
def test_every_rank_declines_what_is_slow_on_one(ranks: Server, prompt: Prompt) -> None:
    """Only one rank measures, and what it tells the others is what all of them decide by."""
    prefix = prompt(40 * PAGE)
    for _ in range(4):  # the first batches take far longer than any other
        ranks.store(prompt(40 * PAGE))
    ranks.store(prefix + [5])
    for _ in range(5):
        ranks.probe.delay("get", 0.05, rank=1)
        ranks.ended(ranks.toolgap.submit(input_ids=prefix, force=True).operation_id)
        ranks.states()
        ranks.flush()

    def known() -> bool:
        tokens_per_s = ranks.toolgap.overview().engine.restore_tokens_per_s
        return tokens_per_s is not None and tokens_per_s < 2 * PAGE / 0.05

    until("all know that it is slow", known)
    assert ranks.states()[0]["agreed"]["rates"] != str(Rates())
    reply = ranks.call(action="submit", input_ids=prefix, expected_gap_s=0.001)
    assert reply.json().get("error", {}).get("code") == Code.NOT_WORTHWHILE, reply.text
    assert ranks.toolgap.overview().active == []
    accepted = ranks.toolgap.submit(input_ids=prefix)
    assert accepted.estimate is not None
    assert accepted.estimate.restore_s > 40 * 0.05 / 2
    assert ranks.ended(accepted.operation_id).state is State.RESTORED


@EVERY_SHAPE
@pytest.mark.parametrize("rank", [0, 1, None])
@pytest.mark.parametrize("call", ["exists", "get"])
def test_an_early_continuation_waits_for_the_slowest_rank(
    ranks: Server, prompt: Prompt, pool: ThreadPoolExecutor, call: str, rank: int | None
) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = ranks.store(prefix + [5])
    with ranks.probe.hold(call, rank) as wait_until_held:
        operation_id = ranks.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        continuation = pool.submit(ranks.generate, prefix + [5])
        wait_until_joined(ranks, operation_id)
        ranks.states()
    answer = continuation.result()
    assert answer.sources == (0, 40 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids
    outcome = ranks.ended(operation_id)
    assert (outcome.state, outcome.joined_requests) == (State.RESTORED, 1)
    for reader in range(ranks.ranks):
        assert len(ranks.probe.reads_of(reader)) == 40
        assert set(ranks.probe.reads_of(reader).values()) == {1}
    assert ranks.probe.calls["exists"] == ranks.ranks


@SHARDED
@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_rank_is_waited_for(ranks: Server, prompt: Prompt, rank: int) -> None:
    prefix = prompt(160 * PAGE)
    recomputed = ranks.store(prefix + [5])
    ranks.probe.delay("get", 0.005, rank)
    operation_id = ranks.toolgap.submit(input_ids=prefix).operation_id
    answer = ranks.generate(prefix + [5])
    assert answer.sources == (0, 160 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids
    assert ranks.ended(operation_id).state is State.RESTORED


@SHARDED
@pytest.mark.parametrize("rank", [0, 1])
def test_a_cancel_while_one_rank_reads(ranks: Server, prompt: Prompt, rank: int) -> None:
    prefix = prompt(300 * PAGE)
    recomputed = ranks.store(prefix + [5])
    with ranks.probe.hold("get", rank) as wait_until_held:
        operation_id = ranks.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        assert ranks.toolgap.cancel(operation_id).stopping
        ranks.states()
    outcome = ranks.ended(operation_id)
    assert (outcome.state, outcome.reason) == (State.CANCELLED, Reason.REQUESTED)
    assert outcome.inserted_tokens == outcome.read_tokens < 300 * PAGE
    answer = ranks.generate(prefix + [5])
    assert answer.host_tokens == outcome.inserted_tokens
    assert answer.output_ids == recomputed.output_ids


@SHARDED
@pytest.mark.parametrize("rank", [0, 1])
def test_a_cancel_while_one_rank_asks_storage(ranks: Server, prompt: Prompt, rank: int) -> None:
    prefix = prompt(40 * PAGE)
    ranks.store(prefix + [5])
    with ranks.probe.hold("exists", rank) as wait_until_held:
        operation_id = ranks.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        ranks.toolgap.cancel(operation_id)
        outcome = ranks.ended(operation_id)  # though the query has not returned
        ranks.states()
    assert (outcome.state, outcome.reason, outcome.read_tokens) == (State.CANCELLED, Reason.REQUESTED, 0)


@SHARDED
def test_one_ranks_clock_expires_an_operation_for_all(ranks: Server, prompt: Prompt) -> None:
    prefix = prompt(300 * PAGE)
    ranks.store(prefix + [5])
    with ranks.probe.hold("get", 1) as wait_until_held:
        operation_id = ranks.toolgap.submit(input_ids=prefix, ttl_s=0.2, force=True).operation_id
        wait_until_held()
        until("its TTL passed", lambda: ranks.toolgap.status(operation_id).stopping)
        ranks.states()
    outcome = ranks.ended(operation_id)
    assert (outcome.state, outcome.reason) == (State.EXPIRED, Reason.TTL)


@SHARDED
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_could_not_read_is_restored_on_none(ranks: Server, prompt: Prompt, rank: int) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = ranks.store(prefix + [5])
    ranks.probe.spoil("get", "miss", number=25, rank=rank)
    outcome = ranks.ended(ranks.toolgap.submit(input_ids=prefix).operation_id)
    assert (outcome.state, outcome.reason) == (State.PARTIAL, Reason.STORAGE_READ_FAILED)
    assert outcome.inserted_tokens == 25 * PAGE
    ranks.states()
    answer = ranks.generate(prefix + [5])
    assert answer.host_tokens == 25 * PAGE
    assert answer.output_ids == recomputed.output_ids


@SHARDED
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("call", "reason"),
    [("exists", Reason.STORAGE_QUERY_FAILED), ("get", Reason.STORAGE_READ_FAILED)],
)
def test_storage_fails_on_one_rank(
    ranks: Server, prompt: Prompt, call: str, reason: Reason, rank: int
) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = ranks.store(prefix + [5])
    ranks.probe.spoil(call, "fail", rank=rank)
    outcome = ranks.ended(ranks.toolgap.submit(input_ids=prefix).operation_id)
    assert (outcome.state, outcome.reason, outcome.inserted_tokens) == (State.FAILED, reason, 0)
    ranks.states()
    ranks.probe.reset()
    assert ranks.generate(prefix + [5]).output_ids == recomputed.output_ids


Call = tuple[str, str, Any]
BACKEND = "/hicache/storage-backend"


@EVERY_SHAPE
@pytest.mark.parametrize("rank", [0, 1, None])
@pytest.mark.parametrize(
    ("call", "undo", "reason"),
    [
        pytest.param(("POST", "/flush_cache", None), None, Reason.FLUSHED, id="flush"),
        pytest.param(("POST", "/flush_cache?timeout=60", None), None, Reason.FLUSHED, id="deferred-flush"),
        pytest.param(("POST", f"{BACKEND}/clear", None), None, Reason.STORAGE_REPLACED, id="clear"),
        pytest.param(
            ("POST", "/release_memory_occupation", {}),
            ("POST", "/resume_memory_occupation", {}),
            Reason.MEMORY_RELEASED,
            id="release-memory",
        ),
    ],
)
def test_a_change_in_a_restore(
    ranks: Server,
    prompt: Prompt,
    pool: ThreadPoolExecutor,
    call: Call,
    undo: Call | None,
    reason: Reason,
    rank: int | None,
) -> None:
    check_change(ranks, prompt, pool, call, undo, reason, rank)


@pytest.mark.parametrize("ranks_server", ["tp2"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1, None])
def test_storage_detached_in_a_restore(
    ranks: Server, prompt: Prompt, pool: ThreadPoolExecutor, rank: int | None
) -> None:
    """Not with pipeline stages: attaching again hangs SGLang itself there."""
    attach = ("PUT", BACKEND, {"hicache_storage_backend": "file"})
    check_change(ranks, prompt, pool, ("DELETE", BACKEND, None), attach, Reason.STORAGE_REPLACED, rank)


def check_change(
    ranks: Server,
    prompt: Prompt,
    pool: ThreadPoolExecutor,
    call: Call,
    undo: Call | None,
    reason: Reason,
    rank: int | None,
) -> None:
    prefix = prompt(300 * PAGE)
    recomputed = ranks.store(prefix + [5])
    with ranks.probe.hold("get", rank) as wait_until_held:
        operation_id = ranks.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        reply = pool.submit(send, ranks, call)
        if "timeout" in call[1]:  # a deferred flush lets the scheduler go on
            until("the change takes effect", lambda: ranks.toolgap.status(operation_id).stopping)
        else:
            until("the change takes effect", lambda: reply.done() or ranks.is_busy())
    if reply.result().status_code != 200:
        # Tensor ranks wait for the batch in flight. Pipeline stages cannot, and have it called again.
        assert "--pp-size" in ranks.arguments
        until("it is done at another call", lambda: send(ranks, call).status_code == 200)
    if undo is not None:
        assert send(ranks, undo).status_code == 200
    outcome = ranks.ended(operation_id)
    assert (outcome.state, outcome.reason) == (State.CANCELLED, reason)
    ranks.states()
    answer = ranks.generate(prefix + [5])
    assert answer.output_ids == recomputed.output_ids
    if reason is Reason.FLUSHED:
        assert answer.host_tokens == 0


def send(server: Server, call: Call) -> httpx.Response:
    method, path, body = call
    return server.http.request(method, path, json=body)


@SHARDED
@pytest.mark.parametrize("seed", range(2))
def test_many_submits_and_cancels_end_alike_on_every_rank(ranks: Server, prompt: Prompt, seed: int) -> None:
    generator = random.Random(seed)
    shared, tails = prompt(20 * PAGE), [prompt(20 * PAGE) for _ in range(4)]
    prefixes = [shared + tail for tail in tails] + [shared, tails[0]]
    for prefix in prefixes:
        ranks.generate(prefix + [5])
    ranks.flush()
    ranks.probe.reset()
    operation_ids = []
    for number in range(20):
        ranks.probe.delay("get", generator.choice([0.0001, 0.002]), rank=number % 2)
        with contextlib.suppress(ToolgapError):  # a parent on the device only, or over a limit: refused alike
            operation_ids.append(
                ranks.toolgap.submit(
                    input_ids=generator.choice(prefixes), ttl_s=generator.choice([0.05, 600]), force=True
                ).operation_id
            )
        if operation_ids and generator.random() < 0.5:
            ranks.toolgap.cancel(generator.choice(operation_ids))
        if number % 5 == 4:
            ranks.generate(generator.choice(prefixes) + [5], tokens=1)
            ranks.states()
    for operation_id in operation_ids:
        ranks.ended(operation_id)
    ranks.states()


@SHARDED
def test_a_server_of_several_ranks_has_one_replica(ranks: Server, prompt: Prompt) -> None:
    prefix = prompt(20 * PAGE)
    assert ranks.ended(ranks.toolgap.submit(input_ids=prefix, routed_dp_rank=0).operation_id).dp_rank is None
    with pytest.raises(ToolgapError, match="one replica") as refused:
        ranks.toolgap.submit(input_ids=prefix, routed_dp_rank=1)
    assert (refused.value.status_code, refused.value.error.field) == (400, "routed_dp_rank")
    overview = ranks.toolgap.overview()
    assert (overview.engine.dp_rank, overview.replicas) == (None, [])


@SHARDED
def test_ranks_agree_on_the_namespace_after_an_update_of_the_weights(ranks: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    old = ranks.toolgap.overview().engine.namespace
    reply = ranks.http.post("/update_weights_from_disk", json={"model_path": str(ranks.model)})
    assert reply.status_code == 200, reply.text
    new = ranks.toolgap.overview().engine.namespace
    assert new != old
    ranks.states()
    for namespace, code in ((old, Code.NAMESPACE_MISMATCH), (new, Code.STORAGE_STALE)):
        with pytest.raises(ToolgapError) as refused:
            ranks.toolgap.submit(input_ids=prefix, namespace=namespace)
        assert refused.value.error.code is code
    ranks.flush()
    assert ranks.http.post("/hicache/storage-backend/clear").status_code == 200
    recomputed = ranks.store(prefix + [5])
    outcome = ranks.ended(ranks.toolgap.submit(input_ids=prefix, namespace=new).operation_id)
    assert outcome.state is State.RESTORED
    answer = ranks.generate(prefix + [5])
    assert (answer.sources, answer.output_ids) == ((0, 40 * PAGE, 0), recomputed.output_ids)


@SHARDED
def test_a_request_that_several_ranks_served_names_a_prefix(ranks: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    answer = ranks.generate(prefix, tokens=2 * PAGE, rid="turn")
    assert ranks.toolgap.resolve(request_id="turn").token_ids == prefix + answer.output_ids
    ranks.flush()
    outcome = ranks.ended(ranks.toolgap.submit(request_id="turn").operation_id)
    assert (outcome.stable_tokens, outcome.expected_tokens) == (40 * PAGE, 2 * PAGE)
    assert outcome.inserted_tokens == 41 * PAGE
    ranks.generate([*prefix, *answer.output_ids[:20], 5])
    left = ranks.toolgap.status(outcome.operation_id)
    assert (left.used_tokens, left.first_divergent_token) == (41 * PAGE, 40 * PAGE + 20)
    ranks.states()


# ---- replicas ----


@APART
@pytest.mark.parametrize("replica", [0, 1])
def test_a_request_names_its_replica_unless_the_submit_does(
    ranks: Server, prompt: Prompt, replica: int
) -> None:
    prefix = prompt(40 * PAGE)
    ranks.generate(prefix, rid=f"of-{replica}", routed_dp_rank=replica)
    ranks.flush()
    there = ranks.ended(ranks.toolgap.submit(request_id=f"of-{replica}").operation_id)
    assert (there.dp_rank, there.inserted_tokens) == (replica, 40 * PAGE), there
    moved = ranks.toolgap.submit(request_id=f"of-{replica}", routed_dp_rank=1 - replica)
    elsewhere = ranks.ended(moved.operation_id)
    assert (elsewhere.dp_rank, elsewhere.inserted_tokens) == (1 - replica, 40 * PAGE)
    with pytest.raises(ToolgapError) as refused:
        ranks.toolgap.submit(request_id="of-nobody")
    assert refused.value.error.code is Code.UNKNOWN_REQUEST


@APART
@pytest.mark.parametrize("routed_dp_rank", [None, 2, 7])
def test_a_submit_names_its_replica(ranks: Server, prompt: Prompt, routed_dp_rank: int | None) -> None:
    with pytest.raises(ToolgapError, match=r"2 replicas.*same routed_dp_rank with /generate") as refused:
        ranks.toolgap.submit(input_ids=prompt(40 * PAGE), routed_dp_rank=routed_dp_rank)
    error = refused.value.error
    assert (refused.value.status_code, error.code, error.field) == (
        400,
        Code.INVALID_FIELD,
        "routed_dp_rank",
    )
    assert not ranks.toolgap.overview().active


@APART
@pytest.mark.parametrize("replica", [0, 1])
def test_a_restore_serves_its_own_replica_only(ranks: Server, prompt: Prompt, replica: int) -> None:
    prefix, other = prompt(40 * PAGE), 1 - replica
    recomputed = ranks.store(prefix + [5], routed_dp_rank=other)
    submitted = ranks.toolgap.submit(input_ids=prefix, routed_dp_rank=replica)
    outcome = ranks.ended(submitted.operation_id)
    assert (outcome.state, outcome.read_tokens) == (State.RESTORED, 40 * PAGE)
    assert submitted.dp_rank == outcome.dp_rank == replica
    assert (len(ranks.probe.reads_of(replica)), len(ranks.probe.reads_of(other))) == (40, 0)

    elsewhere = ranks.generate(prefix + [5], routed_dp_rank=other)
    assert elsewhere.host_tokens == 0
    assert elsewhere.output_ids == recomputed.output_ids
    assert ranks.toolgap.status(submitted.operation_id).used_tokens == 0

    answer = ranks.generate(prefix + [5], routed_dp_rank=replica)
    assert answer.sources == (0, 40 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids
    assert set(ranks.probe.reads_of(replica).values()) == {1}


@APART
def test_operations_of_all_replicas_are_found_by_id_and_listed(ranks: Server, prompt: Prompt) -> None:
    prefixes = [prompt(40 * PAGE) for _ in range(2)]
    for replica, prefix in enumerate(prefixes):
        ranks.generate(prefix + [5], routed_dp_rank=replica)
    ranks.flush()
    ranks.probe.reset()
    with ranks.probe.hold("get") as wait_until_held:
        operation_ids = [
            ranks.toolgap.submit(input_ids=prefix, routed_dp_rank=replica).operation_id
            for replica, prefix in enumerate(prefixes)
        ]
        wait_until_held()
        for replica, operation_id in enumerate(operation_ids):
            assert ranks.toolgap.status(operation_id).dp_rank == replica
            # A long poll that times out tells how far it is.
            assert not ranks.toolgap.status(operation_id, wait_s=0.05).state.terminal
        overview = ranks.toolgap.overview()
        assert [status.operation_id for status in overview.active] == operation_ids
        assert [engine.dp_rank for engine in overview.replicas] == [0, 1]
        assert overview.engine == overview.replicas[0]
        assert len({engine.namespace for engine in overview.replicas}) == 1
        cancelled = ranks.toolgap.cancel(operation_ids[1])
        assert (cancelled.dp_rank, cancelled.stopping) == (1, True)
    assert ranks.ended(operation_ids[0]).state is State.RESTORED
    assert ranks.ended(operation_ids[1]).dp_rank == 1
    recent = ranks.toolgap.overview().recent
    assert {status.operation_id for status in recent} >= set(operation_ids)
    assert recent == sorted(recent, key=lambda status: status.submitted_ts, reverse=True)
    for call in (ranks.toolgap.status, ranks.toolgap.cancel):
        with pytest.raises(ToolgapError) as refused:
            call("never-submitted")
        assert refused.value.status_code == 404


@APART
def test_an_id_on_two_replicas_is_two_operations(ranks: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    ranks.store(prefix + [5], routed_dp_rank=0)
    for replica in range(2):
        ranks.toolgap.submit(input_ids=prefix, operation_id="twice", routed_dp_rank=replica)
        until("restored", lambda: ranks.toolgap.status("twice").state is State.RESTORED)
        assert ranks.toolgap.status("twice").dp_rank == replica, "the newer one answers"
    with ranks.probe.hold("exists", 0) as wait_until_held:
        first = ranks.toolgap.submit(input_ids=prompt(40 * PAGE), operation_id="thrice", routed_dp_rank=0)
        wait_until_held()
        second = ranks.toolgap.submit(input_ids=prefix, operation_id="thrice", routed_dp_rank=1)
        assert (first.state, second.reason) == (State.QUERYING, Reason.ALREADY_RESIDENT)
        assert ranks.toolgap.status("thrice").dp_rank == 0, "the active one answers"
    assert ranks.ended("thrice").dp_rank is not None


@APART
@pytest.mark.parametrize("replica", [0, 1])
def test_an_early_continuation_waits_on_its_replica(
    ranks: Server, prompt: Prompt, pool: ThreadPoolExecutor, replica: int
) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = ranks.store(prefix + [5], routed_dp_rank=0)
    with ranks.probe.hold("get", replica) as wait_until_held:
        operation_id = ranks.toolgap.submit(input_ids=prefix, routed_dp_rank=replica).operation_id
        wait_until_held()
        continuation = pool.submit(ranks.generate, prefix + [5], routed_dp_rank=replica)
        wait_until_joined(ranks, operation_id)
        elsewhere = ranks.generate(prefix + [5], routed_dp_rank=1 - replica)
        assert (elsewhere.host_tokens, elsewhere.output_ids) == (0, recomputed.output_ids)
    answer = continuation.result()
    assert (answer.sources, answer.output_ids) == ((0, 40 * PAGE, 0), recomputed.output_ids)
    assert ranks.ended(operation_id).joined_requests == 1


@REPLICATED
def test_a_replica_that_does_not_answer_is_busy_and_its_late_reply_is_nobodys(
    ranks: Server, prompt: Prompt
) -> None:
    prefix = prompt(40 * PAGE)
    ranks.store(prefix + [5], routed_dp_rank=0)
    stopped = ranks.states()[1]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        for call in (
            lambda: ranks.toolgap.overview(),
            lambda: ranks.toolgap.status("never-submitted"),
            lambda: ranks.toolgap.submit(input_ids=prefix, routed_dp_rank=1),
        ):
            with pytest.raises(ToolgapError) as refused:
                call()
            error = refused.value.error
            assert (refused.value.status_code, error.code) == (503, Code.ENGINE_BUSY)
        # The other replica restores meanwhile; its outcome is asked for once both answer again.
        assert ranks.toolgap.submit(input_ids=prefix, operation_id="o", routed_dp_rank=0).dp_rank == 0
    finally:
        os.kill(stopped, signal.SIGCONT)
    until("both answer", lambda: len(ranks.engines()) == 2)
    assert ranks.ended("o").state is State.RESTORED
    with pytest.raises(ToolgapError) as refused:
        ranks.toolgap.status("never-submitted")
    assert refused.value.status_code == 404


@APART
def test_memory_is_released_once_every_replica_is_quiet(
    ranks: Server, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix = prompt(300 * PAGE)
    recomputed = ranks.store(prefix + [5], routed_dp_rank=0)
    with ranks.probe.hold("get", 1) as wait_until_held:
        operation_id = ranks.toolgap.submit(input_ids=prefix, routed_dp_rank=1).operation_id
        wait_until_held()
        reply = pool.submit(ranks.http.post, "/release_memory_occupation", json={})
        until("the release takes effect", ranks.is_busy)
    assert reply.result().status_code == 200, reply.result().text
    assert ranks.http.post("/resume_memory_occupation", json={}).status_code == 200
    outcome = ranks.ended(operation_id)
    assert (outcome.state, outcome.reason) == (State.CANCELLED, Reason.MEMORY_RELEASED)
    for replica in range(2):
        assert ranks.generate(prefix + [5], routed_dp_rank=replica).output_ids == recomputed.output_ids


METHOD = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.is_root"


def test_a_replica_without_hooks_keeps_the_route_shut(model: Path, tmp_path: Path) -> None:
    """An order to a scheduler that does not know it would end it, so every replica must have announced itself."""
    environment = {
        "TOOLGAP_PROBE_CHANGE_IN_SCHEDULER": METHOD,
        "TOOLGAP_PROBE_CHANGE_ONCE": str(tmp_path / "changed"),
    }
    with Server(
        model, tmp_path, arguments=TOPOLOGIES["dp2"], environment=environment, ranks=2, spawn=True
    ) as server:
        assert (tmp_path / "changed").exists()
        reply = server.call(action="submit", input_ids=[1, 2, 3], routed_dp_rank=0)
        assert (reply.status_code, reply.json()["error"]["code"]) == (501, Code.NOT_SUPPORTED)
        assert "did not announce" in reply.json()["error"]["message"]
        assert server.http.post("/flush_cache").status_code == 200
