"""What Toolgap does at each place in SGLang that it hooks, in the scheduler's process.

Every hook passes through to SGLang while no operation is active, and none lets an exception of
Toolgap's reach SGLang's loop.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang.utils import TypeBasedDispatcher

from toolgap import protocol
from toolgap.protocol import Reason
from toolgap.rates import Meter
from toolgap.settings import Settings
from toolgap.sglang import orders, quiescing
from toolgap.sglang.decisions import decide
from toolgap.sglang.internals.engine import Engine, metrics_of
from toolgap.sglang.internals.requests import Prefix, asked_by, prefill_batch, prompt_of, recorded, span_of
from toolgap.sglang.messages import (
    HicachePrefetchReqInput,
    HicachePrefetchReqOutput,
)
from toolgap.sglang.restorer import Restorer
from toolgap.sglang.storage_calls import StorageCalls
from toolgap.store.stopping import stops_when

logger = logging.getLogger(__name__)

_MARKER = "toolgap"
"""The handshake's key in what a scheduler tells the HTTP process when it is ready."""

_restorer: Restorer | None = None
_calls = StorageCalls()
_meter = Meter()
_settings = Settings()
_unready: Callable[[], list[str]] = list


def configure(settings: Settings, unready: Callable[[], list[str]]) -> None:
    """Set what hooks of this process use.

    Args:
        settings: The plugin's settings.
        unready: Names the hooks that are not in, once SGLang has applied them all.
    """
    global _settings, _unready
    _settings, _unready = settings, unready


def _fault(restorer: Restorer, where: str) -> None:
    logger.exception("toolgap: a fault in %s; every operation ends", where)
    restorer.drop_all()


# ---- life of the scheduler ----


def init_request_dispatcher(_result: Any, scheduler: Any) -> None:
    """After `Scheduler.init_request_dispatcher`: take orders from the HTTP process."""
    global _restorer
    if _unready():
        return
    engine = Engine(scheduler)
    engine.agree_on_start()
    _restorer = Restorer(engine, _settings, _calls, metrics_of(scheduler), _meter)
    scheduler._request_dispatcher += TypeBasedDispatcher([(HicachePrefetchReqInput, take_order)])


def take_order(message: HicachePrefetchReqInput) -> HicachePrefetchReqOutput | None:
    """An order of the HTTP process, or of the rank whose clock decides."""
    assert _restorer is not None
    return orders.carry_out(_restorer, message)


def get_init_info(info: dict[str, Any], _scheduler: Any) -> dict[str, Any]:
    """After `Scheduler.get_init_info`: the handshake that opens the route."""
    missing = _unready()
    if _restorer is None and not missing:
        missing = ["the scheduler's request dispatcher"]
    return info | {_MARKER: {"protocol": protocol.VERSION, "missing": missing}}


def get_replicas_init_info(info: dict[str, Any], controller: Any) -> dict[str, Any] | None:
    """After `DataParallelController.get_init_info`: pass the handshake on if every rank of every replica gave it."""
    markers = [ranks_info.get(_MARKER) for ranks_info in controller._scheduler_init_infos]
    if missing_hooks := _unready():
        return info | {_MARKER: {"protocol": protocol.VERSION, "missing": missing_hooks}}
    if not markers or None in markers:
        return None
    versions = {marker["protocol"] for marker in markers}
    return info | {
        _MARKER: {
            "protocol": versions.pop() if len(versions) == 1 else None,
            "missing": sorted({name for marker in markers for name in marker["missing"]}),
        }
    }


def poll_timeout_aborts(messages: list[Any], _scheduler: Any) -> list[Any] | None:
    """After `Scheduler._poll_timeout_aborts`: let one rank's clock decide for all ranks."""
    restorer = _restorer
    if restorer is None or (restorer.idle and not _meter.changed):
        return None
    try:
        decision = decide(restorer)
    except Exception:  # noqa: BLE001 - an exception here would end the scheduler
        _fault(restorer, "decide")
        return None
    return None if decision is None else [*messages, decision]


# ---- the cache ----


def check_hicache_events(_result: Any, cache: Any) -> None:
    """After `UnifiedRadixCache.check_hicache_events`: follow reads, end operations, let requests go on."""
    restorer = _restorer
    if restorer is None or restorer.idle or restorer.engine.cache is not cache:
        return
    try:
        restorer.poll()
    except Exception:  # noqa: BLE001 - an exception here would end the scheduler
        _fault(restorer, "poll")


