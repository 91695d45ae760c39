"""The only file that names SGLang's volatile internals, with the signatures it expects.

:func:`check` compares them with the installed release before anything is hooked. :class:`Engine` is
what the rest of ``toolgap.sglang`` sees of a scheduler and its cache. Everything here runs in the
scheduler's thread unless it says otherwise.
"""

import asyncio
import copy
import hashlib
import importlib
import inspect
import json
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

from toolgap.protocol import Api, Reason, State
from toolgap.sglang.metrics import Metrics
from toolgap.sglang.record import Recorded
from toolgap.sglang.storage_calls import StorageCalls

SUPPORTED = ("0.5.23",)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_BASE_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_LORA_REGISTRY = "sglang.srt.lora.lora_registry.LoRARegistry"
_RETRIES = "sglang.srt.mem_cache.storage_prefetch.StoragePrefetchRetries"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_REPLICAS = "sglang.srt.managers.data_parallel_controller.DataParallelController"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_ANTHROPIC = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"

INIT_COMMUNICATORS = f"{_TOKENIZER}.init_communicators"
TOKENIZER_ATTACH = f"{_TOKENIZER}.attach_hicache_storage"
TOKENIZER_DETACH = f"{_TOKENIZER}.detach_hicache_storage"
TOKENIZER_CLEAR = f"{_TOKENIZER}.clear_hicache_storage"
TOKENIZER_RELEASE_MEMORY = f"{_TOKENIZER}.release_memory_occupation"
INIT_DISPATCHER = f"{_SCHEDULER}.init_request_dispatcher"
GET_INIT_INFO = f"{_SCHEDULER}.get_init_info"
REPLICAS_INIT_INFO = f"{_REPLICAS}.get_init_info"
POLL_TIMEOUTS = f"{_SCHEDULER}._poll_timeout_aborts"
FLUSH_CACHE = f"{_SCHEDULER}.flush_cache"
SCHEDULER_ATTACH = f"{_SCHEDULER}.attach_hicache_storage_wrapped"
SCHEDULER_DETACH = f"{_SCHEDULER}.detach_hicache_storage_wrapped"
SCHEDULER_CLEAR = f"{_SCHEDULER}.clear_hicache_storage_wrapped"
WEIGHT_VERSION = f"{_SCHEDULER}.record_weight_version_change"
CACHE_CLEAR = f"{_CACHE}.clear_storage_backend"
UPDATE_WEIGHTS = tuple(
    f"{_WEIGHTS}.{name}"
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "end_weight_update",
    )
)
BEGIN_WEIGHT_UPDATE = f"{_WEIGHTS}.begin_weight_update"
RELEASE_MEMORY = f"{_WEIGHTS}.release_memory_occupation"
CHECK_EVENTS = f"{_CACHE}.check_hicache_events"
PREFETCH = f"{_CACHE}.prefetch_from_storage"
CHECK_PROGRESS = f"{_CACHE}.check_prefetch_progress"
RELEASE_ABORTED = f"{_CACHE}.release_aborted_request"
RESET = f"{_CACHE}._reset_full"
ALLOCATE = f"{_CONTROLLER}.allocate_storage_hit"
EVICT_HOST = f"{_CACHE}.evict_host"
CHECKPOINT = f"{_CACHE}.checkpoint"
READY_TO_LOAD = f"{_CACHE}.ready_to_load_host_cache"
RATE_LIMITED = f"{_BASE_CONTROLLER}.prefetch_rate_limited"
QUERY_STORAGE = f"{_CONTROLLER}._storage_hit_query"
READ_STORAGE = f"{_CONTROLLER}._page_transfer"
PREFILLED = f"{_RESULTS}.process_batch_result_prefill"
PREFILLED_FOR_DECODE = f"{_SCHEDULER}.process_batch_result_disagg_prefill"

_HTTP_SIGNATURES: dict[str, tuple[str, ...]] = {
    INIT_COMMUNICATORS: ("self",),
    TOKENIZER_ATTACH: (
        "self",
        "hicache_storage_backend",
        "hicache_storage_backend_extra_config_json",
        "hicache_storage_prefetch_policy",
        "hicache_write_policy",
    ),
    TOKENIZER_DETACH: ("self",),
    TOKENIZER_CLEAR: ("self",),
    TOKENIZER_RELEASE_MEMORY: ("self", "obj", "request"),
    REPLICAS_INIT_INFO: ("self",),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler": (
        "self",
        "obj",
    ),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop": ("self",),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_texts": (
        "self",
        "texts",
        "is_cross_encoder",
    ),
    f"{_LORA_REGISTRY}.get_all_adapters": ("self",),
    f"{_CHAT}._validate_request": ("self", "request"),
    f"{_CHAT}._convert_to_internal_request": ("self", "request", "raw_request"),
    f"{_ANTHROPIC}._convert_to_chat_completion_request": ("self", "anthropic_request"),
    "sglang.srt.entrypoints.http_server.get_global_state": (),
    "sglang.srt.utils.auth.auth_level": ("level",),
    "sglang.srt.utils.auth.decide_request_auth": (
        "method",
        "path",
        "authorization_header",
        "api_key",
        "admin_api_key",
        "auth_level",
    ),
}

