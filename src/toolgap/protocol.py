"""The wire format of ``POST /hicache/prefetch``: one definition for server, client, gateway and docs.

A request body is one JSON object whose ``action`` is ``submit``, ``status``, ``cancel`` or ``resolve``.
A reply is an :class:`OperationStatus`, an :class:`Overview` (status without an id), a :class:`Resolved` or
``{"error": Error}``.
"""

import json
import math
import re
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

PATH = "/hicache/prefetch"
VERSION = 1
"""Version of the wire format and of the messages between the server's processes."""

MAX_TTL_S = 86_400.0
MAX_WAIT_S = 300.0


class State(StrEnum):
    """Where an operation stands; the last six are terminal."""

    QUERYING = "querying"
    RESTORING = "restoring"
    RESTORED = "restored"
    PARTIAL = "partial"
    MISS = "miss"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        """Whether an operation in this state has ended."""
        return self not in (State.QUERYING, State.RESTORING)


STATES: dict[State, str] = {
    State.QUERYING: "Accepted; storage is being asked which pages it holds.",
    State.RESTORING: "Pages are being read from storage into host memory.",
    State.RESTORED: "The whole aligned prefix was resident (device or host) when the operation ended.",
    State.PARTIAL: "A part of the aligned prefix, from its start, was resident when it ended.",
    State.MISS: "Nothing of the prefix was resident or restorable when it ended.",
    State.CANCELLED: "Stopped by a client or by the server; what had landed stays ordinary L2.",
    State.EXPIRED: "Its TTL passed before it ended; what had landed stays ordinary L2.",
    State.FAILED: "A fault ended it; inserted_tokens tells what had landed.",
}


class Target(StrEnum):
    """Where a restore ends."""

    HOST = "host"
    DEVICE = "device"


class Reason(StrEnum):
    """Why an operation ended as it did."""

    COMPLETE = "complete"
    ALREADY_RESIDENT = "already_resident"
    NOT_IN_STORAGE = "not_in_storage"
    STORAGE_SHORTFALL = "storage_shortfall"
    BELOW_THRESHOLD = "below_threshold"
    HOST_CAPACITY = "host_capacity"
    DEVICE_CAPACITY = "device_capacity"
    STORAGE_QUERY_FAILED = "storage_query_failed"
    STORAGE_READ_FAILED = "storage_read_failed"
    STORAGE_STALLED = "storage_stalled"
    NOT_INSERTED = "not_inserted"
    REQUESTED = "requested"
    TTL = "ttl"
    STORAGE_REPLACED = "storage_replaced"
    FLUSHED = "flushed"
    WEIGHTS_UPDATED = "weights_updated"
    MEMORY_RELEASED = "memory_released"
    INTERNAL_ERROR = "internal_error"


REASONS: dict[Reason, str] = {
    Reason.COMPLETE: "Every aligned page is resident.",
    Reason.ALREADY_RESIDENT: "Every aligned page was resident at submission; nothing was read.",
    Reason.NOT_IN_STORAGE: "Storage holds no page that follows the resident part.",
    Reason.STORAGE_SHORTFALL: "Storage holds only a first part of what was missing; that part landed.",
    Reason.BELOW_THRESHOLD: "What is missing or found is shorter than SGLang's prefetch_threshold.",
    Reason.HOST_CAPACITY: "Host memory had no room for all or part of what storage holds.",
    Reason.DEVICE_CAPACITY: "Every aligned page is resident, but free device memory had no room for all of them.",
    Reason.STORAGE_QUERY_FAILED: "The storage backend raised while it was asked.",
    Reason.STORAGE_READ_FAILED: "A page could not be read; the contiguous part before it landed.",
    Reason.STORAGE_STALLED: "Storage made no progress for TOOLGAP_STALL_TIMEOUT_S.",
    Reason.NOT_INSERTED: "Pages were read, but had left host memory again, or their parent had.",
    Reason.REQUESTED: "A client cancelled it.",
    Reason.TTL: "Its time to live passed.",
    Reason.STORAGE_REPLACED: "The storage backend was attached, detached or cleared.",
    Reason.FLUSHED: "The cache was flushed.",
    Reason.WEIGHTS_UPDATED: "The model's weights were updated.",
    Reason.MEMORY_RELEASED: "The engine released its memory.",
    Reason.INTERNAL_ERROR: "A fault in Toolgap; the server's log has the traceback.",
}


