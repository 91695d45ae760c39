"""Recomputes a run's validity, report and figures from its trials, and compares."""

import difflib
from collections import Counter
from pathlib import Path

from toolgap.bench import charts, gateway_evidence, report
from toolgap.bench.errors import BenchError
from toolgap.bench.evidence import REPORT, TRIALS, sha256


def problems(folder: Path) -> list[str]:
    """What does not agree with the trials; empty if everything does."""
    if gateway_evidence.is_one(folder):
        return gateway_evidence.problems(folder)
    try:
        recipe, evidence = report.load(folder)
    except BenchError as error:
        return [str(error)]
    if not evidence.trials:
        return [f"{folder} has no trials"]
    found = []
    manifest = evidence.manifest
    if manifest.run != folder.resolve().name:
        found.append(f"the manifest is that of the run {manifest.run!r}")
    planned = set(recipe.planned(manifest.plan))
    times = Counter(trial.trial_id for trial in evidence.trials)
    found += [f"trial {trial_id}: not in the plan" for trial_id in times if trial_id not in planned]
    found += [f"trial {trial_id}: there {count} times" for trial_id, count in times.items() if count > 1]
    for trial in evidence.trials:
        if (judged := recipe.judge(trial)) != (noted := trial.invalid):
            found.append(f"trial {trial.trial_id}: noted as {noted or 'valid'}, and is {judged or 'valid'}")
    try:
        written = (folder / REPORT).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return [*found, f"{REPORT}: {error}"]
    if (expected := report.text(recipe, evidence)) != written:
        lines = difflib.unified_diff(
            expected.splitlines(), written.splitlines(), "recomputed", REPORT, n=0, lineterm=""
        )
        found.append("\n".join([f"{REPORT} is not what the trials give:", *list(lines)[:12]]))
    digest = sha256(folder / TRIALS)
    found += [
        f"{path.name}: not drawn from these trials" for path in charts.unmarked(_charts(folder), digest)
    ]
    return found


def _charts(folder: Path) -> list[Path]:
    """The charts that the run should have; those that are there where none can be drawn."""
    if not charts.available():
        return sorted(path for ending in charts.ENDINGS for path in folder.glob(f"*{ending}"))
    recipe, evidence = report.load(folder)
    names = recipe.charts(evidence.manifest, evidence.trials)
    return [folder / f"{name}{ending}" for name in names for ending in charts.ENDINGS]
