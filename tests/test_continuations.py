"""How far later requests followed a prefix, and where the best of them left it."""

from array import array
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from toolgap.operations import Operation
from toolgap.sglang.continuations import SHOWN_TOKENS, Continuations
from toolgap.sglang.internals import Prefix


def prefix(token_ids: Iterable[int], salt: str | None = None) -> Prefix:
    return Prefix(array("q", token_ids), None, salt)


def operation(tokens: int) -> Operation:
    return Operation(
        operation_id="a",
        fingerprint=b"",
        namespace="n",
        requested_tokens=tokens,
        aligned_tokens=tokens,
        ttl_s=1.0,
    )


def test_the_request_that_followed_furthest_counts() -> None:
    continuations, restored = Continuations(page_tokens=4), operation(40)
    continuations.watch(restored, prefix(range(40)))
    continuations.seen(prefix([*range(30), 7, 8, 9]))
    continuations.seen(prefix([*range(20), 1]))
    assert restored.matched_tokens == 30
    assert restored.divergence is not None
    assert restored.divergence.submitted_ids == list(range(30, 40))
    assert restored.divergence.prompted_ids == [7, 8, 9]
    continuations.seen(prefix(range(50)))
    status = restored.status(now=0.0)
    assert (status.matched_tokens, status.first_divergent_token, status.divergence) == (40, None, None)
    assert not continuations
    restored.check_integrity()


def test_a_prompt_that_ends_within_the_prefix_left_it_there() -> None:
    continuations, restored = Continuations(page_tokens=4), operation(40)
    continuations.watch(restored, prefix(range(40)))
    continuations.seen(prefix(range(10)))
    assert restored.divergence is not None
    assert (restored.divergence.submitted_ids, restored.divergence.prompted_ids) == (
        list(range(10, 10 + SHOWN_TOKENS)),
        [],
    )


def test_what_shares_less_than_a_page_is_no_continuation() -> None:
    continuations, restored = Continuations(page_tokens=4), operation(40)
    continuations.watch(restored, prefix(range(40)))
    continuations.seen(prefix([0, 1, 2, 9]))
    continuations.seen(prefix(range(40), salt="other"))
    assert restored.matched_tokens is None
    continuations.forget(restored)
    continuations.seen(prefix(range(40)))
    assert restored.matched_tokens is None


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(TOKENS, st.lists(TOKENS, max_size=6), st.integers(1, 3))
def test_it_is_the_longest_common_part_of_all(
    restored: list[int], prompts: list[list[int]], page: int
) -> None:
    continuations, done = Continuations(page), operation(len(restored))
    continuations.watch(done, prefix(restored))
    for prompt in prompts:
        continuations.seen(prefix(prompt))
    shared = [prefix(prompt).shared_tokens(prefix(restored)) for prompt in prompts]
    enough = [tokens for tokens in shared if tokens >= min(page, len(restored))]
    assert done.matched_tokens == max(enough, default=None)
    done.check_integrity()