class Code(StrEnum):
    """What is wrong with a call that was refused."""

    MALFORMED_JSON = "malformed_json"
    INVALID_FIELD = "invalid_field"
    BODY_TOO_LARGE = "body_too_large"
    UNKNOWN_OPERATION = "unknown_operation"
    OPERATION_CONFLICT = "operation_conflict"
    NAMESPACE_MISMATCH = "namespace_mismatch"
    STORAGE_REPLACED = "storage_replaced"
    STORAGE_STALE = "storage_stale"
    ANCHOR_NOT_BACKED_UP = "anchor_not_backed_up"
    TOO_MANY_OPERATIONS = "too_many_operations"
    PREFIX_TOO_LARGE = "prefix_too_large"
    HOST_BUDGET = "host_budget"
    LEASE_BUDGET = "lease_budget"
    RATE_LIMITED = "rate_limited"
    NOT_WORTHWHILE = "not_worthwhile"
    AWAITED_KV = "awaited_kv"
    UNKNOWN_REQUEST = "unknown_request"
    NOT_SUPPORTED = "not_supported"
    PAUSED = "paused"
    FLUSH_PENDING = "flush_pending"
    STORAGE_STALLED = "storage_stalled"
    ENGINE_BUSY = "engine_busy"
    INTERNAL_ERROR = "internal_error"


class Retry(StrEnum):
    """Whether a refused call is worth trying again as it is."""

    YES = "yes"
    NO = "no"
    IF_TOLD = "if `retry_after_s` is given"


class Refusal(NamedTuple):
    """What a code stands for."""

    status: HTTPStatus
    meaning: str
    retry: Retry


CODES: dict[Code, Refusal] = {
    Code.MALFORMED_JSON: Refusal(HTTPStatus.BAD_REQUEST, "The body is not a JSON object.", Retry.NO),
    Code.INVALID_FIELD: Refusal(
        HTTPStatus.BAD_REQUEST, "A field is missing, unknown or out of range; it is named.", Retry.NO
    ),
    Code.BODY_TOO_LARGE: Refusal(
        HTTPStatus.BAD_REQUEST, "The body is larger than TOOLGAP_MAX_BODY_BYTES.", Retry.NO
    ),
    Code.UNKNOWN_OPERATION: Refusal(
        HTTPStatus.NOT_FOUND, "No active or recent operation has this id.", Retry.NO
    ),
    Code.OPERATION_CONFLICT: Refusal(
        HTTPStatus.CONFLICT, "The id belongs to an operation of another prefix.", Retry.NO
    ),
    Code.NAMESPACE_MISMATCH: Refusal(
        HTTPStatus.CONFLICT, "The server's namespace is not the one in the request.", Retry.NO
    ),
    Code.STORAGE_REPLACED: Refusal(
        HTTPStatus.CONFLICT, "Storage is being replaced, or none is attached.", Retry.IF_TOLD
    ),
    Code.STORAGE_STALE: Refusal(
        HTTPStatus.CONFLICT,
        "Weights were updated, and the cache or storage may still hold KV of the old ones: flush the "
        "cache, then clear the storage backend.",
        Retry.NO,
    ),
    Code.ANCHOR_NOT_BACKED_UP: Refusal(
        HTTPStatus.CONFLICT,
        "The resident part is on the device only, so nothing can be attached behind it yet.",
        Retry.YES,
    ),
    Code.TOO_MANY_OPERATIONS: Refusal(
        HTTPStatus.TOO_MANY_REQUESTS, "TOOLGAP_MAX_OPERATIONS are active.", Retry.YES
    ),
    Code.PREFIX_TOO_LARGE: Refusal(
        HTTPStatus.TOO_MANY_REQUESTS,
        "The prefix alone exceeds what operations, or its lease what leases, may hold of host memory; waiting "
        "will not help.",
        Retry.NO,
    ),
    Code.HOST_BUDGET: Refusal(
        HTTPStatus.TOO_MANY_REQUESTS,
        "Active operations hold their share of host memory (TOOLGAP_HOST_SHARE).",
        Retry.YES,
    ),
    Code.LEASE_BUDGET: Refusal(
        HTTPStatus.TOO_MANY_REQUESTS,
        "Leases hold their share of host memory (TOOLGAP_LEASE_SHARE).",
        Retry.YES,
    ),
    Code.RATE_LIMITED: Refusal(
        HTTPStatus.TOO_MANY_REQUESTS,
        "SGLang's own prefetch limit is reached by ordinary requests.",
        Retry.YES,
    ),
    Code.NOT_WORTHWHILE: Refusal(
        HTTPStatus.CONFLICT,
        "The continuation would have to wait for the restore as long as for a recompute, or longer; `estimate` "
        "says why, and `force` restores anyhow.",
        Retry.NO,
    ),
    Code.AWAITED_KV: Refusal(
        HTTPStatus.TOO_MANY_REQUESTS,
        "There is no room in host memory but that of restored KV whose continuations are expected earlier.",
        Retry.YES,
    ),
    Code.UNKNOWN_REQUEST: Refusal(
        HTTPStatus.NOT_FOUND,
        "No recent request has this id: see TOOLGAP_RECORDED_TOKENS.",
        Retry.NO,
    ),
    Code.NOT_SUPPORTED: Refusal(
        HTTPStatus.NOT_IMPLEMENTED,
        "This server's set-up, or this release, cannot do it; it is named.",
        Retry.NO,
    ),
    Code.PAUSED: Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "The engine is paused.", Retry.YES),
    Code.FLUSH_PENDING: Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE, "A flush waits for the engine to be idle.", Retry.YES
    ),
    Code.STORAGE_STALLED: Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE, "A storage call has not returned; see status.", Retry.YES
    ),
    Code.ENGINE_BUSY: Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE, "The scheduler did not answer in TOOLGAP_REPLY_TIMEOUT_S.", Retry.YES
    ),
    Code.INTERNAL_ERROR: Refusal(
        HTTPStatus.INTERNAL_SERVER_ERROR, "A fault in Toolgap; the server's log has the traceback.", Retry.NO
    ),
}

