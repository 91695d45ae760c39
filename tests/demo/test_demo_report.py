import json
import sys
from pathlib import Path

import pytest
from demo_trials import good_trials, trial

from toolgap.demo import report
from toolgap.demo.trials import Arm, Spread, Trial, check, summarize

TITLE = "a model on stock SGLang\na CPU [2 cores]"


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    slow = [trial(Arm.RECOMPUTE, number, ttft_s=28.123 + number) for number in (1, 2, 3)]
    text = report.table_text(summarize([*good_trials(), *slow]), TITLE)
    lines = text.splitlines()
    assert lines[:2] == TITLE.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line[0]: line.split() for line in lines if line[:3] in ("A  ", "B  ", "C  ")}
    assert rows["B"][-5:] == ["0", "0", "4,096", "-", "yes"]
    assert rows["C"][-6:] == ["0", "4,096", "0", "0.18", "s", "yes"]
    assert "median [min, max]" in text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (Spread(0.24, 0.2, 0.3), "0.24 s [0.20, 0.30]"),
        (Spread(29.03, 26.8, 131.3), "29.0 s [26.8, 131]"),
        (Spread(0.035, 0.0345, 0.112), "35.0 ms [34.5, 112]"),
    ],
)
def test_spread(values: Spread, text: str) -> None:
    assert report.spread(values) == text


def test_counts_that_differ_between_trials_show_their_range() -> None:
    assert report.tokens((16, 4096)) == "16 to 4,096"
    assert report.tokens((4096, 4096)) == "4,096"


def sentence(*changed: Trial) -> str:
    replaced = {(t.number, t.arm): t for t in [*good_trials(), *changed]}
    return report.sentence(summarize(list(replaced.values())))


def test_the_sentence_gives_the_medians_and_their_ratios() -> None:
    text = sentence()
    assert "(C), the continuation's first token came after 0.20 s" in text
    assert "B took 2.0 times as long as C. A took 45 times as long as C." in text
    assert text.endswith("The greedy output was identical in all arms.")


def test_the_sentence_claims_nothing_when_ranges_overlap() -> None:
    text = sentence(trial(Arm.AHEAD, 2, ttft_s=0.5))
    assert "The ranges of B and C overlap" in text
    assert "B took" not in text


def test_the_sentence_says_when_restoring_was_slower() -> None:
    text = sentence(*(trial(Arm.RECOMPUTE, number, ttft_s=0.05) for number in (1, 2, 3)))
    assert "C was slower than A here." in text


def test_the_sentence_says_when_outputs_differ() -> None:
    assert sentence(trial(Arm.ON_REQUEST, 3, output_ids=[7])).endswith("NOT identical in all arms.")


def test_the_chart_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "chart.png", tmp_path / "chart.svg"]
    trials = good_trials()
    assert report.write_chart(summarize(trials), trials, TITLE, paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[1].read_text()


def test_no_chart_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trials = good_trials()
    assert not report.write_chart(summarize(trials), trials, TITLE, [tmp_path / "chart.png"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.15, 12.0, [0.2, 0.5, 1, 2, 5, 10]), (0.9, 1.1, [1.0]), (3.0, 4.0, [])]
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert report.ticks(low, high) == expected


def test_results_hold_every_trial_and_name_what_failed(tmp_path: Path) -> None:
    trials = [*good_trials(1), trial(Arm.RECOMPUTE, 2, cached=(0, 0, 16))]
    path = tmp_path / "results.json"
    report.write_results(path, {"model": "m"}, trials, summarize(trials), check(trials))
    document = json.loads(path.read_text())
    assert document["model"] == "m"
    assert [t["arm"] for t in document["trials"]] == ["A", "B", "C", "A"]
    assert document["trials"][2]["restore"]["state"] == "restored"
    assert document["trials"][1]["generation"]["storage_tokens"] == 4096
    assert document["summaries"][0]["ttft_s"] == {"median": 9.0, "low": 9.0, "high": 9.0}
    failed = [name for name, invariant in document["invariants"].items() if not invariant["held"]]
    assert failed == ["recompute_finds_nothing"]
    assert document["invariants"]["same_output"]["held"]
