"""The structs between SGLang's HTTP process and its schedulers.

Imported in every process that may unpickle them, so nothing heavy is imported here.
"""

import msgspec
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types

from toolgap.admission import Rates
from toolgap.protocol import Target


class Restore(msgspec.Struct, tag=True, kw_only=True):
    """Submit a prefix that the HTTP process has resolved; its token ids travel beside it."""

    operation_id: str
    extra_key: str | None
    cache_salt: str | None
    ttl_s: float
    namespace: str | None
    deadline_ts: float
    """Unix time at which the continuation is expected, by the HTTP process's clock."""
    gap_s: float
    """From the submit until then."""
    force: bool
    """Whether to restore even what is not worthwhile."""
    target: Target
    lease_s: float | None
    dp_rank: int | None
    """The replica that is meant; None where there is one only."""
    stable_tokens: int | None
    """The prefix's first part that was a prompt as it is; None if nobody knows."""


class Describe(msgspec.Struct, tag=True, kw_only=True):
    """Report one operation, or all and the engine."""

    operation_id: str | None


class Recall(msgspec.Struct, tag=True, kw_only=True):
    """Tell the tokens of a recent request; answered with a :class:`Recalled`."""

    request_id: str


class Recalled(msgspec.Struct, kw_only=True):
    """Reply to a :class:`Recall`, as MessagePack."""

    token_ids: bytes
    """Native-endian int64, as ``array('q').tobytes()``."""
    prompt_tokens: int
    extra_key: str | None
    cache_salt: str | None
    dp_rank: int | None


class CancelOperation(msgspec.Struct, tag=True, kw_only=True):
    """Stop one operation."""

    operation_id: str


class Quiesce(msgspec.Struct, tag=True, kw_only=True):
    """End every operation before the engine's memory is released; refused if a storage call hangs."""


class Decide(msgspec.Struct, tag=True, kw_only=True):
    """What one rank's clock decided, for all ranks; never answered."""

    expire: list[str]
    stall: list[str]
    abandon: list[str]
    release: list[tuple[str, int]]
    """Requests (rid, attempt) whose wait for an operation is over."""
    unlease: list[str]
    """Operations whose lease is over."""
    hang: list[str]
    """Storage calls to take for hanging."""
    replace: list[str]
    """Those whose thread to replace."""
    rates: Rates | None
    """What that rank has measured; None if nothing has changed much."""


Order = Restore | Describe | Recall | CancelOperation | Quiesce | Decide


class HicachePrefetchReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg, misc]
    """An order to the schedulers; ``rid`` is the id that the reply carries back."""

    order: bytes
    token_ids: bytes = b""
    """Native-endian int64, as ``array('q').tobytes()``."""


class HicachePrefetchReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg, misc]
    """A reply (``rid`` set), or news of an operation's end (``rid`` None)."""

    status: int
    body: bytes
    operation_id: str | None = None
    ended: bool = False
    retry_after_s: float | None = None


_decoder = msgspec.msgpack.Decoder(Order)
encode_order = msgspec.msgpack.Encoder().encode


def decode_order(message: HicachePrefetchReqInput) -> Order:
    """The order that a message carries."""
    return _decoder.decode(message.order)


# SGLang's msgpack transport decodes a union that was closed before these classes existed.
hook_custom_types(HicachePrefetchReqInput, HicachePrefetchReqOutput)