OperationId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9._:-]+\Z",
        description="Letters, digits, `.`, `_`, `:`, `-`; at most 128 of them.",
    ),
]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class Api(StrEnum):
    """Whose form ``messages`` and the fields beside it have."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class NamedPrefix(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields that name a prefix and the namespace it is in.

    Exactly one of ``input_ids``, ``text``, ``messages`` and ``request_id`` is given. Beside ``messages`` stands
    whatever else of the request's body shapes the prompt (``PROMPT_FIELDS``), as that API names it. Messages
    that end with the answer, or with some of its tool results, name what the next request's prompt will
    certainly begin with; messages that end with the user's, or with all results, name a whole prompt.
    """

    input_ids: Annotated[list[TokenId] | None, Meta(description="The exact prefix, from position 0.")] = None
    text: Annotated[
        str | None,
        Meta(description="The prefix as text, tokenized exactly as `/generate` would."),
    ] = None
    request_id: Annotated[
        str | None,
        Meta(
            description="The `id` of a recent completion, or the `rid` it was sent with: its prompt and its answer, "
            "token for token.",
        ),
    ] = None
    messages: Annotated[
        list[dict[str, Any]] | None,
        Meta(description="The conversation, rendered by the server's own chat template."),
    ] = None
    api: Annotated[
        Api | None,
        Meta(
            description="Whose form the messages have: `openai` (`/v1/chat/completions`, assumed) or `anthropic` "
            "(`/v1/messages`)."
        ),
    ] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="As in that API.")] = None
    tool_choice: Annotated[Any, Meta(description="As in that API.")] = None
    system: Annotated[Any, Meta(description="As in `/v1/messages`.")] = None
    thinking: Annotated[Any, Meta(description="As in that API.")] = None
    output_config: Annotated[Any, Meta(description="As in `/v1/messages`.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="As in `/v1/chat/completions`.")
    ] = None
    reasoning_effort: Annotated[Any, Meta(description="As in `/v1/chat/completions`.")] = None
    reasoning: Annotated[Any, Meta(description="As in `/v1/chat/completions`.")] = None
    response_format: Annotated[
        dict[str, Any] | None,
        Meta(description="As in `/v1/chat/completions`; some models' templates show it."),
    ] = None
    continue_final_message: Annotated[bool | None, Meta(description="As in `/v1/chat/completions`.")] = None
    task: Annotated[str | None, Meta(description="As in `/v1/chat/completions`.")] = None
    model: Annotated[str | None, Meta(description="As in that API; `base:adapter` names a LoRA adapter.")] = (
        None
    )
    extra_key: Annotated[str | None, Meta(description="As in `/generate`.")] = None
    cache_salt: Annotated[str | None, Meta(description="As in `/generate`.")] = None
    lora_path: Annotated[str | None, Meta(description="Name of a LoRA adapter, as in `/generate`.")] = None
    routed_dp_rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="With data parallelism: the replica that will serve the continuation, as in `/generate`."
        ),
    ] = None


