"""The admission rule, replayed on trials: it knows what was measured before each, and no more."""

import random
from pathlib import Path

from bench_trials import operation, trial

from toolgap.bench.hindsight import page, with_decisions
from toolgap.bench.records import Trial


def recompute(number: int, prefill_s: float) -> Trial:
    times = {"forward_entry_time": number * 10.0, "prefill_finished_time": number * 10.0 + prefill_s}
    return trial("A", round_number=number, began_ts=number * 10.0, sent_ts=number * 10.0, times=times)


def ahead(number: int, gap_ms: float, read_s: float) -> Trial:
    return trial(
        "C",
        gap_ms=gap_ms,
        round_number=number,
        began_ts=number * 10.0,
        sent_ts=number * 10.0,
        times={},
        operation=operation(read_s=read_s),
    )


RUN = [
    recompute(1, 0.2),
    ahead(2, 0.0, 1.0),
    recompute(3, 0.2),
    ahead(4, 0.0, 1.0),
    ahead(5, 1000.0, 1.0),
]


def test_what_was_not_measured_yet_is_admitted() -> None:
    first = with_decisions(RUN)[1].asked
    assert first is not None
    assert (first.admitted, first.estimate) == (True, None)


def test_slow_storage_is_declined_unless_the_gap_hides_it() -> None:
    soon, later = (trial.asked for trial in with_decisions(RUN)[3:])
    assert soon is not None
    assert later is not None
    assert soon.estimate is not None
    assert (soon.admitted, soon.code, later.admitted) == (False, "not_worthwhile", True)
    # The longer ago storage was read, the faster it may have become.
    assert 0.7 < soon.estimate.restore_s < 1.0
    assert 0.1 < soon.estimate.recompute_s < 0.3


def test_the_order_of_the_lines_does_not_matter_and_later_trials_change_nothing() -> None:
    shuffled = list(RUN)
    random.Random(1).shuffle(shuffled)
    assert with_decisions(shuffled) == with_decisions(RUN)
    assert with_decisions(RUN[:4]) == with_decisions(RUN)[:4]


def test_a_folder_without_runs_has_a_page_without_tables(tmp_path: Path) -> None:
    assert "|" not in page(tmp_path)
