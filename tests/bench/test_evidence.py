import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from bench_trials import PLAN, manifest, run, trial, trials

from toolgap.bench import charts, report
from toolgap.bench.errors import BenchError
from toolgap.bench.evidence import MANIFEST, REPORT, TRIALS, Evidence
from toolgap.bench.records import Trial
from toolgap.bench.verify import problems

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose report and charts are made; charts take a second, so they are made once."""
    made = run(tmp_path_factory.mktemp("verified"))
    report.make(made)
    return made


@pytest.fixture
def folder(verified: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(verified, tmp_path / verified.name))


def test_what_was_measured_is_verified(folder: Path) -> None:
    assert problems(folder) == []
    assert {path.name for path in folder.iterdir()} == {
        MANIFEST,
        TRIALS,
        REPORT,
        "ttft-4096.png",
        "ttft-4096.svg",
    }


NUMBER = re.compile(rb"(?<![\w\"])\d+\.?\d*(?![\w\"])")


@pytest.mark.parametrize("which", range(40))
def test_any_edited_number_of_the_trials_is_found(folder: Path, which: int) -> None:
    path = folder / TRIALS
    content = path.read_bytes()
    found = list(NUMBER.finditer(content))
    match = found[which * len(found) // 40]
    path.write_bytes(content[: match.start()] + b"7654" + content[match.end() :])
    assert problems(folder)


@pytest.mark.parametrize("which", range(40))
def test_any_edited_number_of_the_report_is_found(folder: Path, which: int) -> None:
    path = folder / REPORT
    content = path.read_bytes()
    found = list(NUMBER.finditer(content))
    match = found[which * len(found) // 40]
    path.write_bytes(content[: match.start()] + b"7654" + content[match.end() :])
    assert any(REPORT in problem for problem in problems(folder))


def edit(path: Path, change: Callable[[str], str]) -> None:
    before = path.read_text()
    after = change(before)
    assert after != before
    path.write_text(after)


def test_an_edited_manifest_is_found(folder: Path) -> None:
    edit(folder / MANIFEST, lambda text: text.replace("a CPU, 2 cores", "a CPU, 3 cores"))
    assert problems(folder)


def test_a_chart_of_other_trials_is_found(folder: Path) -> None:
    for ending in charts.ENDINGS:
        (folder / f"ttft-4096{ending}").write_bytes(b"something else")
    assert problems(folder) == [
        "ttft-4096.png: not drawn from these trials",
        "ttft-4096.svg: not drawn from these trials",
    ]


def test_a_verdict_that_was_changed_is_found_even_if_the_report_was_made_again(tmp_path: Path) -> None:
    made = trials()
    made[0].output_ids = [5]
    folder = run(tmp_path, made)
    report.make(folder)
    assert any("noted as valid" in problem for problem in problems(folder))


def test_trials_outside_the_plan_or_twice_are_found(tmp_path: Path) -> None:
    made = trials()
    folder = run(tmp_path, [*made, made[0], trial("C", 77.0)])
    report.make(folder)
    found = problems(folder)
    assert any("there 2 times" in problem for problem in found)
    assert any("not in the plan" in problem for problem in found)


def test_an_invalid_trial_is_kept_named_and_in_no_median(tmp_path: Path) -> None:
    made = trials()
    slow = next(one for one in made if one.cell.arm == "C" and one.cell.gap_ms == 0 and one.round == 1)
    slow.ttft_ms, slow.output_ids, slow.invalid = 9e9, [5], ["output: [5] and not [1, 2]"]
    folder = run(tmp_path, made)
    report.make(folder)
    assert problems(folder) == []
    assert f"`{slow.trial_id}`: output: [5]" in (folder / REPORT).read_text()
    figure = next(f for f in report.figures(folder) if (f.arm, f.gap_ms) == ("C", 0))
    assert (figure.ttft_ms_p50, figure.ttft_ms_max, figure.trials, figure.invalid) == (200.0, 200.0, 1, 1)


def test_what_was_not_played_is_said(tmp_path: Path) -> None:
    made = trials()
    folder = run(tmp_path, made[:-1])
    report.make(folder)
    assert f"`{made[-1].trial_id}`" in (folder / REPORT).read_text()


def test_figures_have_the_published_fields(folder: Path) -> None:
    figures = json.loads(msgspec.json.encode(report.figures(folder)))
    assert len(figures) == len(PLAN.arms) * len(PLAN.gaps_ms)
    assert figures[0] == {
        "run": "a-run",
        "hardware": "a CPU, 2 cores",
        "model": "a-model",
        "prompt_tokens": 4096,
        "gap_ms": 0.0,
        "arm": "A",
        "ttft_ms_p50": 8000.5,
        "ttft_ms_min": 8000.0,
        "ttft_ms_max": 8001.0,
        "trials": 2,
        "invalid": 0,
    }


# ---- a run that is stopped, and goes on ----


def test_a_killed_run_goes_on_without_its_torn_line(tmp_path: Path) -> None:
    made = trials()
    folder = run(tmp_path, made[:3])
    with (folder / TRIALS).open("ab") as file:
        file.write(b'{"trial_id": "r0-4096')
    evidence = Evidence.open(folder, Trial, manifest())
    assert [one.trial_id for one in evidence.trials] == [one.trial_id for one in made[:3]]
    evidence.append(made[3])
    assert len(Evidence.load(folder, Trial).trials) == 4


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"plan": msgspec.structs.replace(PLAN, seed=2)}, "plan.seed"),
        ({"toolgap_sha256": {"cli.py": "01"}}, "toolgap_sha256.cli.py"),
        ({"sglang_sha256": {}}, "sglang_sha256.srt/a.py"),
        ({"server_arguments": []}, "server_arguments"),
        ({"software": {"sglang": "0.5.24"}}, "software.sglang"),
        ({"hardware": {}}, "hardware.cpu"),
        ({"model": "another"}, "model"),
    ],
)
def test_a_run_does_not_go_on_under_other_code_or_flags(
    tmp_path: Path, changed: dict[str, object], named: str
) -> None:
    folder = run(tmp_path, trials()[:3])
    with pytest.raises(BenchError, match=re.escape(named)):
        Evidence.open(folder, Trial, manifest(**changed))


def test_a_folder_without_a_run_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="holds no run"):
        report.load(tmp_path)
    assert problems(tmp_path) != []


def test_a_damaged_line_is_named(folder: Path) -> None:
    edit(folder / TRIALS, lambda text: text.replace('"round":0', '"round":"x"', 1))
    assert "line 1" in problems(folder)[0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [([], "all are exactly as in its package"), (["srt/a.py"], "in its package: srt/a.py")],
)
def test_the_report_says_whether_sglang_is_as_in_its_package(
    tmp_path: Path, changed: list[str], said: str
) -> None:
    folder = run(tmp_path)
    content = msgspec.json.encode(manifest(sglang_files_changed=changed))
    (folder / MANIFEST).write_bytes(content)
    report.make(folder)
    assert said in (folder / REPORT).read_text()
    assert problems(folder) == []
