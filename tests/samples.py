"""What a server reports, as the tests of what reads it need it."""

from toolgap.protocol import EngineStatus

ENGINE = EngineStatus(
    namespace="0123456789abcdef",
    storage_backend="file",
    prefetch_policy="timeout",
    prefetch_threshold_tokens=256,
    page_tokens=16,
    host_total_tokens=8192,
    host_free_tokens=8000,
    prefetch_capacity_tokens=4096,
    prefetch_occupied_tokens=0,
    prefetch_retries_pending=0,
    reads_in_flight=0,
    max_operations=16,
    max_operation_tokens=4096,
    waiting_joins=0,
    stalled_reads=0,
    paused=False,
)
