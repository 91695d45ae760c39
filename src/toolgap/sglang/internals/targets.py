"""The names in SGLang that Toolgap hooks or calls, with the signatures it expects of them."""

import importlib
import inspect
from array import array
from importlib import metadata
from typing import Any

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
    "hash_value",
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