PREFIX_FIELDS = ("input_ids", "text", "messages", "request_id")
"""The ways to name a prefix."""

PROMPT_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "system",
    "thinking",
    "output_config",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning",
    "response_format",
    "continue_final_message",
    "task",
    "model",
)
"""Fields of a request's body that shape its prompt: what to copy from one to name its prefix."""


class Submit(
    NamedPrefix,
    tag_field="action",
    tag="submit",
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Restore a prefix. Answers at once with an :class:`OperationStatus`.

    The fields of later releases are named so that a server that lacks them says so (501) instead of
    restoring something else.
    """

    operation_id: Annotated[
        OperationId | None,
        Meta(description="Chosen by the caller to make a submit idempotent; made by the server if left out."),
    ] = None
    ttl_s: Annotated[
        float | None, Meta(description="Seconds after which pending work stops; at most 86,400.")
    ] = None
    namespace: Annotated[
        str | None,
        Meta(description="Fingerprint from an earlier reply; 409 if the server's differs."),
    ] = None
    expected_gap_s: Annotated[
        float | None,
        Meta(
            description="Seconds until the continuation is expected; operations are served in that order. "
            "Without it the TTL stands in."
        ),
    ] = None
    target: Annotated[
        Target | None,
        Meta(description="`device`: promote what was restored to free device memory (L1) as well."),
    ] = None
    lease_s: Annotated[
        float | None,
        Meta(
            description="Hold what was restored in host memory for so many seconds, or until a request uses it."
        ),
    ] = None
    force: Annotated[
        bool | None, Meta(description="Restore even if the estimate says that a recompute would be as fast.")
    ] = None
    image_data: Any | UnsetType = UNSET
    video_data: Any | UnsetType = UNSET
    audio_data: Any | UnsetType = UNSET


UNSUPPORTED_FIELDS: dict[str, str] = {
    "image_data": "multimodal input",
    "video_data": "multimodal input",
    "audio_data": "multimodal input",
}


class Status(msgspec.Struct, tag_field="action", tag="status", kw_only=True, forbid_unknown_fields=True):
    """Ask for one operation (404 if unknown), or for all active and recent ones."""

    operation_id: OperationId | None = None
    wait_s: Annotated[
        float | None,
        Meta(
            description="With an id: answer when the operation ends, or after this many seconds (0 to 300)."
        ),
    ] = None


class Cancel(msgspec.Struct, tag_field="action", tag="cancel", kw_only=True, forbid_unknown_fields=True):
    """Stop an operation's pending work at the engine's next safe point. Idempotent."""

    operation_id: OperationId


class Resolve(
    NamedPrefix,
    tag_field="action",
    tag="resolve",
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Say which tokens a prefix is, and restore nothing. Answers with a :class:`Resolved`."""


Command = Submit | Status | Cancel | Resolve


class Resolved(msgspec.Struct, kw_only=True):
    """The tokens that a submit with the same fields would restore."""

    token_ids: Annotated[list[int], Meta(description="The prefix, from position 0.")]
    stable_tokens: Annotated[
        int | None,
        Meta(description="Its first part, which was or will be a prompt as it is; null for ids and text."),
    ] = None
    expected_tokens: Annotated[
        int | None,
        Meta(description="The rest: an answer as the next prompt should show it; null for ids and text."),
    ] = None


class Estimate(msgspec.Struct, kw_only=True, omit_defaults=False):
    """What a restore and a recompute were expected to cost when an operation was submitted.

    A restore is worthwhile if what is left of it when the continuation comes, ``restore_s - gap_s``, is less
    than ``recompute_s``.
    """

    missing_tokens: Annotated[int, Meta(description="What was not resident, in whole pages.")]
    restore_s: Annotated[float, Meta(description="Until it has landed, reads that are ahead of it included.")]
    recompute_s: Annotated[float, Meta(description="Prefill of the missing tokens.")]
    gap_s: Annotated[
        float, Meta(description="Until the continuation: `expected_gap_s`, or the TTL in its place.")
    ]
    queued_tokens: Annotated[int, Meta(description="What operations ahead of it had still to read.")]
    restore_tokens_per_s: Annotated[float, Meta(description="As measured with this storage backend.")]
    prefill_tokens_per_s: Annotated[float, Meta(description="As measured with this model.")]
    worthwhile: Annotated[bool, Meta(description="Whether the rule says to restore.")]


class Divergence(msgspec.Struct, kw_only=True):
    """Where a later request's prompt left the prefix, some tokens of both sides, decoded."""

    submitted_ids: Annotated[list[int], Meta(description="The prefix's tokens from there on.")]
    prompted_ids: Annotated[list[int], Meta(description="The request's tokens from there on.")]
    submitted_text: Annotated[str | None, Meta(description="The prefix's, decoded.")] = None
    prompted_text: Annotated[str | None, Meta(description="The request's, decoded.")] = None


class OperationStatus(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One operation, active or ended. Counts are of tokens; times are in seconds."""

    operation_id: Annotated[str, Meta(description="The caller's or the server's choice.")]
    state: Annotated[State, Meta(description="See the states below.")]
    reason: Annotated[Reason | None, Meta(description="Set once the operation has ended.")] = None
    requested_tokens: Annotated[int, Meta(description="Length of the prefix that was submitted.")]
    aligned_tokens: Annotated[int, Meta(description="Its whole pages: all that a cache can hold.")]
    resident_tokens: Annotated[
        int, Meta(description="Already on the device or in host memory at submission.")
    ]
    found_tokens: Annotated[
        int | None, Meta(description="Found in storage behind the resident part; null until known.")
    ] = None
    read_tokens: Annotated[int, Meta(description="Read from storage by this operation.")] = 0
    inserted_tokens: Annotated[int, Meta(description="Of those, new in host memory.")] = 0
    dropped_tokens: Annotated[
        int, Meta(description="Of those, given back: resident by then, or without a parent.")
    ] = 0
    joined_requests: Annotated[int, Meta(description="Requests that waited for this read.")] = 0
    following: Annotated[
        bool, Meta(description="It waits for a read of the same pages that another one started.")
    ] = False
    queued: Annotated[bool, Meta(description="It waits for its turn to read.")] = False
    stopping: Annotated[bool, Meta(description="A cancel or expiry is taking effect.")] = False
    ttl_s: Annotated[float, Meta(description="Time after which its pending work is stopped.")]
    elapsed_s: Annotated[float, Meta(description="From acceptance to now, or to its end.")]
    submitted_ts: Annotated[float, Meta(description="Unix time of acceptance, by the server's clock.")] = 0.0
    queried_s: Annotated[float | None, Meta(description="From acceptance to knowing what storage holds.")] = (
        None
    )
    first_read_s: Annotated[
        float | None, Meta(description="From acceptance to the first pages having been read.")
    ] = None
    read_s: Annotated[
        float | None, Meta(description="From acceptance to the last page having been read.")
    ] = None
    namespace: Annotated[str, Meta(description="Fingerprint of what its KV is valid for.")]
    dp_rank: Annotated[int | None, Meta(description="The data-parallel replica that has it.")] = None
    target: Annotated[Target, Meta(description="Where it was asked to end.")] = Target.HOST
    promoted_tokens: Annotated[int, Meta(description="Loaded back from host memory to the device.")] = 0
    lease_s: Annotated[float | None, Meta(description="The lease that was asked for.")] = None
    leased_tokens: Annotated[int, Meta(description="Held in host memory by its lease now.")] = 0
    used_tokens: Annotated[int, Meta(description="Of what it inserted, used by a request so far.")] = 0
    used_after_s: Annotated[
        float | None,
        Meta(description="From acceptance to the first request that used it: the gap as it was."),
    ] = None
    stable_tokens: Annotated[
        int | None,
        Meta(description="Of the prefix, the part that was a prompt as it is; null for ids and text."),
    ] = None
    expected_tokens: Annotated[
        int | None,
        Meta(description="The rest: the answer, as the next prompt should show it; null for ids and text."),
    ] = None
    matched_tokens: Annotated[
        int | None,
        Meta(
            description="Longest first part that a request since then has begun with; null until one came that "
            "shares a page."
        ),
    ] = None
    first_divergent_token: Annotated[
        int | None,
        Meta(description="Position at which that request left the prefix; null if it contains all of it."),
    ] = None
    divergence: Annotated[Divergence | None, Meta(description="Some tokens of both from there on.")] = None
    estimate: Annotated[
        Estimate | None,
        Meta(description="What was expected at submission; null if nothing was measured yet."),
    ] = None


class EngineStatus(msgspec.Struct, kw_only=True):
    """The engine, as far as restores depend on it. Counts are of tokens unless named otherwise."""

    namespace: Annotated[str, Meta(description="Fingerprint of what this server's KV is valid for.")]
    storage_backend: Annotated[str | None, Meta(description="Name of the attached backend.")]
    prefetch_policy: Annotated[
        str, Meta(description="SGLang's rule for how long a request waits for its own storage read.")
    ]
    prefetch_threshold_tokens: Annotated[int, Meta(description="Shorter spans are never read.")]
    page_tokens: Annotated[int, Meta(description="Tokens a page.")]
    host_total_tokens: Annotated[int, Meta(description="Capacity of host memory (L2).")]
    host_free_tokens: Annotated[int, Meta(description="Its unused part.")]
    prefetch_capacity_tokens: Annotated[int, Meta(description="SGLang's limit for all reads in flight.")]
    prefetch_occupied_tokens: Annotated[int, Meta(description="Spans of all reads in flight.")]
    prefetch_retries_pending: Annotated[int, Meta(description="Requests that will ask storage again.")]
    reads_in_flight: Annotated[int, Meta(description="Reads of operations and of ordinary requests.")]
    max_operations: Annotated[int, Meta(description="Operations at once.")]
    max_operation_tokens: Annotated[int, Meta(description="Longest span that one operation may read.")]
    waiting_joins: Annotated[int, Meta(description="Requests that wait for an operation now.")]
    stalled_reads: Annotated[int, Meta(description="Storage calls that were given up and have not returned.")]
    paused: Annotated[bool, Meta(description="Generation is paused: submits are refused.")]
    dp_rank: Annotated[int | None, Meta(description="The data-parallel replica that says so.")] = None
    budget_tokens: Annotated[
        int, Meta(description="Operations' share of host memory: what all of them may still have to read.")
    ] = 0
    budget_used_tokens: Annotated[int, Meta(description="Its part in use.")] = 0
    quarantined_tokens: Annotated[
        int, Meta(description="Host memory of storage calls that were given up and have not returned.")
    ] = 0
    leased_tokens: Annotated[int, Meta(description="Host memory that leases hold.")] = 0
    max_leased_tokens: Annotated[int, Meta(description="Host memory that leases may hold.")] = 0
    restore_tokens_per_s: Annotated[
        float | None, Meta(description="How fast this storage backend is read; null until measured.")
    ] = None
    prefill_tokens_per_s: Annotated[
        float | None, Meta(description="How fast a prompt is computed; null until measured.")
    ] = None


class Overview(msgspec.Struct, kw_only=True):
    """Reply to a status without an id."""

    active: Annotated[list[OperationStatus], Meta(description="Operations that have not ended.")]
    recent: Annotated[list[OperationStatus], Meta(description="Outcomes, newest first.")]
    engine: Annotated[EngineStatus, Meta(description="What restores depend on.")]
    replicas: Annotated[
        list[EngineStatus],
        Meta(
            description="With data parallelism: every replica; `engine` is then the first. Otherwise empty."
        ),
    ] = []


class Error(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why a call was refused, and what to do."""

    code: Annotated[Code, Meta(description="See the codes below.")]
    message: Annotated[str, Meta(description="What is wrong and what to do, for a person.")]
    field: Annotated[str | None, Meta(description="The field of the request that is wrong.")] = None
    retry_after_s: Annotated[
        float | None,
        Meta(description="The same call is worth trying again after this; absent if it is not."),
    ] = None
    estimate: Annotated[Estimate | None, Meta(description="With `not_worthwhile`: what was expected.")] = None


class ErrorReply(msgspec.Struct, kw_only=True):
    """Body of every reply that is not 200."""

    error: Error


RETRY_AFTER_S = 1.0
"""When to try again, where nothing better is known."""


class Refused(Exception):  # noqa: N818 - a refusal is an answer, not a fault
    """A call is refused; carries the :class:`Error` that the caller gets.

    :data:`CODES` says which codes carry ``retry_after_s``: a code with ``Retry.YES`` always does, one with
    ``Retry.NO`` must not be given any.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        retry = CODES[code].retry
        assert retry is not Retry.NO or retry_after_s is None, f"{code} is not worth trying again"
        if retry is Retry.YES and retry_after_s is None:
            retry_after_s = RETRY_AFTER_S
        self.error = Error(code=code, message=message, field=field, retry_after_s=retry_after_s)

    @property
    def status(self) -> int:
        """The HTTP status of the reply."""
        return CODES[self.error.code].status.value


_decoder = msgspec.json.Decoder(Command)


def decode_command(body: bytes) -> Command:
    """Read and check a request body.

    Raises:
        Refused: ``malformed_json``, ``invalid_field`` or ``not_supported``.
    """
    try:
        command = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except RecursionError:
        raise Refused(Code.MALFORMED_JSON, "the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        _name_the_field_that_is_no_number(body)
        raise Refused(Code.MALFORMED_JSON, f"the body is not JSON: {error}") from None
    _check(command)
    return command


def _check(command: Command) -> None:
    match command:
        case Submit():
            _check_submit(command)
        case Resolve():
            _check_prefix(command)
        case Status(wait_s=float(wait_s)) if not 0 <= wait_s <= MAX_WAIT_S:
            raise Refused(
                Code.INVALID_FIELD,
                f"wait_s must be 0 to {MAX_WAIT_S:g} seconds, not {wait_s}",
                field="wait_s",
            )
        case Status(wait_s=float(), operation_id=None):
            raise Refused(Code.INVALID_FIELD, "wait_s needs an operation_id", field="wait_s")
        case _:
            pass


def _name_the_field_that_is_no_number(body: bytes) -> None:
    """Refuse a body that is JSON but for NaN or Infinity, which Python's json writes, by its field."""
    try:
        value = json.loads(body.decode())
        _check(msgspec.convert(value, Command))
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (ValueError, RecursionError):
        return


def _invalid(complaint: str) -> Refused:
    """Turn msgspec's "... - at `$.field[0]`" into a refusal that names the field."""
    # A lone surrogate may stand in a JSON key, but not in the UTF-8 of a reply.
    complaint = complaint.encode(errors="replace").decode()
    message, _, place = complaint.partition(" - at `")
    field = place.rstrip("`").removeprefix("$").removeprefix(".") or None
    if named := re.search(r"field `([^`]+)`", message):
        field = named[1]
    if field is None:
        return Refused(Code.MALFORMED_JSON, f"the body is not a JSON object: {message}")
    if "Invalid value" in message and field == "action":
        message = "must be submit, status, cancel or resolve"
    return Refused(Code.INVALID_FIELD, f"{field}: {message}" if place else message, field=field)


def _check_prefix(prefix: NamedPrefix) -> None:
    given = [field for field in PREFIX_FIELDS if getattr(prefix, field) is not None]
    if len(given) != 1:
        raise Refused(
            Code.INVALID_FIELD,
            f"give exactly one of {', '.join(PREFIX_FIELDS[:-1])} and {PREFIX_FIELDS[-1]}"
            + (f", not {' and '.join(given)}" if given else ""),
            field=(given or PREFIX_FIELDS)[0],
        )
    [field] = given
    if not getattr(prefix, field):
        raise Refused(Code.INVALID_FIELD, f"{field} is empty", field=field)
    if field == "request_id":
        for beside in ("extra_key", "cache_salt", "lora_path"):
            if getattr(prefix, beside) is not None:
                raise Refused(
                    Code.INVALID_FIELD, f"{beside} is the recorded request's own: leave it out", field=beside
                )
    if field != "messages":
        for beside in ("api", *PROMPT_FIELDS):
            if getattr(prefix, beside) is not None:
                raise Refused(Code.INVALID_FIELD, f"{beside} is only taken beside messages", field=beside)


def _check_submit(submit: Submit) -> None:
    for field, what in UNSUPPORTED_FIELDS.items():
        if getattr(submit, field) not in (UNSET, None):
            raise Refused(Code.NOT_SUPPORTED, f"{field}: this release does not support {what}", field=field)
    _check_prefix(submit)
    for field in ("ttl_s", "expected_gap_s", "lease_s"):
        seconds = getattr(submit, field)
        if seconds is not None and not (math.isfinite(seconds) and 0 < seconds <= MAX_TTL_S):
            raise Refused(
                Code.INVALID_FIELD,
                f"{field} must be more than 0 and at most {MAX_TTL_S:g} seconds, not {seconds}",
                field=field,
            )
