"""What a scheduler's requests and batches say."""

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from toolgap.sglang.record import Recorded


class Prefix(NamedTuple):
    """Exact token ids from position 0, as ``array('q')``, in their request-level namespace."""

    token_ids: "array[int]"
    extra_key: str | None
    cache_salt: str | None

    def begins_with(self, other: "Prefix") -> bool:
        """Whether all of another prefix, which is not empty, is the first part of this one."""
        return (
            (self.extra_key, self.cache_salt) == (other.extra_key, other.cache_salt)
            and len(other.token_ids) > 0
            and self.token_ids[: len(other.token_ids)] == other.token_ids
        )

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