def prefetch_from_storage(
    original: Callable[..., Any],
    cache: Any,
    request: Any,
    last_host_node_id: Any,
    new_input_tokens: Any,
    last_hash: str | None = None,
    prefix_keys: list[str] | None = None,
    matched_prefix_tokens: Any = None,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    storage_hit_end: int | None = None,
) -> Any:
    """Around `UnifiedRadixCache.prefetch_from_storage`: a request waits for an operation that reads its pages.

    It does so in SGLang's queue until :func:`check_prefetch_progress` lets it go. If a restore of its pages was
    declined, it recomputes them.
    """
    restorer = _restorer
    if (
        restorer is not None
        and (restorer.work or restorer.declined)
        and restorer.engine.cache is cache
        and not request.rid.startswith("toolgap-")
    ):
        try:
            matched = matched_prefix_tokens if matched_prefix_tokens is not None else new_input_tokens[:0]
            prefix = Prefix(matched + new_input_tokens, extra_key, cache_salt)
            if restorer.declined.begins(prefix) or restorer.joins.begin(request, prefix, len(matched)):
                return None
        except Exception:  # noqa: BLE001 - an exception here would end the scheduler
            _fault(restorer, "join")
    return original(
        cache,
        request,
        last_host_node_id,
        new_input_tokens,
        last_hash,
        prefix_keys,
        matched_prefix_tokens=matched_prefix_tokens,
        extra_key=extra_key,
        cache_salt=cache_salt,
        storage_hit_end=storage_hit_end,
    )


def check_prefetch_progress(original: Callable[..., bool], cache: Any, request: Any) -> bool:
    """Around `UnifiedRadixCache.check_prefetch_progress`: a joined request is not ready yet."""
    restorer = _restorer
    if restorer is not None and restorer.work and restorer.joins.holds(request):
        return False
    return original(cache, request)


def release_aborted_request(_result: Any, _cache: Any, request: Any) -> None:
    """After `UnifiedRadixCache.release_aborted_request`: it waits for nothing any more."""
    restorer = _restorer
    if restorer is None or not restorer.work:
        return
    try:
        restorer.joins.forget(request)
    except Exception:  # noqa: BLE001 - an exception here would end the scheduler
        _fault(restorer, "abort")


def reset_full(_result: Any, cache: Any) -> None:
    """After `UnifiedRadixCache._reset_full`: nothing is left of any read. Also runs before there is a restorer."""
    restorer = _restorer
    if restorer is not None and restorer.engine.cache is cache:
        try:
            restorer.was_reset()
        except Exception:  # noqa: BLE001 - an exception here would end the scheduler
            _fault(restorer, "reset")


def prefetch_rate_limited(original: Callable[..., bool], controller: Any) -> bool:
    """Around `HiCacheController.prefetch_rate_limited`: operations do not use up ordinary requests' limit."""
    restorer = _restorer
    if restorer is None or not restorer.engine.own_tokens:
        return original(controller)
    return restorer.engine.rate_limited(controller, original)


def allocate_storage_hit(
    original: Callable[..., Any], controller: Any, operation: Any, hit_tokens: int, **how: Any
) -> Any:
    """Around `HybridCacheController.allocate_storage_hit`: what an operation must not evict is held meanwhile."""
    restorer = _restorer
    if restorer is None or not restorer.work or not operation.handle.rid.startswith("toolgap-"):
        return original(controller, operation, hit_tokens, **how)
    try:
        with restorer.host.guard(hit_tokens):
            return original(controller, operation, hit_tokens, **how)
    except Exception:  # noqa: BLE001 - an exception here would end the scheduler
        _fault(restorer, "allocation")
        return None, 0


def evict_host(
    original: Callable[..., int], cache: Any, num_tokens: int, *component: Any, **named: Any
) -> int:
    """Around `UnifiedRadixCache.evict_host`: leases give way before an ordinary request lacks room."""
    evicted = original(cache, num_tokens, *component, **named)
    restorer = _restorer
    if (
        restorer is not None
        and restorer.leases
        and not restorer.host.guarding
        and restorer.engine.cache is cache
    ):
        try:
            # Some callers ask for what they lack and others for all that they need, so that what is free says nothing.
            while evicted < num_tokens and restorer.leases.give_way():
                evicted += original(cache, num_tokens - evicted, *component, **named)
        except Exception:  # noqa: BLE001 - an exception here would end the scheduler
            _fault(restorer, "eviction")
    return evicted


