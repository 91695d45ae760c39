"""The child server's life, with a stand-in that starts a process of its own as SGLang does."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from toolgap import childserver as server_module
from toolgap.childserver import ChildServer, ServerError, free_port, session_members

STAND_IN = """
import http.server, signal, subprocess, sys
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
print("listening on", sys.argv[1], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""

Start = Callable[..., ChildServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[ChildServer] = []

    def start(kind: str = "plain", grace_s: float = 20.0) -> ChildServer:
        port = free_port()
        server = ChildServer(
            command=[sys.executable, "-S", "-c", STAND_IN, str(port), kind],
            health_url=f"http://127.0.0.1:{port}/",
            log=tmp_path / "server.log",
            grace_s=grace_s,
        )
        started.append(server)
        server.start()
        server.wait_until_healthy(60.0)
        return server

    yield start
    for server in started:
        server.end()


def gone(pids: list[int]) -> bool:
    """Whether none of these runs; one that waits for its parent to notice has ended."""
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            return False
    return True


def test_the_end_of_the_server_is_the_end_of_all_it_started(start: Start) -> None:
    server = start()
    members = server.members()
    assert server.pid in members
    assert len(members) == 2
    server.end()
    assert server.members() == []
    assert gone(members)


def test_a_server_that_ignores_sigterm_is_killed(start: Start) -> None:
    server = start("stubborn", grace_s=0.0)
    members = server.members()
    server.end()
    assert gone(members)


def test_what_outlives_its_parent_is_found(start: Start) -> None:
    server = start()
    members = server.members()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    os.waitpid(server.pid, 0)
    assert not gone(members)
    server.end()
    assert gone(members)


def test_end_may_be_called_again_and_before_the_start(start: Start, tmp_path: Path) -> None:
    server = start()
    server.end()
    server.end()
    ChildServer(command=["true"], health_url="http://127.0.0.1:1/", log=tmp_path / "never.log").end()


def test_an_exception_in_the_block_ends_the_server(tmp_path: Path) -> None:
    port = free_port()
    server = ChildServer(
        command=[sys.executable, "-S", "-c", STAND_IN, str(port), "plain"],
        health_url=f"http://127.0.0.1:{port}/",
        log=tmp_path / "server.log",
    )
    members: list[int] = []

    def play() -> None:
        with server:
            server.wait_until_healthy(60.0)
            members.extend(server.members())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play()
    assert len(members) == 2
    assert gone(members)


def test_a_server_that_ends_early_shows_the_end_of_its_log(tmp_path: Path) -> None:
    script = "print('the model is missing'); raise SystemExit(3)"
    server = ChildServer(
        command=[sys.executable, "-S", "-c", script],
        health_url=f"http://127.0.0.1:{free_port()}/",
        log=tmp_path / "server.log",
    )
    with server, pytest.raises(ServerError, match=r"(?s)exit status 3.*the model is missing"):
        server.wait_until_healthy(60.0)


def test_a_server_that_was_killed_is_named_with_its_signal(start: Start) -> None:
    server = start()
    server.check_running()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ServerError, match="by SIGKILL"):
        server.check_running()


def test_a_server_that_never_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_S", 0.0)
    seen: list[str] = []
    server = ChildServer(
        command=[sys.executable, "-S", "-c", "import signal; signal.pause()"],
        health_url=f"http://127.0.0.1:{free_port()}/",
        log=tmp_path / "server.log",
    )
    with server, pytest.raises(ServerError, match=r"(?s)not healthy after 0 s.*\(nothing\)"):
        server.wait_until_healthy(0.0, seen.append)


def test_progress_is_the_end_of_the_log(start: Start) -> None:
    assert "listening on" in start().log_tail()


def test_session_members_read_any_name_and_leave_out_what_has_ended(tmp_path: Path) -> None:
    for pid, text in {
        10: "10 (python) S 1 10 10 0",
        11: "11 (a ) b) R 10 10 10 0",
        12: "12 (python) Z 10 10 10 0",
        13: "13 (other) S 1 13 13 0",
        14: "",
    }.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(text)
    assert sorted(session_members(10, tmp_path)) == [10, 11]


def test_session_members_of_this_machine() -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert session_members(child.pid) == [child.pid]
    finally:
        child.kill()
        child.wait()
    assert session_members(child.pid) == []


def test_a_free_port_is_none_that_connections_get(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    assert all(10_000 <= port < first for port in ports)

    # One after the other is taken.
    (tmp_path / "range").write_text("10003\t60999\n")
    monkeypatch.setattr(server_module, "_PORT_RANGE", tmp_path / "range")
    with ExitStack() as taken:
        for _ in range(3):
            listener = taken.enter_context(socket.socket())
            listener.bind(("127.0.0.1", free_port()))
            listener.listen()
            assert listener.getsockname()[1] in range(10_000, 10_003)
        assert free_port() >= 10_003
    # None is kept from connections, or nobody tells.
    for text in ("1024\t65535\n", "what?"):
        (tmp_path / "range").write_text(text)
        assert free_port() >= 1024