_SCHEDULER_SIGNATURES: dict[str, tuple[str, ...]] = {
    INIT_DISPATCHER: ("self",),
    GET_INIT_INFO: ("self",),
    POLL_TIMEOUTS: ("self",),
    FLUSH_CACHE: ("self", "empty_cache"),
    SCHEDULER_ATTACH: ("self", "recv_req"),
    SCHEDULER_DETACH: ("self", "recv_req"),
    SCHEDULER_CLEAR: ("self", "recv_req"),
    WEIGHT_VERSION: ("self", "new_version"),
    CACHE_CLEAR: ("self",),
    f"{_SCHEDULER}._prefetch_kvcache": ("self", "req", "storage_hit_end"),
    f"{_SCHEDULER}.is_fully_idle": ("self", "for_health_check", "ignore_waiting"),
    f"{_SCHEDULER}.send_control_output": ("self", "output", "recv_req"),
    **dict.fromkeys(UPDATE_WEIGHTS, ("self", "recv_req")),
    BEGIN_WEIGHT_UPDATE: ("self", "recv_req"),
    RELEASE_MEMORY: ("self", "recv_req"),
    CHECK_EVENTS: ("self",),
    PREFETCH: (
        "self",
        "request",
        "last_host_node_id",
        "new_input_tokens",
        "last_hash",
        "prefix_keys",
        "matched_prefix_tokens",
        "extra_key",
        "cache_salt",
        "storage_hit_end",
    ),
    CHECK_PROGRESS: ("self", "request"),
    RELEASE_ABORTED: ("self", "request"),
    RESET: ("self",),
    f"{_CACHE}._all_reduce": ("self", "data", "tp_reduce_op"),
    f"{_CACHE}.match_prefix": ("self", "params"),
    f"{_CACHE}.touch_prefix": ("self", "key"),
    f"{_CACHE}.inc_host_lock_ref": ("self", "node_id"),
    f"{_CACHE}.dec_host_lock_ref": ("self", "node_id", "params"),
    f"{_CACHE}.load_back": ("self", "node_id", "mem_quota", "req"),
    ALLOCATE: ("self", "operation", "hit_tokens", "allow_partial", "min_tokens", "evict_host"),
    EVICT_HOST: ("self", "num_tokens", "component_type"),
    CHECKPOINT: ("self", "req", "up_to", "kwargs"),
    READY_TO_LOAD: ("self",),
    f"{_CACHE}.finish": ("self", "handle", "outcome"),
    f"{_CACHE}.is_backuped": ("self", "node_id"),
    f"{_CACHE}.is_root": ("self", "node_id"),
    f"{_CACHE}.get_last_hash_value": ("self", "node_id"),
    f"{_CACHE}.get_prefix_hash_values": ("self", "node_id"),
    RATE_LIMITED: ("self",),
    QUERY_STORAGE: ("self", "operation"),
    READ_STORAGE: ("self", "operation"),
    PREFILLED: ("self", "batch", "result"),
    PREFILLED_FOR_DECODE: ("self", "batch", "result"),
    f"{_BASE_CONTROLLER}.terminate_prefetch": ("self", "operation"),
    f"{_RETRIES}.cancel": ("self", "req_id"),
}

_READ_ATTRIBUTES = (
    "storage_hit_count",
    "completed_tokens",
    "host_indices",
    "query_pool_hit_pages",
    "pool_storage_result",
    "pool_transfers",
)


def touched() -> tuple[str, ...]:
    """Dotted names of everything in SGLang that is hooked or called."""
    # The cache inherits `finish`: the class that has it stands beside the one that is asked for it.
    inherited = "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache"
    return (*(_HTTP_SIGNATURES | _SCHEDULER_SIGNATURES), inherited)


def check(*, http: bool = True) -> list[str]:
    """What of the installed SGLang differs from what Toolgap expects; empty if nothing does.

    Args:
        http: Whether to check what only the HTTP process needs; a scheduler is spared its import.
    """
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ["sglang is not installed: pip install 'toolgap[sglang]'"]
    if version not in SUPPORTED:
        return [f"sglang {version} is installed; this release of toolgap supports {', '.join(SUPPORTED)}"]
    problems = []
    signatures = _SCHEDULER_SIGNATURES | (_HTTP_SIGNATURES if http else {})
    for target, expected in signatures.items():
        try:
            found = tuple(inspect.signature(_resolve(target)).parameters)
        except (ImportError, AttributeError, ValueError, TypeError, OSError) as error:
            problems.append(f"{target}: {error}")
            continue
        if found != expected:
            problems.append(f"{target}: takes {', '.join(found)}, not {', '.join(expected)}")
    if not problems:
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

        operation = PrefetchOperation(CacheRequestHandle("check", 0), array("q"))
        problems += [
            f"PrefetchOperation: has no {name}" for name in _READ_ATTRIBUTES if not hasattr(operation, name)
        ]
    return problems


def _resolve(target: str) -> Any:
    owner, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(owner), name)
    except ModuleNotFoundError as error:
        if not owner.startswith(error.name or "?"):
            raise
        module, _, cls = owner.rpartition(".")
        return getattr(getattr(importlib.import_module(module), cls), name)


