"""What storage and prefills were measured to take: rates that follow changes and are not fooled by odd ones."""

from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolgap.admission import PrefillCost, Rates
from toolgap.sglang.rates import Meter, PrefillFit, recent_median

SECONDS = st.floats(1e-5, 1e3)


def read(meter: Meter, tokens: int, seconds: float) -> None:
    """A read that brought all that it should."""
    meter.storage_read(tokens, lambda: tokens, 0.0, seconds)


def has_news(meter: Meter) -> bool:
    return meter.changed


def token_s(meter: Meter) -> float:
    restore = (meter.news(Rates()) or Rates()).restore
    assert restore is not None
    return restore.token_s


def prefilled(
    fit: PrefillFit, tokens: int, behind: int, *, batch_s: float, each_s: float, pair_s: float
) -> None:
    pairs = tokens * (behind + tokens / 2)
    fit.add(tokens, pairs, batch_s + each_s * tokens + pair_s * pairs)


def cost(fit: PrefillFit) -> PrefillCost:
    found = fit.cost()
    assert found is not None
    return found


# ---- storage ----


def test_nothing_is_known_before_anything_was_seen() -> None:
    meter = Meter()
    assert not has_news(meter)
    assert meter.rates() == Rates()
    assert meter.news(Rates()) is None


def test_one_read_is_a_measurement() -> None:
    meter = Meter(unix_clock=lambda: 7.0)
    read(meter, 1000, 2.0)
    meter.storage_asked(0.25)
    rates = meter.news(Rates())
    assert rates is not None
    assert rates.restore is not None
    assert (rates.restore.token_s, rates.restore.latency_s, rates.restore.measured_ts) == (0.002, 0.25, 7.0)
    assert rates.restore_tokens_per_s == 500
    assert meter.news(rates) is None, "nothing is told twice"


def test_a_read_counts_once_all_of_it_is_there_and_one_that_failed_never_does() -> None:
    now, there = [6.0], [0]
    meter = Meter(clock=lambda: now[0])
    meter.storage_read(1000, lambda: there[0], 5.0, 6.0)
    assert meter.news(Rates()) is None
    assert has_news(meter), "it is looked at again"
    there[0] = 1000
    assert meter.news(Rates()) is not None

    meter.storage_read(1000, lambda: 999, 6.0, 6.5)
    for _ in range(1000):
        meter.news(Rates())
    assert has_news(meter), "a slower rank may be far behind"
    now[0] = 100.0
    meter.news(Rates())
    assert not has_news(meter)
    assert token_s(meter) == 0.001


def test_of_several_ranks_the_slowest_counts() -> None:
    """This one has made its part of both reads after 2 seconds; a slower one needs 4 for each."""
    now = [0.0]
    meter = Meter(clock=lambda: now[0])
    meter.has_several_ranks = True
    there = [0, 0]
    meter.storage_read(1000, lambda: there[0], 10.0, 11.0)
    meter.storage_read(1000, lambda: there[1], 11.0, 12.0)
    now[0] = 14.0
    there[0] = 1000
    assert token_s(meter) == 0.004
    now[0] = 18.0
    there[1] = 1000
    assert token_s(meter) == 0.004


def test_another_backend_is_measured_anew() -> None:
    meter = Meter()
    read(meter, 1000, 1.0)
    meter.storage_asked(1.0)
    meter.forget_storage()
    assert meter.rates() == Rates()


@settings(deadline=None)
@given(st.lists(SECONDS, max_size=60), SECONDS)
def test_whatever_was_measured_a_change_is_found_out_in_five_reads(
    before_s: list[float], now_s: float
) -> None:
    meter = Meter()
    for seconds in before_s:
        read(meter, 1000, seconds)
    for _ in range(5):
        read(meter, 1000, now_s)
    assert token_s(meter) == pytest.approx(now_s / 1000)


@settings(deadline=None)
@given(st.lists(SECONDS, min_size=1, max_size=40), st.floats(0, 1e3))
def test_the_median_is_one_of_its_values_and_no_single_one_moves_it_far(
    values: list[float], odd: float
) -> None:
    assert recent_median(values) in values
    same = [1.0] * 4
    assert recent_median([*same, odd]) == 1.0
    assert recent_median([odd, *same]) == 1.0


# ---- prefill ----


