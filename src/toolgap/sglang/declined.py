"""Prefixes whose restore was declined because a recompute is as fast: their continuations recompute."""

from toolgap.sglang.internals.requests import Prefix

_KEPT = 64
"""The oldest are forgotten: by number and not by time, so that every rank forgets the same ones."""


class Declined:
    """Prefixes that the next request which begins with them is to recompute, rather than read from storage."""

    def __init__(self) -> None:
        self._prefixes: list[Prefix] = []

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, prefix: Prefix) -> None:
        """A restore of this prefix was declined."""
        self.settle(prefix)
        self._prefixes = [*self._prefixes, prefix][-_KEPT:]

    def begins(self, prompt: Prefix) -> bool:
        """Whether a prompt begins with one of them."""
        return any(prompt.begins_with(prefix) for prefix in self._prefixes)

    def settle(self, tokens: Prefix) -> None:
        """Forget those that these tokens begin with: they were recomputed, or are restored after all."""
        self._prefixes = [prefix for prefix in self._prefixes if not tokens.begins_with(prefix)]

    def forget_all(self) -> None:
        """Storage is another one."""
        self._prefixes = []
