"""What a run is made of, and the order of its trials. No I/O."""

import random
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

PageCache = Literal["warm", "cold", "unknown"]

OUTPUT_TOKENS = 8
"""Generated whether or not the model ends its answer before, so that there is something to compare."""

SENTINEL_TOKENS = 512
"""An unrelated prefix in L2, to see that no arm evicts it."""


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """Everything that decides what a run does; a run resumes only under an equal plan."""

    recipe: str
    seed: int
    rounds: int
    """Trials of each cell. A round plays every cell once, in an order of its own."""
    prompt_tokens: tuple[int, ...]
    gaps_ms: tuple[float, ...]
    arms: tuple[str, ...]
    page_tokens: int
    page_cache: PageCache
    options: dict[str, Any] = {}
    """What only this recipe knows."""


class Cell(msgspec.Struct, kw_only=True, frozen=True):
    """What is measured again in every round."""

    prompt_tokens: int
    arm: str
    gap_ms: float
    percent: int | None = None
    """Of the time that a restore takes: stands in for the gap in the recipe ``early-return``."""

    def trial_id(self, round_number: int) -> str:
        """Unique in a run."""
        gap = f"{self.gap_ms:g}ms" if self.percent is None else f"{self.percent}%"
        return f"r{round_number}-{self.prompt_tokens}-{self.arm}-{gap}"


def shuffled(cells: Sequence[Cell], seed: int, round_number: int) -> list[Cell]:
    """A round's cells: size by size, since its prompts are stored once, and otherwise in a random order.

    Drift of the machine then hits every arm and gap alike (a randomized complete block design, with a
    round and size as its block).
    """
    rng = random.Random(f"order/{seed}/{round_number}")  # noqa: S311 - to be repeatable
    sizes = sorted({cell.prompt_tokens for cell in cells})
    rng.shuffle(sizes)
    ordered: list[Cell] = []
    for size in sizes:
        block = [cell for cell in cells if cell.prompt_tokens == size]
        rng.shuffle(block)
        ordered += block
    return ordered


def prompt_ids(seed: int, name: str, tokens: int, vocabulary: int) -> list[int]:
    """Token ids that nobody else asks for: uniformly random, the same for the same arguments."""
    rng = random.Random(f"prompt/{seed}/{name}")  # noqa: S311 - to be repeatable
    return [rng.randrange(100, vocabulary) for _ in range(tokens)]


def prefix_tokens(prompt_tokens: int, page_tokens: int) -> int:
    """Whole pages of a prompt that a cache can serve: its last token is always computed."""
    return (prompt_tokens - 1) // page_tokens * page_tokens