@settings(deadline=None)
@given(
    st.floats(0, 0.1),
    st.floats(1e-6, 1e-3),
    st.floats(0, 1e-8),
    st.lists(st.tuples(st.integers(16, 8192), st.integers(0, 30_000)), min_size=8, max_size=24, unique=True),
)
def test_batches_are_predicted_by_what_they_are_made_of(
    batch_s: float, each_s: float, pair_s: float, shapes: list[tuple[int, int]]
) -> None:
    fit = PrefillFit()
    for tokens, behind in islice(cycle(shapes), 48):
        prefilled(fit, tokens, behind, batch_s=batch_s, each_s=each_s, pair_s=pair_s)
    found = cost(fit)
    errors = []
    for tokens, behind in shapes:
        pairs = tokens * (behind + tokens / 2)
        true_s = batch_s + each_s * tokens + pair_s * pairs
        predicted_s = found.batch_s + found.token_s * tokens + found.pair_s * pairs
        errors.append((predicted_s / true_s - 1) ** 2)
    assert (sum(errors) / len(errors)) ** 0.5 < 0.15


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 60_000), SECONDS), min_size=1, max_size=60))
def test_a_cost_is_never_negative_whatever_was_seen(batches: list[tuple[int, int, float]]) -> None:
    fit = PrefillFit()
    for tokens, behind, seconds in batches:
        fit.add(tokens, tokens * (behind + tokens / 2), seconds)
    found = cost(fit)
    assert min(found.batch_s, found.token_s, found.pair_s) >= 0
    assert found.batch_s + found.token_s + found.pair_s < float("inf")
    assert found.batch_s + found.token_s + found.pair_s > 0
    assert found.longest_tokens == max(tokens for tokens, _, _ in batches)


def test_batches_of_one_size_say_nothing_about_attention() -> None:
    fit = PrefillFit()
    for _ in range(20):
        prefilled(fit, 4096, 0, batch_s=0.0, each_s=1e-4, pair_s=1e-9)
    found = cost(fit)
    assert found.batch_s == found.pair_s == 0
    assert found.added_s(4096, 0, None) == pytest.approx(4096 * 1e-4 + 4096**2 / 2 * 1e-9)


def test_batches_of_about_one_size_are_not_read_as_if_their_size_did_not_matter() -> None:
    fit = PrefillFit()
    for number in range(40):
        tokens = 4000 + 13 * (number % 8)
        fit.add(tokens, tokens * tokens / 2, 0.5 + 0.1 * (-1) ** number)
    assert cost(fit).added_s(4000, 0, None) == pytest.approx(0.5, rel=0.2)


def test_where_size_does_not_matter_a_recompute_costs_nothing() -> None:
    """As on a device that takes as long to launch a small batch as it takes to compute a larger one."""
    fit = PrefillFit()
    for number in range(40):
        fit.add((16, 128, 1024, 4096)[number % 4], 0.0, 0.045 + 0.001 * (-1) ** (number // 4))
    added_s = cost(fit).added_s(4080, 16, None)
    assert added_s is not None
    assert added_s < 0.005


def test_chunks_of_one_prompt_tell_attention_from_the_rest() -> None:
    """On an H200, 30,000 tokens of the 7B shape take 3.3 times as long as 16,000, so nearly all is attention there."""
    fit = PrefillFit()
    for _ in range(4):
        for chunk in range(4):
            prefilled(fit, 8192, chunk * 8192, batch_s=0.02, each_s=4e-6, pair_s=3.8e-9)
    found = cost(fit)
    assert found.pair_s == pytest.approx(3.8e-9, rel=0.1)
    predicted_s = found.added_s(30_000, 0, 8192)
    assert predicted_s is not None
    assert predicted_s == pytest.approx(3 * 0.02 + 30_000 * 4e-6 + 30_000**2 / 2 * 3.8e-9, rel=0.1)


def test_a_batch_whose_kernels_were_compiled_counts_for_little() -> None:
    fit = PrefillFit()
    fit.add(1000, 500_000, 30.0)
    for _ in range(3):
        fit.add(1000, 500_000, 0.1)
    predicted_s = cost(fit).added_s(1000, 0, None)
    assert predicted_s == pytest.approx(0.1, rel=0.01)


def test_a_batch_takes_from_its_launch_or_from_the_end_of_the_one_ahead_of_it() -> None:
    meter = Meter()
    meter.prefilled(1000, 500_000.0, launched_s=10.0, ended_s=11.0)
    meter.prefilled(1000, 500_000.0, launched_s=10.1, ended_s=12.0)
    meter.not_measured(ended_s=15.0)
    meter.prefilled(1000, 500_000.0, launched_s=12.0, ended_s=16.0)
    prefill = meter.rates().prefill
    assert prefill is not None
    assert prefill.token_s == pytest.approx(1e-3)


def test_ranks_are_told_of_what_matters_only() -> None:
    now = [0.0]
    meter = Meter(unix_clock=lambda: now[0])
    read(meter, 1000, 1.0)
    known = meter.news(Rates())
    assert known is not None
    read(meter, 1000, 1.01)
    assert meter.news(known) is None
    now[0] = 60.0
    read(meter, 1000, 1.0)
    fresh = meter.news(known)
    assert fresh is not None, "the last measurement is not an old one any more"
    assert fresh.restore is not None
    assert fresh.restore.measured_ts == 60.0