def unapplied(targets: list[str]) -> list[str]:
    """The hooked targets that SGLang's registry failed to patch (it only logs such a failure)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [target for target in targets if target not in HookRegistry._patched]


def wants_hooks(process_title: str) -> bool:
    """Whether an SGLang process with this title has a part in restores."""
    return not process_title.startswith("sglang::detokenizer")


def relays_to_replicas(process_title: str) -> bool:
    """Whether an SGLang process with this title stands between the HTTP process and the replicas."""
    return process_title.startswith("sglang::data_parallel_controller")


def replicas() -> int:
    """Replicas, or groups of data-parallel attention, behind this HTTP process: each has a cache of its own."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().num_dp_ranks)


def parallel_obstacle() -> str | None:
    """Why ranks that are set up like this server's cannot restore anything; None if they can.

    The same in the HTTP process and on every rank.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    for present, what in (
        (parallel.attn_cp_size > 1, "context parallelism"),
        (parallel.dcp_size > 1, "decode context parallelism"),
    ):
        if present:
            return f"{what} is not supported by this release of toolgap"
    return None


def http_workers() -> int:
    """How many HTTP processes the server has. News of an operation reaches the one that submitted it."""
    from sglang.srt.runtime_context import get_serving

    return int(get_serving().tokenizer_worker_num)


def denied_status(method: str, path: str, authorization: str | None) -> int | None:
    """The status with which SGLang's own ``/hicache/*`` routes refuse such a caller; None if they do not.

    With several tokenizer workers SGLang itself asks no caller for a key, on any route.
    """
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth

    serving = get_serving()
    decision = decide_request_auth(
        method=method,
        path=path,
        authorization_header=authorization,
        api_key=serving.api_key,
        admin_api_key=serving.admin_api_key,
        auth_level=AuthLevel.ADMIN_OPTIONAL,
    )
    return None if decision.allowed else int(decision.error_status_code)


def loaded_adapters(tokenizer_manager: Any) -> dict[str, str] | None:
    """In the HTTP process: ids of the loaded LoRA adapters by name; None on a server without LoRA.

    SGLang appends the id to a request's extra key. An adapter gets another id each time it is loaded at
    run time, so one that is not loaded now has no KV that a request could use. Looking counts as no use
    of an adapter: SGLang may evict and unload it as if nothing had been asked.
    """
    if not tokenizer_manager.enable_lora:
        return None
    adapters = tokenizer_manager.lora_registry.get_all_adapters()
    return {name: adapter.lora_id for name, adapter in adapters.items()}


class PromptError(ValueError):
    """SGLang's chat route would refuse a request; ``field`` is the one that is wrong, if it is known."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ChatPrompt(NamedTuple):
    """What SGLang's chat route makes of a request's body."""

    token_ids: "array[int]"
    lora_path: str | None
    has_media: bool


class ChatRoute:
    """In the HTTP process: SGLang's chat routes, as far as they make prompts.

    Args:
        app: SGLang's FastAPI application, once it has started.
        tokenizer_manager: SGLang's.
    """

    def __init__(self, app: Any, tokenizer_manager: Any) -> None:
        self._app = app
        self._tokenizer_manager = tokenizer_manager

    async def render(self, api: Api, body: dict[str, Any]) -> ChatPrompt:
        """The prompt of a request with this body, as its route would make it.

        Raises:
            PromptError: the route would refuse it.
        """
        request = await asyncio.to_thread(self._convert, api, body)
        token_ids = request.input_ids
        if token_ids is None:
            token_ids, _ = await self._tokenizer_manager._tokenize_texts(request.text)
        has_media = any((request.image_data, request.video_data, request.audio_data))
        return ChatPrompt(array("q", token_ids), request.lora_path, has_media)

    def _convert(self, api: Api, body: dict[str, Any]) -> Any:
        from fastapi import HTTPException
        from pydantic import ValidationError
        from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from sglang.srt.entrypoints.openai.encoding_dsv32 import DS32EncodingError
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        chat = self._app.state.openai_serving_chat
        body = copy.deepcopy(body)  # SGLang's validators write into it
        try:
            if api is Api.ANTHROPIC:
                body = {"model": self._tokenizer_manager.served_model_name, "max_tokens": 1} | body
                lora_path = body.pop("lora_path", None)
                message = AnthropicMessagesRequest.model_validate(body)
                request = self._app.state.anthropic_serving._convert_to_chat_completion_request(message)
                request.lora_path = lora_path
            else:
                request = ChatCompletionRequest.model_validate(body)
            if problem := chat._validate_request(request):
                raise PromptError(problem)
            converted, _ = chat._convert_to_internal_request(request)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            field = str(first["loc"][0]) if first["loc"] else None
            raise PromptError(f"{first['msg']} (at {place})", field) from None
        except HTTPException as error:
            raise PromptError(str(error.detail)) from None
        except (ValueError, DS32EncodingError) as error:
            raise PromptError(str(error), getattr(error, "field", None)) from None
        return converted


