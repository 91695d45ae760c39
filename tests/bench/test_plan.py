from hypothesis import given
from hypothesis import strategies as st

from toolgap.bench.arms import ARMS, Arm
from toolgap.bench.plan import Cell, prefix_tokens, prompt_ids, shuffled
from toolgap.bench.spread import Spread, percentile

CELLS = [
    Cell(prompt_tokens=tokens, arm=arm, gap_ms=gap_ms)
    for tokens in (1024, 4096)
    for arm in Arm
    for gap_ms in (0.0, 100.0)
]


@given(st.integers(), st.integers(min_value=0))
def test_a_round_plays_every_cell_once_in_an_order_that_the_seed_decides(seed: int, number: int) -> None:
    order = shuffled(CELLS, seed, number)
    assert sorted(order, key=repr) == sorted(CELLS, key=repr)
    assert order == shuffled(CELLS, seed, number)
    sizes = [cell.prompt_tokens for cell in order]
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))


def test_rounds_have_orders_of_their_own() -> None:
    assert len({tuple(shuffled(CELLS, 1, number)) for number in range(8)}) == 8


def test_every_arm_is_explained() -> None:
    assert ARMS.keys() == set(Arm)


def test_a_published_cell() -> None:
    assert prefix_tokens(4096, 16) == 4080
    assert prefix_tokens(4097, 16) == 4096


def test_prompts_are_the_same_for_the_same_name_alone() -> None:
    assert prompt_ids(1, "a", 100, 40_000) == prompt_ids(1, "a", 100, 40_000)
    assert prompt_ids(1, "a", 100, 40_000) != prompt_ids(1, "b", 100, 40_000)
    assert prompt_ids(1, "a", 100, 40_000) != prompt_ids(2, "a", 100, 40_000)


def test_spread_and_percentile() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert percentile([float(value) for value in range(1, 101)], 99) == 99.0
    assert percentile([5.0], 50) == 5.0
