#!/usr/bin/env python3
"""Verifies every run in evidence/, and that README and evidence/decisions.md say what they say.

usage: evidence.py [--write]      --write puts today's figures into both
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from toolgap.bench import hindsight, report, tables
from toolgap.bench.evidence import MANIFEST
from toolgap.bench.recipe import Figure
from toolgap.bench.storage import report as storage_report
from toolgap.bench.storage.records import SETUP
from toolgap.bench.verify import problems
from toolgap.gateway import policy_evidence

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- figures: begin (scripts/evidence.py writes them) -->", "<!-- figures: end -->"

QUOTED = (
    ("h200-7b-30000", 3000.0),
    ("h200-7b-16384", 1000.0),
    ("h200-1.5b-4096", 1000.0),
    ("cpu-matrix", 1000.0),
)
"""Runs that README quotes, and the gap of its columns."""

DECISIONS = "decisions.md"
"""What the admission rule would have decided in all of them."""


def runs(evidence: Path) -> list[Path]:
    """Every folder that holds a run."""
    return sorted(manifest.parent for manifest in evidence.glob(f"*/{MANIFEST}"))


def cell(figures: Sequence[Figure], arm: str, gap_ms: float) -> str:
    """An arm's median at a gap, or at no gap where it was measured there only; with its trials."""
    for wanted in (gap_ms, 0.0):
        for figure in figures:
            if (figure.arm, figure.gap_ms) == (arm, wanted) and figure.ttft_ms_p50 is not None:
                return f"{tables.number(figure.ttft_ms_p50)} ({figure.trials})"
    return "-"


def block(evidence: Path) -> str:
    """README's table."""
    rows = []
    for name, gap_ms in QUOTED:
        figures = report.figures(evidence / name)
        first = figures[0]
        rows.append(
            [
                f"[{first.hardware}](evidence/{name}/report.md), {first.model}",
                f"{first.prompt_tokens:,}",
                *(cell(figures, arm, gap_ms) for arm in ("A", "B", "C")),
                cell(figures, "C", 0.0),
                cell(figures, "L2", gap_ms),
            ]
        )
    head = ["TTFT, ms", "tokens", "A recompute", "B on request", "**C ahead**", "C, no gap", "L2 bound"]
    return tables.table(head, rows)


def with_block(text: str, made: str) -> str:
    """A text with its figures replaced.

    Raises:
        ValueError: it has no place for them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    evidence, readme = ROOT / "evidence", ROOT / "README.md"
    failed = 0
    found = runs(evidence)
    if not found:
        print("evidence/ holds no run", file=sys.stderr)
        return 1
    for folder in found:
        wrong = problems(folder)
        failed += bool(wrong)
        print(f"{folder.relative_to(ROOT)}: {'verified' if not wrong else 'NOT verified'}")
        for problem in wrong:
            print(f"  {problem}")
    for folder in sorted(setup.parent for setup in evidence.glob(f"*/{SETUP}")):
        wrong = storage_report.problems(folder)
        failed += bool(wrong)
        print(f"{folder.relative_to(ROOT)}: {'verified' if not wrong else 'NOT verified'}")
        for problem in wrong:
            print(f"  {problem}")
    text = readme.read_text(encoding="utf-8")
    quoted = with_block(text, block(evidence))
    if "--write" in arguments:
        readme.write_text(quoted, encoding="utf-8")
    elif quoted != text:
        failed += 1
        print("README.md does not quote evidence/ as it is: scripts/evidence.py --write", file=sys.stderr)
    decided, page = hindsight.page(evidence), evidence / DECISIONS
    if "--write" in arguments:
        page.write_text(decided, encoding="utf-8")
    elif not page.is_file() or page.read_text(encoding="utf-8") != decided:
        failed += 1
        print(
            f"evidence/{DECISIONS} is not what the trials say: scripts/evidence.py --write", file=sys.stderr
        )
    simulated = evidence / policy_evidence.FOLDER
    if "--write" in arguments:
        policy_evidence.write(simulated)
    wrong = policy_evidence.problems(simulated)
    failed += bool(wrong)
    print(f"{simulated.relative_to(ROOT)}: {'verified' if not wrong else 'NOT verified'}")
    for problem in wrong:
        print(f"  {problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