class Prefix(NamedTuple):
    """Exact token ids from position 0, as ``array('q')``, in their request-level namespace."""

    token_ids: "array[int]"
    extra_key: str | None
    cache_salt: str | None

    def shared_tokens(self, other: "Prefix") -> int:
        """Length of the common prefix; 0 across namespaces."""
        if self.extra_key != other.extra_key or self.cache_salt != other.cache_salt:
            return 0
        a, b = self.token_ids, other.token_ids
        low, high = 0, min(len(a), len(b))
        if a[:high] == b[:high]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if a[low:middle] == b[low:middle]:
                low = middle
            else:
                high = middle
        return low


def prompt_of(request: Any) -> Prefix:
    """What a request of SGLang's asks the cache for."""
    return Prefix(request.full_untruncated_fill_ids, request.extra_key, request.cache_salt)


class PrefillBatch(NamedTuple):
    """A batch of prefills that was computed."""

    tokens: int
    """New ones."""
    pairs: float
    """Of a new token and one that it attends to."""
    launched_s: float
    """When the last of its requests was scheduled, by `time.perf_counter`; chunks but the first are so later."""


def prefill_batch(batch: Any) -> PrefillBatch | None:
    """What SGLang has computed; None if some of its requests' KV was loaded from host memory meanwhile."""
    requests = batch.reqs
    if not requests or any(
        request.cached_tokens_host or request.cached_tokens_storage for request in requests
    ):
        return None
    return PrefillBatch(
        sum(batch.extend_lens),
        sum(
            new * (before + new / 2) for new, before in zip(batch.extend_lens, batch.prefix_lens, strict=True)
        ),
        max(request.time_stats.last_forward_entry_time for request in requests),
    )


def asked_by(request: Any) -> Prefix:
    """What a request of SGLang's was sent with, without what has been generated since."""
    return Prefix(request.origin_input_ids, request.extra_key, request.cache_salt)


def recorded(request: Any) -> Recorded:
    """What a request of SGLang's that has finished leaves to be named by."""
    prompt_ids = request.origin_input_ids
    token_ids = prompt_ids + request.output_ids_through_stop
    return Recorded(token_ids, len(prompt_ids), request.extra_key, request.cache_salt)


def span_of(controller: Any, operation: Any) -> tuple[int, Callable[[], int]]:
    """What a storage call has just read, in its thread: tokens it should have, and what says those it has.

    SGLang's scheduler counts what was read a step or more later, once all ranks have it.
    """
    return len(operation.hash_value) * int(controller.page_size), lambda: int(operation.completed_tokens)


class Match(NamedTuple):
    """Where a prefix's resident part ends."""

    resident_tokens: int
    host_tokens: int
    """Its part, at the end, that is in host memory only."""
    anchor: Any
    """The node behind which restored pages are attached."""
    end: Any
    """The node from which the host part is loaded back."""


class Hold(NamedTuple):
    """A lock on host memory: neither the prefix's last page nor any before it can be evicted."""

    node: Any
    receipt: Any


class Read(NamedTuple):
    """A read that was issued to SGLang for an operation."""

    handle: Any
    operation: Any
    start_tokens: int
    """Position of its first token in the prefix."""
    span_tokens: int


class ReadResult(NamedTuple):
    """What became of a read, in tokens."""

    found_tokens: int | None
    """In storage behind the start, up to an end that every pool has; None if storage was not asked or raised."""
    allocated_tokens: int | None
    """Host memory that was taken for it; None if none was."""
    read_tokens: int
    inserted_tokens: int
    """Full-attention KV that was not in the tree; with a hybrid cache 0 unless every pool was read."""
    every_pool: bool
    """Whether the other pools of a hybrid cache were read for the same end."""
    returned_at: float | None
    """When the storage call returned, by the monotonic clock; None if it has not."""


class OrdinaryRead(NamedTuple):
    """A read that an ordinary request issued."""

    handle: Any
    prefix: Prefix


