"""What the demo says when it cannot go on, before it has a server."""

from pathlib import Path

import pytest

from toolgap.childserver import free_port
from toolgap.demo import main
from toolgap.demo.main import run
from toolgap.terminal import Exit


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def demo(output: Path, url: str | None, *, prompt_tokens: int = 1024, trials: int = 2) -> int:
    return run(prompt_tokens, trials, output, url=url)


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(tmp_path, f"http://127.0.0.1:{free_port()}") == Exit.UNREACHABLE
    assert "The demo cannot go on: no answer from" in capsys.readouterr().out


def test_a_url_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(tmp_path, "foo") == Exit.USAGE
    assert "cannot go on: 'foo' is no URL of a server: write one like http://" in capsys.readouterr().out


def test_a_running_server_has_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(1024, 1, tmp_path, model="other", url="http://127.0.0.1:1") == Exit.USAGE
    assert "leave those options out" in capsys.readouterr().out


def test_an_output_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert demo(tmp_path / "file", None) == Exit.USAGE
    assert "cannot write to" in capsys.readouterr().out


def test_the_log_of_a_starting_server_is_put_in_words() -> None:
    assert main._meaning("") == "importing"
    assert main._meaning("Load weight begin.\nLoad weight end.") == "allocating L1"
    assert main._meaning("Load weight begin.\n... hierarchical KV host pool: 9 tokens") == "allocating L2"
