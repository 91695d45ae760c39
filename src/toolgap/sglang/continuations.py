"""How far later requests have followed the prefixes that operations restored, and where they left them."""

from collections.abc import Iterable
from itertools import islice

from toolgap.operations import Operation
from toolgap.protocol import Divergence
from toolgap.sglang.internals import Prefix

SHOWN_TOKENS = 12
"""How much of both sides is kept where a request left a prefix."""


class Continuations:
    """Prefixes of operations whose continuation has not been seen yet, by operation id.

    Which request is an operation's continuation nobody says: the one that has followed its prefix furthest
    is taken for it.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._watched: dict[str, tuple[Operation, Prefix]] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, operation: Operation, prefix: Prefix) -> None:
        """Begin to compare requests with an operation's prefix."""
        self._watched[operation.operation_id] = operation, prefix

    def seen(self, prompt: Prefix) -> None:
        """A request with this prompt is being served."""
        for operation, prefix in list(self._watched.values()):
            best = operation.matched_tokens or 0
            if not _may_share_more(prefix, prompt, best):
                continue
            shared = prefix.shared_tokens(prompt)
            if shared <= best or shared < min(self._page_tokens, len(prefix.token_ids)):
                continue
            operation.matched_tokens = shared
            if shared == len(prefix.token_ids):
                operation.divergence = None
                del self._watched[operation.operation_id]
            else:
                operation.divergence = Divergence(
                    submitted_ids=_shown(prefix.token_ids, shared),
                    prompted_ids=_shown(prompt.token_ids, shared),
                )

    def forget(self, operation: Operation) -> None:
        """Its outcome is not remembered any more."""
        self._watched.pop(operation.operation_id, None)


def _may_share_more(prefix: Prefix, prompt: Prefix, tokens: int) -> bool:
    """Whether two prefixes may share more than so many tokens; cheap, since most prompts are of other agents."""
    return (
        len(prompt.token_ids) > tokens
        and len(prefix.token_ids) > tokens
        and prompt.token_ids[tokens] == prefix.token_ids[tokens]
    )


def _shown(token_ids: Iterable[int], start: int) -> list[int]:
    return list(islice(token_ids, start, start + SHOWN_TOKENS))
