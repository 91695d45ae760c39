"""Every example runs as written, with the real agent library, against a real server."""

import json
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


def test_an_end_restores_what_left_memory_while_the_tool_ran(url: str) -> None:
    """The agent's tool flushes L1 and L2: what its end restores comes from L3, and the continuation uses it."""
    script = EXAMPLES.parent / "tests" / "hooks" / "flushing_agent.py"
    output = run_example(script, url)
    outcome = json.loads(output.splitlines()[-1])
    # The tool's result, at the end of the prefix, was never in storage.
    assert outcome["reason"] in ("complete", "storage_shortfall")
    assert outcome["inserted_tokens"] == outcome["found_tokens"] > 0
    assert outcome["used_tokens"] == outcome["inserted_tokens"]
    assert outcome["matched_tokens"] == outcome["requested_tokens"]
    assert outcome["first_divergent_token"] is None


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= LONGEST_LINES
