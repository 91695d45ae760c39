"""The demo on real servers: from its arguments to its exit code, and what it leaves behind."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Server, until

from toolgap.childserver import session_members
from toolgap.demo import play, report
from toolgap.demo.main import run
from toolgap.signals import Stopped
from toolgap.terminal import Exit

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def open_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(model, tmp_path_factory.mktemp("open"), admin_key=None) as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "GAP_S", 0.0)
    monkeypatch.setenv("COLUMNS", "200")


def demo(output: Path, server: Server, *, prompt_tokens: int = 1024, trials: int = 1) -> int:
    server.probe.reset()
    return run(prompt_tokens, trials, output, url=server.url)


def test_a_demo_on_a_running_server(
    open_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(tmp_path, open_server, trials=2) == 0
    printed = capsys.readouterr().out
    assert "Every invariant held" in printed
    assert "The demo flushes this server's L1 and L2" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["sglang"] == "0.5.23"
    assert results["prefix_tokens"] >= 1024
    assert [(t["number"], t["arm"]) for t in results["trials"]] == [
        *((1, arm) for arm in "ABC"),
        *((2, arm) for arm in "BCA"),
    ]
    assert results["tool_output"].endswith("OK")


def test_an_invariant_that_does_not_hold_is_named(
    open_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_server.probe.reset()
    open_server.probe.spoil("exists", "fail")
    try:
        assert run(1024, 1, tmp_path, url=open_server.url) == Exit.FAILED
    finally:
        open_server.probe.reset()
    printed = capsys.readouterr().out
    assert "Invariant failed: restore_on_request_reads_l3 (trial 1)" in printed
    assert "Invariant failed: restored_before_continuation (trial 1): the operation is failed" in printed
    assert "Every invariant held" not in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert not results["invariants"]["continuation_served_from_l2"]["held"]


@pytest.mark.parametrize(
    ("prompt_tokens", "trials", "message"),
    [
        (511, 1, "512 tokens at least"),
        (1024, 0, "at least one trial"),
        (8100, 1, "at most"),
    ],
)
def test_arguments_that_cannot_be_used(
    open_server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prompt_tokens: int,
    trials: int,
    message: str,
) -> None:
    assert demo(tmp_path, open_server, prompt_tokens=prompt_tokens, trials=trials) == Exit.USAGE
    assert message in capsys.readouterr().out


def test_a_fault_leaves_its_traceback_in_a_file_only(
    open_server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "sentence", lambda summaries: 1 / 0)
    assert demo(tmp_path, open_server) == Exit.FAULT
    printed = capsys.readouterr().out
    assert "ZeroDivisionError: division by zero" in printed
    assert "Traceback" not in printed
    assert "Traceback" in (tmp_path / "error.txt").read_text()


def test_a_signal_stops_the_demo(
    open_server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_arguments: object) -> None:
        raise Stopped(15)

    monkeypatch.setattr(play.Agent, "trial", stop)
    assert demo(tmp_path, open_server) == 143
    assert "Stopped by SIGTERM" in capsys.readouterr().out


def own(model: Path, output: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "toolgap", "demo", "--cpu", "--model", str(model)]
    command += ["--prompt-tokens", "1024", "--trials", "1", "--output", str(output)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def servers_of(output: Path) -> list[int]:
    """Sessions of servers whose log is in the folder."""
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if str(output) in _environment(process) and session_members(int(process.name))
    ]


def _environment(process: Path) -> str:
    try:
        return (process / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_a_demo_that_starts_its_own_server_ends_it(model: Path, tmp_path: Path) -> None:
    process = own(model, tmp_path)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    assert "Every invariant held" in printed
    assert {"results.json", "table.txt", "chart.png", "chart.svg", "server.log"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert not servers_of(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "the L3 folder is gone"


def test_an_interrupted_demo_leaves_nothing_running(model: Path, tmp_path: Path) -> None:
    process = own(model, tmp_path)
    until("its server runs", lambda: servers_of(tmp_path))
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate()
    assert process.returncode == 130, printed
    assert "Stopped by SIGINT" in printed
    assert not servers_of(tmp_path)
