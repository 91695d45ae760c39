"""Every example runs as written, with the real agent library, against a real server."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from examples import EXAMPLES, PYTHON, example_server, run_example

pytestmark = pytest.mark.engine

LONGEST_LINES = 39


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not PYTHON.exists():
        root = EXAMPLES.parent
        subprocess.run(["python3", str(root / "scripts" / "environment.py"), "--agents"], check=True)
    with example_server(tmp_path_factory.mktemp("examples")) as url:
        yield url


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_runs_and_something_is_restored_for_it(example: Path, url: str) -> None:
    output = run_example(example, url)
    assert "restored" in output
    assert " used" in output


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= LONGEST_LINES
