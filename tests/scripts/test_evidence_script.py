import pytest

import evidence
from toolgap.bench.recipe import Figure


def figure(arm: str, gap_ms: float, p50: float | None) -> Figure:
    return Figure(
        run="r",
        hardware="h",
        model="m",
        prompt_tokens=4096,
        gap_ms=gap_ms,
        arm=arm,
        ttft_ms_p50=p50,
        ttft_ms_min=p50,
        ttft_ms_max=p50,
        trials=5,
        invalid=0,
    )


def test_a_cell_is_the_median_at_that_gap_or_at_none() -> None:
    figures = [figure("A", 0.0, 8000.0), figure("C", 0.0, 400.0), figure("C", 1000.0, 81.7)]
    assert evidence.cell(figures, "C", 1000.0) == "81.7 (5)"
    assert evidence.cell(figures, "A", 1000.0) == "8,000 (5)"
    assert evidence.cell(figures, "B", 1000.0) == "-"


def test_the_block_alone_is_replaced() -> None:
    text = f"before\n{evidence.BEGIN}\nold\n{evidence.END}\nafter\n"
    assert evidence.with_block(text, "new") == f"before\n{evidence.BEGIN}\nnew\n{evidence.END}\nafter\n"
    assert evidence.with_block(evidence.with_block(text, "new"), "new") == evidence.with_block(text, "new")
    with pytest.raises(ValueError, match="README has no"):
        evidence.with_block("nothing", "new")


def test_the_quoted_runs_are_there() -> None:
    present = {folder.name for folder in evidence.runs(evidence.ROOT / "evidence")}
    assert {name for name, _ in evidence.QUOTED} <= present
