"""The exact tokens of recent requests, by request id, so that a client can name a prefix without having them."""

from array import array
from collections import OrderedDict
from typing import NamedTuple


class Recorded(NamedTuple):
    """A request that has finished."""

    token_ids: "array[int]"
    """Prompt and answer, as ``array('q')``."""
    prompt_tokens: int
    extra_key: str | None
    cache_salt: str | None


class Record:
    """The most recent requests, at most so many tokens of them.

    Args:
        max_tokens: Of all requests together, 8 bytes each; 0 records nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self._requests: OrderedDict[str, Recorded] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, request: Recorded) -> None:
        """Record a request, in place of an older one with its id; the oldest give way."""
        self._remove(request_id)
        if len(request.token_ids) > self.max_tokens:
            return
        self._requests[request_id] = request
        self.tokens += len(request.token_ids)
        while self.tokens > self.max_tokens:
            self._remove(next(iter(self._requests)))

    def find(self, request_id: str) -> Recorded | None:
        """A recent request; one that is asked for again and again does not stay longer for it."""
        return self._requests.get(request_id)

    def _remove(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.tokens -= len(request.token_ids)