def checkpoint(_result: Any, cache: Any, req: Any, *, up_to: int, **_named: Any) -> None:
    """After `UnifiedRadixCache.checkpoint`: a request was prefilled, in part or in whole, or has finished."""
    restorer = _restorer
    if restorer is None or restorer.engine.cache is not cache:
        return
    try:
        if restorer.record.max_tokens and req.finished():
            restorer.record.add(req.rid, recorded(req))
        # One that ends with its first token is seen when it has finished, and not before.
        if restorer.continuations:
            restorer.continuations.seen(asked_by(req))
        if restorer.declined:
            restorer.declined.settle(asked_by(req))
        if restorer.usage or restorer.leases:
            restorer.checkpointed(prompt_of(req), req.cached_tokens)
    except Exception:  # noqa: BLE001 - an exception here would end the scheduler
        _fault(restorer, "checkpoint")


def ready_to_load(original: Callable[..., int], cache: Any) -> int:
    """Around `UnifiedRadixCache.ready_to_load_host_cache`: a batch waits for the layers of a promotion under way.

    What SGLang loads for the batch itself comes behind it in the same stream, and is waited for anyhow.
    """
    index = original(cache)
    restorer = _restorer
    if index >= 0 or restorer is None or restorer.engine.cache is not cache:
        return index
    pending = restorer.promotions.index_to_wait_for()
    return index if pending is None else pending


def ask_storage(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """Around `HybridCacheController._storage_hit_query`, in its thread: know that it is running, and how long."""
    began_s = time.monotonic()
    result = _calls.around(original, controller, operation)
    _meter.storage_asked(time.monotonic() - began_s)
    return result


def read_storage(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """Around `HybridCacheController._page_transfer`, in its thread: know that it is running, and how fast."""
    began_s = time.monotonic()
    # Toolgap's store stops at the next I/O; other backends do not ask.
    with stops_when(operation.is_terminated):
        result = _calls.around(original, controller, operation)
    _meter.storage_read(*span_of(controller, operation), began_s, time.monotonic())
    return result


def prefilled(_result: Any, _owner: Any, batch: Any, _batch_result: Any) -> None:
    """After a prefill batch's result was processed: measure how fast prompts are computed."""
    restorer = _restorer
    if restorer is None:
        return
    try:
        if (computed := prefill_batch(batch)) is None:
            _meter.not_measured(time.perf_counter())
        else:
            _meter.prefilled(*computed, time.perf_counter())
    except Exception:  # noqa: BLE001 - an exception here would end the scheduler
        _fault(restorer, "the measurement of a prefill")


# ---- changes of the engine ----


def flush_cache(original: Callable[..., bool], scheduler: Any, empty_cache: bool = True) -> bool:  # noqa: FBT001 - SGLang's signature
    """Around `Scheduler.flush_cache`: end operations that would make it refuse; refuse under a hung read."""
    restorer = _restorer
    if (
        restorer is not None
        and quiescing.operations_alone_hinder_a_flush(restorer)
        and not _quiesce(Reason.FLUSHED)
    ):
        logger.warning("toolgap: flush refused: a storage call has not returned")
        return False
    return original(scheduler, empty_cache)


def update_weights(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """Around the weight updates: end operations, and never call KV of the old weights restored."""
    _quiesce(Reason.WEIGHTS_UPDATED)
    if _restorer is not None:
        _restorer.weights_changed()
    return original(updater, recv_req)


def release_memory(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """Around `release_memory_occupation`, which ends the scheduler unless it is idle."""
    _quiesce(Reason.MEMORY_RELEASED)
    return original(updater, recv_req)


def change_storage(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around attaching and detaching storage: end operations of the old backend."""
    _quiesce(Reason.STORAGE_REPLACED)
    output = original(scheduler, recv_req)
    if _restorer is not None and output.success:
        _restorer.storage_changed(cleared=False)
    return output


def clear_storage(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around clearing storage: end operations that read what is about to go."""
    _quiesce(Reason.STORAGE_REPLACED)
    return original(scheduler, recv_req)


def storage_cleared(cleared: bool, _cache: Any) -> None:  # noqa: FBT001 - SGLang's result
    """After `UnifiedRadixCache.clear_storage_backend`, the only one that tells whether it was cleared."""
    if _restorer is not None and cleared:
        _restorer.storage_changed(cleared=True)


def weight_version_changed(_result: Any, _scheduler: Any, new_version: str | None) -> None:
    """After the operator named the weights anew: the namespace has another fingerprint."""
    if _restorer is not None:
        _restorer.validity.namespace_changed()


def _quiesce(reason: Reason) -> bool:
    """End every operation; whether all ranks are quiet then. Every rank gets here at the same step."""
    restorer = _restorer
    if restorer is None:
        return True
    if not quiescing.is_busy(restorer):
        return True
    try:
        quiescing.quiesce(restorer, reason)
    except Exception:  # noqa: BLE001 - an exception here would end the scheduler
        _fault(restorer, "quiesce")
    return not quiescing.is_busy(restorer)
