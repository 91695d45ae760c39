"""A scheduler and its cache, as the rest of ``toolgap.sglang`` sees them. All of it runs in the scheduler's thread."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from toolgap.protocol import Reason, State
from toolgap.sglang.internals.process import parallel_obstacle
from toolgap.sglang.internals.requests import Prefix, prompt_of
from toolgap.sglang.metrics import Metrics
from toolgap.sglang.storage_calls import StorageCalls


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

    def tell_storage_of_other_weights(self) -> None:
        """Let a backend that keeps KV by its weights know that the server's are others now: Toolgap's store does."""
        tell = getattr(self.cache.cache_controller.storage_backend, "weights_changed", None)
        if tell is not None:
            tell()

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
