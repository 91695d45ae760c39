"""An agent's continuation through a gateway: what is written down of it, and when it counts. No I/O."""

from collections.abc import Iterator

import msgspec

from toolgap.bench.plan import Cell
from toolgap.bench.validity import PREFETCHED, page_cache_seen
from toolgap.protocol import OperationStatus, State

WITHOUT, WITH = "without", "with"
ARMS = {
    WITHOUT: "a gateway with `--no-restore`: the continuation reads its prefix from L3 itself",
    WITH: "a gateway as it is by default, told by a hint that the tool has ended, one gap before the continuation",
}

RESTORED, USED, JOINED = "restored_tokens_total", "used_tokens_total", "joined_requests_total"
"""Metrics of the gateway, without the prefix of their names."""


class Turn(msgspec.Struct, kw_only=True):
    """A tool call's continuation. Times are in milliseconds unless named otherwise; counts are of tokens."""

    trial_id: str
    round: int
    cell: Cell
    """Its gap is that from the hint to the continuation."""
    prefix_tokens: int
    """Whole pages of the turn's prompt, which the continuation begins with."""
    turn_tokens: int
    """Whole pages of prompt and answer together, which the gateway restores."""
    prompt_tokens: int
    """Of the continuation."""
    began_ts: float
    """Unix time of the hint, or when it would have been."""
    page_cache: str
    page_cache_share: float | None
    """Of the turn's L3 files, before the hint: how much the page cache held. None if not known."""
    gap_ms: float
    """From the hint's sending to the continuation's, as it came out."""
    late_ms: float
    """By how much that was later than the cell asks for: the hint's own reply, mostly."""
    ttft_ms: float
    """From sending the continuation to the gateway to its first event, at the client."""
    total_ms: float
    arguments: str
    """Of the turn's tool call, as the model wrote them."""
    reference_arguments: str
    output_ids: list[int]
    reference_ids: list[int]
    """What the server answered to the same turn directly, with L1, L2 and L3 empty of it."""
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    counters: dict[str, float]
    """Changes of the engine's own Prometheus counters, from the hint to the trial's end."""
    operations: list[OperationStatus]
    """What the gateway has submitted since the hint, by the server, as it ended."""
    told: dict[str, float]
    """Changes of the gateway's own metrics since the hint."""
    hint_ms: float | None = None
    """From sending the hint to its reply."""
    refused: int | None = None
    """Submits since the hint that the server refused, or that it was not reached for, by the gateway's metrics; None
    in runs that did not note it."""
    invalid: list[str] = []

    @property
    def joined(self) -> bool:
        """Whether the continuation waited for the restore."""
        return any(operation.joined_requests for operation in self.operations)

    @property
    def from_host(self) -> bool:
        """Whether the continuation found its whole prefix in host memory, or waited for it there."""
        return self.host_tokens >= self.prefix_tokens


RULES = {
    "output": "tool call and greedy output ids equal those of the same turn asked of the server directly, with "
    "nothing of it in any tier",
    "tiers": "the continuation found the whole prefix: in storage where nothing was restored, in host memory where "
    "the hint came before it; none of it on the device",
    "reads": "SGLang's counter of tokens read from storage grew by the prefix at least and by the turn's pages at "
    "most: no page was read twice",
    "restored": "where the hint came before the continuation, one restore read the whole prefix, and it was used; "
    "where nothing is restored, nothing was submitted",
    "told": "the gateway's own metrics of restored and used tokens and of joined requests are what the server says; "
    "at a gap of 0, where the continuation may overtake the submit, they are reported, not required",
    "page_cache": "the page cache held the turn's files as the run says: 99 % or more, or 1 % or less",
}


def judge(turn: Turn) -> list[str]:
    """The rules that did not hold, each with what was seen; empty for a valid trial."""
    return [f"{rule}: {seen}" for rule, seen in _broken(turn)]


def expected_told(operations: list[OperationStatus]) -> dict[str, float]:
    """What the gateway's metrics must grow by, by what the server says of its restores."""
    return {
        RESTORED: float(sum(operation.inserted_tokens for operation in operations)),
        USED: float(sum(operation.used_tokens for operation in operations)),
        JOINED: float(sum(operation.joined_requests for operation in operations)),
    }


def _broken(turn: Turn) -> Iterator[tuple[str, str]]:
    whole = turn.prefix_tokens
    if turn.arguments != turn.reference_arguments:
        yield "output", f"the tool call has {turn.arguments} and not {turn.reference_arguments}"
    if turn.output_ids != turn.reference_ids or not turn.output_ids:
        yield "output", f"{turn.output_ids} and not {turn.reference_ids}"
    restores, ahead = turn.cell.arm == WITH, turn.cell.arm == WITH and turn.cell.gap_ms > 0
    in_storage, in_host = turn.storage_tokens >= whole, turn.from_host
    if turn.device_tokens or not (in_host if ahead else in_storage or (restores and in_host)):
        found = (turn.device_tokens, turn.host_tokens, turn.storage_tokens)
        yield "tiers", f"device, host, storage gave {found} for a prefix of {whole}"
    read = turn.counters.get(PREFETCHED)
    if read is None or not whole <= read <= turn.turn_tokens:
        yield "reads", f"{read} tokens were read from storage and not {whole} to {turn.turn_tokens}"
    if ahead:
        states = [f"{one.state}, {one.read_tokens} read, {one.used_tokens} used" for one in turn.operations]
        kept = [
            one
            for one in turn.operations
            if one.state in (State.RESTORED, State.PARTIAL) and min(one.read_tokens, one.used_tokens) >= whole
        ]
        if len(kept) != 1 or len(turn.operations) != 1:
            yield "restored", "; ".join(states) or f"nothing was submitted, {turn.refused or 0} refused"
    elif not restores and turn.operations:
        yield "restored", f"{len(turn.operations)} operations"
    if (ahead or not restores) and turn.told != (expected := expected_told(turn.operations)):
        yield "told", f"{turn.told} and not {expected}"
    if seen := page_cache_seen(turn.page_cache, turn.page_cache_share):
        yield "page_cache", seen