class Engine:
    """A scheduler and its cache, as far as restores need them."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.cache = scheduler.tree_cache
        self.own_tokens = 0
        """Spans of the operations' reads, which SGLang counts among its own."""
        self.server_start = 0
        """When this server started, as all its ranks have it; known once its weights were updated."""

    # ---- set-up ----

    def obstacle(self) -> str | None:
        """Why this set-up cannot restore anything, and the mend; None if it can."""
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.runtime_context import get_disagg, get_exec

        cache, scheduler = self.cache, self.scheduler
        if obstacle := parallel_obstacle():
            return obstacle
        if get_disagg().disaggregation_mode not in ("null", "prefill"):
            return (
                f"this is the {get_disagg().disaggregation_mode} half of a disaggregated server, on which restores are "
                "not supported by this release of toolgap: submit to the prefill server"
            )
        if get_disagg().enable_pd_role_switch:
            return (
                "switching between prefill and decode at run time is not supported by this release of toolgap"
            )
        if not scheduler.enable_hierarchical_cache:
            return "the server has no hierarchical cache: start it with --enable-hierarchical-cache"
        if not isinstance(cache, UnifiedRadixCache) or cache.cache_controller is None:
            return f"the server's cache is {type(cache).__name__}, not SGLang's HiCache"
        if cache.disable:
            return "the server's prefix cache is off: start it without --disable-radix-cache"
        if cache.host_memory_mode != "cache":
            return "host memory is only a buffer: start the server with --hicache-host-memory-mode cache"
        if cache.linker is not None:
            return "an external cache linker replaces host memory"
        parts = tuple(cache.tree_components)
        if parts not in ((ComponentType.FULL,), (ComponentType.FULL, ComponentType.SWA)):
            names = ", ".join(component.name for component in parts)
            return f"models with {names} caches are not supported by this release of toolgap"
        if ComponentType.SWA in parts and (cache.sidecar_pool_specs or not cache.tree_core.has_swa_host_pool):
            return (
                "models whose sliding windows are kept by request, or with further pools beside them "
                "(DeepSeek-V4), are not supported by this release of toolgap"
            )
        if cache.tree_core.is_eagle:
            return "EAGLE/MTP speculation is not supported by this release of toolgap"
        if get_exec().moe.elastic_ep_backend is not None:
            return "elastic expert parallelism is not supported by this release of toolgap"
        return None

    @property
    def dp_rank(self) -> int | None:
        """Which replica or attention group of data parallelism this is; None if there is one only."""
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        if parallel.attn_dp_enabled:
            return int(parallel.attn_dp_rank)
        return int(parallel.dp_rank) if parallel.num_dp_ranks > 1 else None

    def storage_obstacle(self) -> str | None:
        """Why the storage backend cannot be read from; None if it can."""
        if not self.cache.enable_storage:
            return "no storage backend is attached: start the server with --hicache-storage-backend"
        if self.prefetch_capacity_tokens <= 0:
            return "the prefetch capacity is 0: give the server more host memory (--hicache-size, --hicache-ratio)"
        return None

    @property
    def paused(self) -> bool:
        """Whether generation is paused: control messages are answered, reads are not drained."""
        return bool(self.scheduler._engine_paused)

    @property
    def free_of_requests(self) -> bool:
        """Whether no request runs or waits (one that waits does not count during a pause)."""
        idle = self.scheduler.is_fully_idle(for_health_check=True, ignore_waiting=self.paused)
        # A health check looks away from these, a flush does not.
        return bool(idle) and not self._bootstrapping and not self.scheduler.disagg_prefill_inflight_queue

    @property
    def flush_pending(self) -> bool:
        """Whether a flush waits for the engine to be idle."""
        return self.scheduler.flush_wrapper._pending is not None

    @property
    def storage_backend(self) -> str | None:
        """Name of the attached storage backend."""
        return self.cache.cache_controller.storage_backend_type if self.cache.enable_storage else None

    @property
    def prefetch_policy(self) -> str:
        """SGLang's rule for how long a request waits for its own storage read."""
        return str(self.cache.prefetch_stop_policy)

    @property
    def page_tokens(self) -> int:
        """Tokens a page."""
        return int(self.cache.page_size)

    @property
    def prefetch_threshold_tokens(self) -> int:
        """Spans shorter than this are never read."""
        return int(self.cache.prefetch_threshold)

    @property
    def prefetch_capacity_tokens(self) -> int:
        """SGLang's limit of all reads in flight."""
        return int(getattr(self.cache.cache_controller, "prefetch_capacity_limit", 0))

    @property
    def prefetch_occupied_tokens(self) -> int:
        """Spans of all reads in flight, the operations' among them."""
        return int(getattr(self.cache.cache_controller, "prefetch_tokens_occupied", 0))

    @property
    def prefill_chunk_tokens(self) -> int | None:
        """Longest part of a prompt that one batch computes; None if prompts are not cut."""
        tokens: int | None = self.scheduler.chunked_prefill_size
        return tokens

    @property
    def ordinary_reads_tokens(self) -> int:
        """Spans of ordinary requests' reads in flight. Agreed by all ranks."""
        return max(self.prefetch_occupied_tokens - self.own_tokens, 0)

    @property
    def host_total_tokens(self) -> int:
        """Capacity of host memory."""
        return int(self.cache.cache_controller.mem_pool_host.logical_size)

    @property
    def token_bytes(self) -> int:
        """KV bytes of a token in this rank's host memory."""
        return int(self.cache.cache_controller.mem_pool_host.anchor_entry.host_pool.size_per_token)

    @property
    def host_free_tokens(self) -> int:
        """Unused part of it."""
        return int(self.cache.cache_controller.mem_pool_host.available_size())

    @property
    def prefetch_retries_pending(self) -> int:
        """Requests that SGLang will ask storage for again."""
        return len(self.cache.storage_prefetch_retries._pending)

    @property
    def reads_in_flight(self) -> int:
        """Reads of operations and of ordinary requests."""
        return len(getattr(self.cache, "ongoing_prefetch", ()))

    def namespace(self, weights_epoch: int) -> str:
        """Fingerprint of what KV is valid for, 16 hex digits.

        Args:
            weights_epoch: Weight updates that this process has seen.
        """
        from sglang.srt.runtime_context import get_serving

        arguments = self.scheduler.server_args
        names = (
            "model_path",
            "revision",
            "tokenizer_path",
            "load_format",
            "quantization",
            "dtype",
            "kv_cache_dtype",
            "hicache_mem_layout",
            "served_model_name",
            "tp_size",
            "pp_size",
        )
        parts = {name: str(getattr(arguments, name, None)) for name in names}
        parts |= {
            "weight_version": str(get_serving().weight_version),
            # A count says nothing across restarts: the start keeps two servers' updates apart.
            "weights_epoch": f"{self.server_start}.{weights_epoch}" if weights_epoch else "0",
            "page_tokens": str(self.page_tokens),
            "storage_backend": str(self.storage_backend),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    # ---- reads ----

    @property
    def piecewise(self) -> bool:
        """Whether KV can be read up to the end of any page, and be used up to there.

        A hybrid cache can be continued only at an end for which storage holds every pool, such as
        the whole sliding window before it: a read gives all up to that end, or nothing.
        """
        return len(self.cache.tree_components) == 1

    def shortest_read_tokens(self, match: Match) -> int:
        """Spans behind a match that are shorter than this are not read.

        With a sliding window, SGLang reads none for a span that is shorter than it, unless the span
        starts with the prompt; what it read could not be used.
        """
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        if self.piecewise or self.cache.is_root(match.anchor):
            return self.prefetch_threshold_tokens
        window_tokens = self.cache.components[ComponentType.SWA].full_window_pages * self.page_tokens
        return max(self.prefetch_threshold_tokens, int(window_tokens))

    def align(self, tokens: int) -> int:
        """Whole pages of a prefix."""
        return tokens - tokens % self.page_tokens

    def match(self, prefix: Prefix) -> Match:
        """Find the resident part of a prefix: what every pool holds. Refreshes its place in the eviction order."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(prefix.token_ids, extra_key=prefix.extra_key, cache_salt=prefix.cache_salt)
        match = self.cache.match_prefix(MatchPrefixParams(key=key))
        return Match(
            match.device_prefix_len + match.host_hit_length,
            match.host_hit_length,
            match.last_host_node,
            match.best_match_node,
        )

    def can_anchor(self, match: Match) -> bool:
        """Whether restored pages can be attached behind a match."""
        return bool(self.cache.is_backuped(match.anchor) or self.cache.is_root(match.anchor))

    def issue(
        self, operation_id: str, number: int, prefix: Prefix, match: Match, span_tokens: int
    ) -> Read | None:
        """Start reading a span that follows a match, as a request of its own. None if SGLang declines.

        SGLang declines a span below its threshold, and any read while ordinary requests' reads
        occupy its limit.

        Args:
            operation_id: Names the request.
            number: Of this read among the operation's.
            prefix: The whole prefix.
            match: What of it is resident.
            span_tokens: What to read, in whole pages.
        """
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        cache = self.cache
        handle = CacheRequestHandle(f"toolgap-{operation_id}", number)
        start = match.resident_tokens
        cache.prefetch_from_storage(
            handle,
            match.anchor,
            prefix.token_ids[start : start + span_tokens],
            cache.get_last_hash_value(match.anchor),
            cache.get_prefix_hash_values(match.anchor) if cache.hicache_storage_pass_prefix_keys else None,
            matched_prefix_tokens=prefix.token_ids[:start],
            extra_key=prefix.extra_key,
            cache_salt=prefix.cache_salt,
        )
        info = cache.ongoing_prefetch.get(handle)
        if info is None:
            self._finish(handle)
            return None
        self.own_tokens += len(info.prefetch_key)
        return Read(handle, info.operation, start, len(info.prefetch_key))

    def in_flight(self, read: Read) -> bool:
        """Whether SGLang still tracks a read. Agreed by all ranks."""
        return self.is_reading(read.handle)

    def is_reading(self, handle: Any) -> bool:
        """Whether SGLang tracks a read for this request handle. Agreed by all ranks."""
        return handle in self.cache.ongoing_prefetch

    def progress(self, read: Read) -> tuple[State, int]:
        """How far a read in flight has come: its state, and tokens read."""
        if read.operation.host_indices is None:
            return State.QUERYING, 0
        return State.RESTORING, int(read.operation.completed_tokens)

    def stop(self, read: Read) -> None:
        """Let a read end at the next batch boundary; what it has read is kept."""
        self.cache.cache_controller.terminate_prefetch(read.operation)
        if read.operation.host_indices is None:
            # Nothing was allocated, so nothing has to wait for the query to return.
            self.give_up(read)

    def give_up(self, read: Read) -> None:
        """End a read now, keeping its contiguous first part.

        Host memory of the rest is released by SGLang when the storage call returns, not before.
        """
        self.cache.cache_controller.terminate_prefetch(read.operation)
        self.cache.check_prefetch_progress(read.handle)

    def quarantined_tokens(self, read: Read) -> int:
        """Host memory that SGLang keeps for a read until its storage call has returned."""
        operation = read.operation
        if operation.host_indices is None:
            return 0
        return len(operation.host_indices) - int(operation.completed_tokens)

    def conclude(self, read: Read) -> ReadResult:
        """Take the result of a read that is no longer in flight, and drop every trace of it."""
        from sglang.srt.mem_cache.hicache_storage import PoolName

        operation, handle = read.operation, read.handle
        pages = operation.query_pool_hit_pages.get(PoolName.KV)
        stored, others = operation.pool_storage_result, operation.pool_transfers or ()
        allocated = None if operation.host_indices is None else len(operation.host_indices)
        if (
            pages is not None
            and allocated is None
            and self.piecewise
            and operation.storage_hit_count < pages * self.page_tokens
        ):
            pages = None  # the query failed on one rank, and SGLang leaves out a rank without a verdict
        inserted = self.cache.prefetch_loaded_tokens_by_reqid.get(handle)
        result = ReadResult(
            found_tokens=None if pages is None else min(pages, stored.kv_hit_pages) * self.page_tokens,
            allocated_tokens=allocated,
            read_tokens=0 if allocated is None or inserted is None else int(operation.completed_tokens),
            inserted_tokens=inserted or 0,
            every_pool=all(
                stored.extra_pool_hit_pages.get(other.name, 0) == len(other.keys or ())
                for other in others
                if other.indices_from_pool != PoolName.KV
            ),
            returned_at=StorageCalls.returned_at(operation),
        )
        self.own_tokens -= read.span_tokens
        self._finish(handle)
        return result

    def _finish(self, handle: Any) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

        # ABORT is the outcome that clears what SGLang keeps by handle, a pending retry above all.
        self.cache.finish(handle, CacheRequestOutcome.ABORT)

    def rate_limited(self, controller: Any, original: Any) -> bool:
        """SGLang's prefetch limit as ordinary requests should see it: without the operations' reads."""
        controller.prefetch_tokens_occupied -= self.own_tokens
        try:
            return bool(original(controller))
        finally:
            controller.prefetch_tokens_occupied += self.own_tokens

    @property
    def declines_reads(self) -> bool:
        """Whether ordinary requests' reads occupy SGLang's limit, so that it would decline one of ours."""
        return bool(self.cache.cache_controller.prefetch_rate_limited())

    def replace_storage_thread(self, hanging: threading.Thread) -> None:
        """Start another of SGLang's threads that query or read storage, in place of one that hangs.

        Only where there is one rank: several ranks' threads take the same operations in the same order,
        and wait for each other in each of them.
        """
        controller = self.cache.cache_controller
        if hanging is controller.prefetch_thread:
            name, loop = "prefetch_thread", controller.prefetch_thread_func
        elif hanging is controller.prefetch_io_aux_thread:
            name, loop = "prefetch_io_aux_thread", controller.prefetch_io_aux_func
        else:
            return
        thread = threading.Thread(target=loop, daemon=True)
        setattr(controller, name, thread)
        thread.start()

    # ---- host memory ----

    def hold(self, match: Match) -> Hold | None:
        """Keep a match's host copies from being evicted. None if its end has no host copy."""
        if self.cache.is_root(match.anchor) or not self.cache.is_backuped(match.anchor):
            return None
        return Hold(match.anchor, self.cache.inc_host_lock_ref(match.anchor).to_dec_params())

    def release(self, hold: Hold) -> None:
        """Give a hold back."""
        self.cache.dec_host_lock_ref(hold.node, hold.receipt)

    def hold_waiting(self, holds: list[Hold]) -> None:
        """Hold what requests that wait to be scheduled have in host memory, and add it to a list."""
        for request in self._waiting_requests():
            hold = self.hold(self.match(prompt_of(request))) if request.host_hit_length > 0 else None
            if hold is not None:
                holds.append(hold)

    def needs_eviction(self, tokens: int) -> bool:
        """Whether host memory has no room for so many tokens without evicting."""
        return self.host_free_tokens < tokens

    # ---- the device ----

    def promotion_obstacle(self) -> str | None:
        """Why nothing can be promoted to the device on this set-up; None if it can."""
        from sglang.srt.runtime_context import get_parallel

        if get_parallel().pp_size > 1:
            return "promotion to the device is not supported with pipeline parallelism"
        if not self.piecewise:
            return "promotion to the device is supported for full-attention models only"
        return None

    def device_room(self) -> int:
        """Free tokens of device memory, the least of all ranks. A collective on several ranks."""
        [taken] = self._highest([-self.scheduler.token_to_kv_pool_allocator.available_size()])
        return -taken

    @property
    def loading(self) -> bool:
        """Whether host-to-device loads are under way. Agreed by all ranks."""
        return bool(self.cache.cache_controller.ack_load_queue)

    def promote(self, match: Match) -> int | None:
        """Load a match's host part to the device by SGLang's own load-back.

        Returns:
            SGLang's index of the load, for the batch that is to wait for it; None if it loads nothing.
        """
        if not self.cache.load_back(match.end):
            return None
        return int(self.cache.ready_to_load_host_cache())

    def is_loading(self, match: Match) -> bool:
        """Whether the load that :meth:`promote` started goes on. Agreed by all ranks."""
        return match.end in self.cache.ongoing_load_back

    # ---- ordinary requests ----

    @property
    def _bootstrapping(self) -> list[Any]:
        """On a prefill server: requests that are not scheduled before their decode server is ready."""
        queue = self.scheduler.disagg_prefill_bootstrap_queue
        return [] if queue is None else list(queue.queue)

    def _waiting_requests(self) -> list[Any]:
        """Requests that are not scheduled yet."""
        return [*self.scheduler.waiting_queue, *self._bootstrapping]

    def ordinary_reads(self) -> Iterator[OrdinaryRead]:
        """Reads in flight of requests that are waiting to be scheduled."""
        reading = {handle for handle in self.cache.ongoing_prefetch if not handle.rid.startswith("toolgap-")}
        if not reading:
            return
        for request in self._waiting_requests():
            if request.cache_request_handle in reading:
                yield OrdinaryRead(request.cache_request_handle, prompt_of(request))

    def waiting_prefixes(self, handles: set[Any]) -> dict[Any, Prefix]:
        """Prompts of those requests that wait to be scheduled."""
        return {
            request.cache_request_handle: prompt_of(request)
            for request in self._waiting_requests()
            if request.cache_request_handle in handles
        }

    def refetch(self, handles: set[Any]) -> None:
        """Let waiting requests match again and read what is still missing."""
        for request in self._waiting_requests():
            if request.cache_request_handle in handles:
                self.scheduler._prefetch_kvcache(request)

    def wait_budget_s(self, tokens: int) -> float:
        """How long SGLang lets a request wait for its own storage read of that length.

        Under ``wait_complete`` SGLang sets no limit; ten times its time-out budget stands in for it.
        """
        cache = self.cache
        budget_s = float(
            cache.prefetch_timeout_base + tokens / cache.page_size * cache.prefetch_timeout_per_page
        )
        return budget_s * 10 if self.prefetch_policy == "wait_complete" else budget_s

    # ---- control ----

    def any_rank(self, flags: list[bool]) -> list[bool]:
        """Element by element, whether a flag is set on any rank; the same answer on every rank.

        A collective: every rank that shares this cache's decisions must call it at the same place, with
        as many flags, in the scheduler's thread. A replica of data parallelism asks itself only.

        With pipeline parallelism the answer is that of the first stage's ranks, and later stages take it
        over as it is. There it may be asked in the scheduler's step only, right after SGLang's own exchange:
        see :attr:`may_ask`.
        """
        return [bool(number) for number in self._highest([int(flag) for flag in flags])]

    def _highest(self, numbers: list[int]) -> list[int]:
        if not numbers or not self.has_several_ranks:
            return numbers
        import torch

        data = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self.cache._all_reduce(data, torch.distributed.ReduceOp.MAX)
        return [int(number) for number in data.tolist()]

    def agree_on_start(self) -> None:
        """Learn when this server started. A collective, before the scheduler's first step.

        The launcher started every rank of one node, whose clocks and parents may differ from another
        node's: the latest start stands for all.
        """
        import psutil

        started_us = round(psutil.Process(os.getppid()).create_time() * 1e6)
        self.server_start = self._highest([started_us])[0]

    @property
    def has_several_ranks(self) -> bool:
        """Whether other processes take the same decisions at the same step."""
        cache = self.cache  # one that is not HiCache knows no ranks, and has no restores
        return getattr(cache, "tp_world_size", 1) > 1 or getattr(cache, "pp_size", 1) > 1

    @property
    def may_ask(self) -> bool:
        """Whether ranks may ask each other, and drain, while a message is handled.

        With pipeline parallelism they may not: the first stage's next step waits until the later ones have
        taken part, and these get the message only after they were given the outputs of that step.
        """
        return getattr(self.cache, "pp_size", 1) == 1

    def drain(self) -> None:
        """One pass over SGLang's asynchronous HiCache events. A collective on several ranks."""
        self.cache.check_hicache_events()

    def send(self, output: Any, request: Any) -> None:
        """Send a message to the HTTP process."""
        self.scheduler.send_control_output(output, request)


def cause(result: ReadResult, span_tokens: int, threshold_tokens: int) -> Reason:
    """Why a read that nobody stopped ended short, or ``complete``."""
    if result.found_tokens is None:
        return Reason.STORAGE_QUERY_FAILED
    if result.found_tokens == 0:
        return Reason.NOT_IN_STORAGE
    if result.found_tokens < threshold_tokens:
        return Reason.BELOW_THRESHOLD
    if result.allocated_tokens is None:
        return Reason.HOST_CAPACITY
    if result.read_tokens < result.allocated_tokens:
        return Reason.STORAGE_READ_FAILED
    if result.allocated_tokens < result.found_tokens:
        return Reason.HOST_CAPACITY
    if not result.every_pool:
        return Reason.STORAGE_READ_FAILED
    if result.found_tokens < span_tokens:
        return Reason.STORAGE_SHORTFALL
    return Reason.COMPLETE


def metrics_of(scheduler: Any) -> Metrics:
    """What counts restores of a scheduler: on the one rank that counts for its replica, if metrics are on.

    The labels are those of SGLang's own scheduler metrics. The storage backend is none of them: it can be
    replaced while the server runs.
    """
    from sglang.srt.runtime_context import get_parallel

    context = scheduler.metrics_collector_context
    if context.collector is None or not context.is_stats_logging_rank or get_parallel().pp_rank != 0:
        return Metrics(enabled=False, labels={})
    labels = {name: str(value) for name, value in context.collector.labels.items() if name != "priority"}
    return Metrics(enabled=True, labels=labels)
