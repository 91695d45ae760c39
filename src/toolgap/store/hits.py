"""Which prefixes the pages of one pool allow, by SGLang's hit policies."""

from collections.abc import Sequence

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"
"""Values of SGLang's ``PoolHitPolicy``."""


def ends_with(policy: str, held: Sequence[bool], window_pages: int) -> set[int]:
    """Lengths in pages of the prefixes that a pool allows, from 1.

    Args:
        policy: Which of a prefix's pages the pool must hold: all, or those at its end.
        held: Which pages it holds, from the first on.
        window_pages: With ``TRAILING_PAGES``: how many at the end; at least one.

    Raises:
        ValueError: the policy is none of these.
    """
    if policy == ALL_PAGES:
        whole = list(held).index(False) if False in held else len(held)
        return set(range(1, whole + 1))
    if policy == TRAILING_PAGES:
        window_pages = max(1, window_pages)
        ends, run = set(), 0
        for end, is_held in enumerate(held, 1):
            run = run + 1 if is_held else 0
            if run >= min(window_pages, end):
                ends.add(end)
        return ends
    raise ValueError(f"unknown hit policy {policy}")
