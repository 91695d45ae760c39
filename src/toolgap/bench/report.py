"""``report.md`` and the charts of a run, made from its manifest and trials alone."""

from pathlib import Path
from typing import Any

from toolgap.bench import charts, tables
from toolgap.bench.errors import BenchError
from toolgap.bench.evidence import MANIFEST, REPORT, TRIALS, Evidence, Manifest, read_manifest, sha256, write
from toolgap.bench.recipe import Figure, Recipe
from toolgap.bench.recipes import RECIPES


def load(folder: Path) -> tuple[Recipe[Any], Evidence[Any]]:
    """Read a run and find its recipe.

    Raises:
        BenchError: there is no run, or one of a recipe that this release does not know.
    """
    name = read_manifest(folder).plan.recipe
    if name not in RECIPES:
        raise BenchError(
            f"{folder} is a run of the recipe {name!r}, which this release of toolgap does not know"
        )
    recipe = RECIPES[name]
    return recipe, Evidence.load(folder, recipe.trial_type)


def text(recipe: Recipe[Any], evidence: Evidence[Any]) -> str:
    """The report, whole: the same bytes for the same manifest and trials."""
    manifest, trials = evidence.manifest, evidence.trials
    plan, folder = manifest.plan, evidence.folder
    invalid = [(trial.trial_id, recipe.judge(trial)) for trial in trials]
    invalid = [(trial_id, reasons) for trial_id, reasons in invalid if reasons]
    planned = recipe.planned(plan)
    played = {trial.trial_id for trial in trials}
    cut = [trial_id for trial_id in planned if trial_id not in played]
    facts = [
        ["recipe", f"{recipe.name}: {recipe.says}"],
        ["hardware", tables.hardware(manifest)],
        ["model", manifest.model],
        ["SGLang", manifest.software.get("sglang", "unknown")],
        ["page", f"{plan.page_tokens} tokens"],
        ["page cache", plan.page_cache],
        ["seed", str(plan.seed)],
        ["began", manifest.began],
        ["trials", f"{len(trials)} of {len(planned)} planned, {len(invalid)} of them invalid"],
    ]
    parts = [
        f"# {manifest.run}",
        "Made by `toolgap bench report` from `manifest.json` and `trials.jsonl` alone; `toolgap bench verify` "
        "makes it again and compares.",
        tables.table(["", ""], facts),
        recipe.report(manifest, trials),
        "## What differs from a stock installation",
        "\n".join(f"- {line}" for line in [*manifest.differences_from_stock, _sglang_files(manifest)]),
        "## Left out of the medians",
        "\n".join(f"- `{trial_id}`: {'; '.join(reasons)}" for trial_id, reasons in invalid) or "No trial.",
        "## Planned and not played",
        ", ".join(f"`{trial_id}`" for trial_id in cut) or "No trial.",
        "## Digests",
        "\n".join(f"- `{name}`: SHA-256 `{sha256(folder / name)}`" for name in (MANIFEST, TRIALS)),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _sglang_files(manifest: Manifest) -> str:
    if not manifest.sglang_files_changed:
        return "SGLang's files: none; all are exactly as in its package"
    return f"SGLang's files that are missing or not as in its package: {', '.join(manifest.sglang_files_changed)}"


def make(folder: Path) -> list[Path]:
    """Write the report and, where matplotlib is installed, the charts of a run; the files written.

    Raises:
        BenchError: the folder holds no run, or no trial.
    """
    recipe, evidence = load(folder)
    if not evidence.trials:
        raise BenchError(f"{folder} has no trials yet")
    written = [folder / REPORT]
    write(folder / REPORT, text(recipe, evidence).encode())
    if charts.available():
        figures = recipe.charts(evidence.manifest, evidence.trials)
        written += charts.save(folder, figures, sha256(folder / TRIALS))
    return written


def figures(folder: Path) -> list[Figure]:
    """The medians of a run by cell.

    Raises:
        BenchError: the folder holds no run.
    """
    recipe, evidence = load(folder)
    return recipe.figures(evidence.manifest, evidence.trials)
