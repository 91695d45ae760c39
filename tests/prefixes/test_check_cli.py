"""The command without a server: what it says of input that it cannot use."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from toolgap.childserver import free_port
from toolgap.cli import app
from toolgap.terminal import Exit

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def run(*arguments: str, given: str | None = None) -> Result:
    result = CliRunner().invoke(app, ["check-prefix", *arguments], input=given)
    assert "Traceback" not in result.output
    return result


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("nonsense", "no JSON"),
        ("[]", "no two turns"),
        (json.dumps([BODY]), "no two turns"),
        (json.dumps([BODY, {"prompt": "x"}]), "element 2"),
        (
            json.dumps({"session": "a", "request": BODY}) + "\n" + json.dumps({"request": BODY}),
            "no two turns",
        ),
    ],
)
def test_input_that_holds_no_turns(given: str, complaint: str) -> None:
    result = run("-", given=given)
    assert result.exit_code == Exit.USAGE
    assert complaint in result.stderr


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    result = run(str(tmp_path / "none.json"))
    assert result.exit_code == Exit.USAGE
    assert "cannot read" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("--min-share", "1.5"), ("--api", "cohere"), ("--url", "nowhere"), ("--session", "none")]
)
def test_options_that_cannot_be_used(arguments: tuple[str, ...]) -> None:
    assert run("-", *arguments, given=json.dumps([BODY, BODY])).exit_code == Exit.USAGE


def test_no_server() -> None:
    result = run("-", "--url", f"http://127.0.0.1:{free_port()}", given=json.dumps([BODY, BODY]))
    assert result.exit_code == Exit.UNREACHABLE
    assert "Is the server up" in result.stderr
