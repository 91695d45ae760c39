"""A child server's life: started in a session of its own, watched until it is healthy, ended whole.

Whatever the child starts stays in its session, also after its parent has gone, so that the end of the
session is the end of all of it.
"""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Self

import httpx

POLL_S = 0.1
LOG_LINES = 12
KILL_DEADLINE_S = 30.0
LOG_TAIL_BYTES = 65_536
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000
_PORTS_TRIED = 100


class ServerError(RuntimeError):
    """The server ended, or never became healthy."""


@dataclass
class ChildServer:
    """A server process and all that it starts; a context manager that starts and ends it.

    Contract: when :meth:`end` returns, no process of the child's session is left, however it ended.
    """

    command: Sequence[str]
    health_url: str
    """Answers 200 once the server serves."""
    log: Path
    """Takes what the server prints; what it held before is lost."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    grace_s: float = 10.0
    """How long it may take to end by itself after SIGTERM."""
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False, repr=False)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    @property
    def pid(self) -> int | None:
        """The child's process id, which is also its session's; None before it is started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server; does not wait for it."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def wait_until_healthy(self, timeout_s: float, watch: Callable[[str], None] | None = None) -> None:
        """Wait until the server answers its health check with 200.

        Args:
            timeout_s: How long that may take.
            watch: Called now and then with the end of the log, to show progress.

        Raises:
            ServerError: it ended, or the time is up.
        """
        end = time.monotonic() + timeout_s
        # A proxy named in the environment is for servers elsewhere.
        with httpx.Client(timeout=5.0, trust_env=False) as http:
            while not self._healthy(http):
                self.check_running()
                if time.monotonic() > end:
                    self._fail(f"the server is not healthy after {timeout_s:g} s")
                if watch is not None:
                    watch(self.log_tail())
                time.sleep(POLL_S)

    def check_running(self) -> None:
        """Check that the child has not ended.

        Raises:
            ServerError: it has.
        """
        code = None if self._process is None else self._process.poll()
        if code is not None:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            self._fail(f"the server ended {how}")

    def members(self) -> list[int]:
        """Processes of the child's session that have not ended."""
        return [] if self._process is None else session_members(self._process.pid)

    def end(self) -> None:
        """End the server and all that it started. May be called again.

        Raises:
            ServerError: a process cannot be ended.
        """
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(self.grace_s)
        # Its children are told by nobody if it left without them.
        end = time.monotonic() + KILL_DEADLINE_S
        while members := self.members():
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise ServerError(f"processes {members} of the server do not end, even by SIGKILL")
            process.poll()
            time.sleep(0.02)
        process.wait()

    def log_tail(self) -> str:
        """The end of the log."""
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")
        return ""

    def _healthy(self, http: httpx.Client) -> bool:
        with suppress(httpx.TransportError):
            return http.get(self.health_url).status_code == 200
        return False

    def _fail(self, what: str) -> NoReturn:
        lines = [line for line in self.log_tail().splitlines() if line.strip()][-LOG_LINES:]
        ending = "\n".join(f"    {line[:300]}" for line in lines) or "    (nothing)"
        raise ServerError(f"{what}; the last it printed ({self.log}):\n{ending}")


def session_members(session: int, processes: Path = Path("/proc")) -> list[int]:
    """Processes of a session that have not ended: those of its first process and of all that it started."""
    members = []
    for stat in processes.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # The name, in brackets, may hold anything; state, parent, group and session follow it.
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in ("Z", "X"):
                members.append(int(stat.parent.name))
    return members


def free_port() -> int:
    """A port of this machine that nobody listens on, and that the system gives to nobody by itself.

    A server takes its port after many seconds of loading: one of those that the system hands out may be some
    connection's by then.
    """
    own = range(_LOWEST_PORT, _first_handed_out())
    for port in random.sample(own, k=min(_PORTS_TRIED, len(own))):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        handed_out: int = probe.getsockname()[1]
        return handed_out


def _first_handed_out() -> int:
    """The lowest port that the system gives to those who name none."""
    try:
        return int(_PORT_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0
