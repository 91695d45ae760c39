"""How the prefix gets into L3 and leaves L1 and L2, on a server of our own and on somebody else's."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from toolgap.demo.errors import DemoError
from toolgap.engineclient import Engine, Generation

OTHER_PROMPT_TOKENS = 2048
"""Longest prompt of an other agent. Attention makes longer ones slow to compute; many short ones are slow to
play again."""

BACKUP_DEADLINE_S = 120.0
QUIET_S = 2.0
POLL_S = 0.02


class Tiers(Protocol):
    """Brings the prefix where a trial wants it: in L3, and nowhere else."""

    how_evicted: str
    """For the report: what takes the prefix out of L1 and L2."""

    def evicted(self, prefix_ids: Sequence[int]) -> str | None:
        """Leave the prefix in L3 only; the ``cache_salt`` it is stored under."""

    def settle(self, generation: Generation) -> None:
        """After an arm: leave L3 as it was before."""


class StorageFolder:
    """The folder of SGLang's ``file`` backend, one file a page."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pages(self) -> set[Path]:
        """The pages that are there whole."""
        return set(self.path.glob("*.bin"))

    def wait_for(self, pages: int, *, required: bool) -> None:
        """Wait until this many pages are there.

        Args:
            pages: How many.
            required: Whether fewer are a fault. Otherwise it is enough that no more come.

        Raises:
            DemoError: fewer pages came, and they are required.
        """
        end = time.monotonic() + BACKUP_DEADLINE_S
        last_count, last_change_s = -1, time.monotonic()
        while (count := len(self.pages())) < pages:
            now = time.monotonic()
            if count != last_count:
                last_count, last_change_s = count, now
            if not required and now - last_change_s > QUIET_S:
                return
            if now > end:
                raise DemoError(
                    f"SGLang has written {count} pages to L3 and not {pages}: {self.path} may be full, "
                    "or the server's log tells more"
                )
            time.sleep(POLL_S)


class OwnTiers:
    """Tiers of a server that the demo started: real traffic overflows L1 and L2, and L3 is reset by file.

    The other agents' prompts are computed once. From then on they come back from L3 like any other
    conversation, so that overflowing the tiers takes a second and not the time of as many prefills.
    """

    def __init__(
        self, engine: Engine, storage: StorageFolder, *, prompt_tokens: int, page_tokens: int, l2_tokens: int
    ) -> None:
        self._engine = engine
        self._storage = storage
        self._page_tokens = page_tokens
        # None longer than the prompt, for which L1 has been made.
        self._other_tokens = min(OTHER_PROMPT_TOKENS, prompt_tokens)
        self._others = l2_tokens // self._other_tokens + 1
        self._prompts: list[list[int]] = []
        self._kept: set[Path] = set()
        self.traffic_tokens = self._others * self._other_tokens
        self.how_evicted = (
            f"{self._others} prompts of other agents, {self.traffic_tokens:,} tokens in all, through an L2 of "
            f"{l2_tokens:,}"
        )

    def store(self, prefix_ids: Sequence[int]) -> Generation:
        """Compute the prefix, and wait until all its pages are in L3."""
        generation = self._engine.generate(prefix_ids, max_new_tokens=1)
        self._storage.wait_for(len(prefix_ids) // self._page_tokens, required=True)
        return generation

    def prepare(self, text_ids: Sequence[int], progress: Callable[[int, int], None]) -> None:
        """Compute the other agents' prompts, made of this text, and remember what L3 holds then."""
        if len(text_ids) < self.traffic_tokens:
            text_ids = list(text_ids) * (self.traffic_tokens // len(text_ids) + 1)
        before = len(self._storage.pages())
        for number in range(self._others):
            progress(number, self._others)
            start = number * self._other_tokens
            self._prompts.append(list(text_ids[start : start + self._other_tokens]))
            self._play(number)
        pages_each = self._other_tokens // self._page_tokens
        self._storage.wait_for(before + self._others * pages_each, required=True)
        self._kept = self._storage.pages()

    def evicted(self, prefix_ids: Sequence[int]) -> str | None:
        """See :class:`Tiers`."""
        for number in range(self._others):
            self._play(number)
        return None

    def settle(self, generation: Generation) -> None:
        """Take out of L3 what an arm wrote there, so that every arm finds the same pages."""
        cached = generation.device_tokens + generation.host_tokens + generation.storage_tokens
        # The last token's KV is never computed.
        computed = generation.prompt_tokens + len(generation.output_ids) - 1
        new_pages = computed // self._page_tokens - cached // self._page_tokens
        self._storage.wait_for(len(self._kept) + new_pages, required=False)
        for page in self._storage.pages() - self._kept:
            page.unlink(missing_ok=True)

    def _play(self, number: int) -> None:
        # A namespace of its own, so that no page is shared with the agent whose prefix is to leave.
        salt = f"other-agent-{number}"
        self._engine.generate(self._prompts[number], max_new_tokens=1, cache_salt=salt)


class ForeignTiers:
    """Tiers of a server that somebody else runs: flushed, and every arm has a namespace of its own.

    Neither the size of its L2 nor the pages in its L3 are ours to deal with, so each arm computes the
    prefix again under a fresh ``cache_salt``, and L1 and L2 are dropped by ``/flush_cache``.
    """

    how_evicted = "/flush_cache, which drops L1 and L2 and leaves L3"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def evicted(self, prefix_ids: Sequence[int]) -> str | None:
        """See :class:`Tiers`."""
        salt = fresh_salt()
        self._engine.generate(prefix_ids, max_new_tokens=1, cache_salt=salt)
        # SGLang flushes only once everything is backed up.
        self._engine.flush()
        return salt

    def settle(self, generation: Generation) -> None:
        """Nothing: no other arm finds what this one wrote."""


def fresh_salt() -> str:
    """A ``cache_salt`` under which no tier holds anything."""
    return f"toolgap-demo-{uuid4().hex}"
