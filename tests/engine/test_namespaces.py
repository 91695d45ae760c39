"""Namespaces: what was restored is found by a request of the same adapter, key and salt, and by no other."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PAGE, Prompt, Server, until
from safetensors.numpy import save_file

from toolgap.protocol import Code, Reason, State

pytestmark = pytest.mark.engine

PAGES = 20


def build_tiny_adapter(folder: Path, model: Path, *, seed: int, rank: int = 4) -> Path:
    """Write a LoRA adapter for a tiny model, in peft's format, that changes K and V of every layer."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    wide, narrow = (
        config["head_dim"] * config[name] for name in ("num_attention_heads", "num_key_value_heads")
    )
    outputs = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
    random = np.random.default_rng(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for half, shape in (("lora_A", (rank, hidden)), ("lora_B", (size, rank))):
                weights[f"{prefix}.{half}.weight"] = random.standard_normal(shape, np.float32) * np.float32(
                    0.2
                )
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(model),
                "r": rank,
                "lora_alpha": 2 * rank,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": list(outputs),
            }
        )
    )
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: build_tiny_adapter(folder / name, model, seed=seed)
        for seed, name in enumerate(("dove", "wren", "lark"), 1)
    }


@pytest.fixture(scope="module")
def lora_server(
    model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments = (
        *("--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "4"),
        *("--lora-paths", *(f"{name}={adapters[name]}" for name in ("dove", "wren"))),
        # Requests wait for their own reads until the test lets these go, not for a second.
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    )
    with Server(model, tmp_path_factory.mktemp("lora"), arguments=arguments) as server:
        yield server


@pytest.fixture
def birds(lora_server: Server) -> Iterator[Server]:
    """A server with two LoRA adapters, its cache empty; afterwards everything is back where it was."""
    with lora_server.left_as_found():
        yield lora_server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def restore(server: Server, prefix: list[int], **fields: Any) -> tuple[State, Reason | None, int]:
    """State, reason and tokens read of a restore that has ended."""
    status = server.ended(server.toolgap.submit(input_ids=prefix, **fields).operation_id)
    return status.state, status.reason, status.read_tokens


RESTORED = (State.RESTORED, Reason.COMPLETE, PAGES * PAGE)
MISS = (State.MISS, Reason.NOT_IN_STORAGE, 0)


@pytest.mark.parametrize("key", [{}, {"extra_key": "tenant-"}], ids=["no-key", "key"])
def test_an_adapters_kv_is_restored_for_that_adapter_alone(
    birds: Server, prompt: Prompt, key: dict[str, Any]
) -> None:
    prefix = prompt(PAGES * PAGE)
    recomputed = birds.store(prefix + [5], lora_path="dove", **key)
    assert restore(birds, prefix, lora_path="wren", **key) == MISS
    assert restore(birds, prefix, **key) == MISS
    assert not birds.probe.reads
    assert restore(birds, prefix, lora_path="dove", **key) == RESTORED

    continuation = birds.generate(prefix + [5], lora_path="dove", **key)
    assert continuation.sources == (0, PAGES * PAGE, 0)
    assert continuation.output_ids == recomputed.output_ids
    others: list[dict[str, Any]] = [{"lora_path": "wren"}, {}]
    for other in others:
        answer = birds.generate(prefix + [5], **other, **key)
        assert answer.sources == (0, 0, 0)
        assert answer.output_ids != recomputed.output_ids, "the adapter changes nothing"


def test_kv_without_an_adapter_is_restored_for_requests_without_one(birds: Server, prompt: Prompt) -> None:
    prefix = prompt(PAGES * PAGE)
    birds.store(prefix + [5])
    assert restore(birds, prefix, lora_path="dove") == MISS
    assert restore(birds, prefix, lora_path="") == RESTORED
    assert birds.generate(prefix + [5]).sources == (0, PAGES * PAGE, 0)


def test_a_request_joins_an_operation_of_its_own_adapter_only(
    birds: Server, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix = prompt(PAGES * PAGE)
    birds.store(prefix + [5], lora_path="dove")
    birds.store(prefix + [5], lora_path="wren")
    with birds.probe.hold("get") as wait_until_held:
        operation_id = birds.toolgap.submit(input_ids=prefix, lora_path="dove").operation_id
        wait_until_held()
        same = pool.submit(birds.generate, prefix + [5], lora_path="dove")
        until("the request joined", lambda: birds.toolgap.overview().engine.waiting_joins == 1)
        other = pool.submit(birds.generate, prefix + [5], lora_path="wren")
        until("the other one reads", lambda: birds.toolgap.overview().engine.reads_in_flight == 2)
        assert birds.toolgap.overview().engine.waiting_joins == 1
    assert same.result().sources == (0, PAGES * PAGE, 0)
    assert other.result().sources == (0, 0, PAGES * PAGE)
    assert birds.ended(operation_id).joined_requests == 1
    assert len(birds.probe.reads) == 2 * PAGES
    assert set(birds.probe.reads.values()) == {1}


def test_an_unknown_adapter_is_refused_and_the_loaded_ones_are_named(birds: Server) -> None:
    reply = birds.call(action="submit", input_ids=[1, 2, 3], lora_path="lark")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["field"]) == (400, Code.INVALID_FIELD, "lora_path")
    assert all(name in error["message"] for name in ("'lark'", "'dove'", "'wren'"))


def test_a_restore_is_no_use_that_keeps_an_adapter_from_being_unloaded(
    birds: Server, adapters: dict[str, Path], prompt: Prompt
) -> None:
    """SGLang waits for the requests that use an adapter before it unloads it; it waits for no operation."""
    prefix = prompt(PAGES * PAGE)
    lark = {"lora_name": "lark", "lora_path": str(adapters["lark"])}
    assert birds.http.post("/load_lora_adapter", json=lark).json()["success"]
    birds.store(prefix + [5], lora_path="lark")
    with birds.probe.hold("get") as wait_until_held:
        operation_id = birds.toolgap.submit(input_ids=prefix, lora_path="lark").operation_id
        wait_until_held()
        assert birds.http.post("/unload_lora_adapter", json={"lora_name": "lark"}).json()["success"]
        assert birds.call(action="submit", input_ids=prefix, lora_path="lark").status_code == 400
    assert birds.ended(operation_id).state is State.RESTORED

    assert birds.http.post("/load_lora_adapter", json=lark).json()["success"]
    birds.flush()
    # Loaded anew it has another id in SGLang: what was stored of it is of no use to a request.
    assert restore(birds, prefix, lora_path="lark") == MISS
    assert birds.generate(prefix + [5], lora_path="lark").sources == (0, 0, 0)
    assert birds.http.post("/unload_lora_adapter", json={"lora_name": "lark"}).json()["success"]


def test_a_server_without_lora_refuses_an_adapter(server: Server) -> None:
    reply = server.call(action="submit", input_ids=[1, 2, 3], lora_path="dove")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["field"]) == (501, Code.NOT_SUPPORTED, "lora_path")
    assert "'dove'" in error["message"]
    assert "--enable-lora" in error["message"]


# ---- salts and extra keys ----

SALTED = pytest.mark.parametrize("field", ["extra_key", "cache_salt"])


@SALTED
def test_operations_of_two_namespaces_do_not_follow_each_other(
    birds: Server, prompt: Prompt, field: str
) -> None:
    prefix = prompt(PAGES * PAGE)
    mine: dict[str, Any] = {field: "mine"}
    theirs: dict[str, Any] = {field: "theirs"}
    birds.store(prefix + [5], **mine)
    with birds.probe.hold("get") as wait_until_held:
        first = birds.toolgap.submit(input_ids=prefix, **mine)
        wait_until_held()
        other = birds.toolgap.submit(input_ids=prefix, **theirs)
        same = birds.toolgap.submit(input_ids=prefix, **mine)
        assert (other.following, same.following) == (False, True)
    outcome = birds.ended(other.operation_id)
    assert (outcome.state, outcome.reason) == (State.MISS, Reason.NOT_IN_STORAGE)
    for operation in (first, same):
        assert birds.ended(operation.operation_id).state is State.RESTORED
    assert sum(birds.probe.reads.values()) == PAGES


@SALTED
def test_a_request_of_another_namespace_neither_joins_nor_is_followed(
    birds: Server, prompt: Prompt, pool: ThreadPoolExecutor, field: str
) -> None:
    prefix = prompt(PAGES * PAGE)
    mine: dict[str, Any] = {field: "mine"}
    theirs: dict[str, Any] = {field: "theirs"}
    recomputed = birds.store(prefix + [5], **theirs)
    birds.store(prefix + [5], **mine)
    with birds.probe.hold("get") as wait_until_held:
        before = birds.toolgap.submit(input_ids=prefix, **mine)
        wait_until_held()
        request = pool.submit(birds.generate, prefix + [5], **theirs)
        until("the request reads", lambda: birds.toolgap.overview().engine.reads_in_flight == 2)
        after = birds.toolgap.submit(input_ids=prefix, **theirs)
        assert after.following
        assert birds.toolgap.overview().engine.waiting_joins == 0
    assert request.result().sources == (0, 0, PAGES * PAGE)
    assert request.result().output_ids == recomputed.output_ids
    assert birds.ended(before.operation_id).joined_requests == 0
    assert birds.ended(after.operation_id).state is State.RESTORED
    assert len(birds.probe.reads) == 2 * PAGES
    assert set(birds.probe.reads.values()) == {1}


def test_an_empty_salt_is_none(birds: Server, prompt: Prompt) -> None:
    prefix = prompt(PAGES * PAGE)
    birds.store(prefix + [5])
    assert restore(birds, prefix, cache_salt="") == RESTORED
    assert birds.generate(prefix + [5]).sources == (0, PAGES * PAGE, 0)


# ---- the server's own ----


def test_a_replys_namespace_can_be_sent_back_and_another_one_is_refused(
    birds: Server, prompt: Prompt
) -> None:
    prefix = prompt(PAGES * PAGE)
    birds.store(prefix + [5])
    namespace = birds.toolgap.submit(input_ids=prompt(PAGE)).namespace
    assert namespace == birds.toolgap.overview().engine.namespace
    for other in (namespace[::-1] + "0", ""):
        reply = birds.call(action="submit", input_ids=prefix, namespace=other)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["field"]) == (
            409,
            Code.NAMESPACE_MISMATCH,
            "namespace",
        )
        assert namespace in error["message"]
    assert restore(birds, prefix, namespace=namespace) == RESTORED
