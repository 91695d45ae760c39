"""A real SGLang server on CPU for the tests, and a probe into its storage calls."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from toolgap.childserver import ChildServer, free_port
from toolgap.client import Toolgap
from toolgap.cpu.launch import cpu_arguments, cpu_environment
from toolgap.protocol import EngineStatus, OperationStatus

T = TypeVar("T")

Prompt = Callable[[int], list[int]]
"""Makes a prompt of so many tokens that no other test uses."""

PROBE = Path(__file__).parent / "probe"
ADMIN_KEY = "the-admin-key"
PAGE = 16
DEADLINE_S = 120.0
START_DEADLINE_S = 400.0
"""A start imports most of SGLang three times: minutes on a busy machine with two cores."""

PATIENT = {
    "TOOLGAP_JOIN_TIMEOUT_S": "600",
    "TOOLGAP_STALL_TIMEOUT_S": "600",
    "TOOLGAP_STOP_GRACE_S": "600",
    "TOOLGAP_DEFAULT_TTL_S": "600",
    # The tiny model recomputes so fast, and a hold makes storage so slow, that restores are rightly declined.
    "TOOLGAP_ADMISSION": "report",
}
"""Settings under which holds end when the test says so, not by a time-out, and nothing is declined for its pace."""


def until(what: str, condition: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
    """Wait for a state of the server that cannot be awaited as an event; fails loudly."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {deadline_s:g} s: {what}")


class Probe:
    """The test's end of the storage probe: counts calls, and can hold or spoil them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._change = threading.Condition()
        self._holding: set[tuple[str, int | None]] = set()
        self._held: Counter[tuple[str, int]] = Counter()
        self._delays_s: dict[tuple[str, int], float] = {}
        self._answers: dict[tuple[str, int, int | None], str] = {}
        self._reads: Counter[tuple[str, int]] = Counter()
        self._calls: Counter[tuple[str, int]] = Counter()
        self._states: dict[tuple[int, int], dict[str, Any]] = {}
        self._hung: set[tuple[str, str | int]] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection, connection.makefile("rw") as stream:
            for line in stream:
                message = json.loads(line)
                print(self._answer(**message), file=stream, flush=True)

    def _answer(self, call: str, detail: str, rank: int) -> str:
        with self._change:
            if call == "state":
                state = json.loads(detail)
                self._states[rank, state["number"]] = state
                self._change.notify_all()
                return "go"
            number, number_on_rank = self.calls[call], self._calls[call, rank]
            self._calls[call, rank] += 1
            if call == "get":
                self._reads[detail, rank] += 1
            self._held[call, rank] += 1
            self._change.notify_all()
            if delay_s := self._delays_s.get((call, rank)):
                self._change.wait_for(lambda: (call, rank) not in self._delays_s, delay_s)
            while not self._holding.isdisjoint({(call, rank), (call, None)}) or (
                self._hung & {(call, number), (call, detail)}
            ):
                self._change.wait()
            self._held[call, rank] -= 1
            self._change.notify_all()
            for key in (
                (call, number_on_rank, rank),
                (call, -1, rank),
                (call, number, None),
                (call, -1, None),
            ):
                if key in self._answers:
                    return self._answers[key]
            return "go"

    def reset(self) -> None:
        """Forget counts and spoilt calls; let everything go."""
        with self._change:
            self._holding.clear()
            self._hung.clear()
            self._delays_s.clear()
            self._answers.clear()
            self._reads.clear()
            self._calls.clear()
            self._change.notify_all()

    @contextlib.contextmanager
    def hold(self, call: str, rank: int | None = None) -> Iterator[Callable[[], None]]:
        """Hold calls while open, of one rank or of all; yields a function that waits until one is held."""
        with self._change:
            self._holding.add((call, rank))

        def is_held() -> bool:
            return any(
                count and held_call == call and rank in (None, held_rank)
                for (held_call, held_rank), count in self._held.items()
            )

        def wait_until_held() -> None:
            with self._change:
                assert self._change.wait_for(is_held, DEADLINE_S), f"no {call} was held"

        try:
            yield wait_until_held
        finally:
            with self._change:
                self._holding.discard((call, rank))
                self._change.notify_all()

    def hang(self, call: str, *, number: int | None = None, page: str | None = None) -> None:
        """Let one call hang, by its number since the last reset or by its page, until :meth:`let_go`."""
        which = number if page is None else page
        assert which is not None
        with self._change:
            self._hung.add((call, which))

    def let_go(self) -> None:
        """Let every call that hangs go on."""
        with self._change:
            self._hung.clear()
            self._change.notify_all()

    def spoil(self, call: str, answer: str, number: int = -1, rank: int | None = None) -> None:
        """Answer the call with that number since the last reset (-1: every one) with "miss" or "fail".

        With a rank, only its calls are answered so, and only its calls are counted.
        """
        with self._change:
            self._answers[call, number, rank] = answer

    def delay(self, call: str, delay_s: float, rank: int) -> None:
        """Let every such call of one rank take so much longer, until the next reset."""
        with self._change:
            self._delays_s[call, rank] = delay_s

    @property
    def reads(self) -> Counter[str]:
        """Reads of each page since the last reset, whichever rank's part of it was read."""
        counts: Counter[str] = Counter()
        with self._change:
            for (page, _), count in self._reads.items():
                counts[page] += count
        return counts

    def reads_of(self, rank: int) -> Counter[str]:
        """Reads of each page since the last reset by one rank."""
        with self._change:
            return Counter({page: count for (page, reader), count in self._reads.items() if reader == rank})

    @property
    def calls(self) -> Counter[str]:
        """Calls of each kind since the last reset."""
        counts: Counter[str] = Counter()
        with self._change:
            for (call, _), count in self._calls.items():
                counts[call] += count
        return counts

    def states(self, number: int, ranks: int) -> list[dict[str, Any]]:
        """What every rank answered to the request for its state that has this number."""
        keys = [(rank, number) for rank in range(ranks)]
        with self._change:
            assert self._change.wait_for(lambda: all(key in self._states for key in keys), DEADLINE_S), (
                f"not every rank told its state: {sorted(self._states)[-ranks:]}"
            )
            states = [self._states[key] for key in keys]
            self._states = {key: state for key, state in self._states.items() if key[1] > number}
        return states

    def close(self) -> None:
        """Stop listening."""
        self.reset()
        self._listener.close()


@dataclass
class Answer:
    """What /generate returned."""

    output_ids: list[int]
    device_tokens: int
    host_tokens: int
    storage_tokens: int

    @property
    def sources(self) -> tuple[int, int, int]:
        """Cached tokens from device, host and storage."""
        return self.device_tokens, self.host_tokens, self.storage_tokens


@dataclass
class Server:
    """A server process group; use as a context manager."""

    model: Path
    folder: Path
    arguments: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    """Processes that hold a part of the cache, as the arguments ask for."""
    hierarchical: bool = True
    spawn: bool = False
    """Start processes as SGLang does; forking them halves the time of a start."""
    admin_key: str | None = ADMIN_KEY
    shared_storage: Path | None = None
    """A folder for L3 that other servers have, too; by default its own."""
    launcher: Sequence[str] = ()
    """A command that runs the server's."""
    child: ChildServer | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.storage = self.shared_storage or self.folder / "l3"
        self.storage.mkdir(exist_ok=True)
        self.log = self.folder / "server.log"
        self.probe = Probe(self.folder / "probe.sock")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        headers = {} if self.admin_key is None else {"Authorization": f"Bearer {self.admin_key}"}
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, headers=headers)
        self.toolgap = Toolgap(self.url, api_key=self.admin_key)

    def start(self) -> Self:
        """Start the server and wait until it serves."""
        arguments = [
            *("--model-path", str(self.model), "--host", "127.0.0.1"),
            *("--port", str(self.port), "--page-size", str(PAGE)),
            *(() if self.admin_key is None else ("--admin-api-key", self.admin_key)),
            *("--context-length", "8192", "--max-total-tokens", "8192", "--hicache-ratio", "2"),
            *("--skip-server-warmup", "--enable-cache-report", "--enable-metrics"),
            *self.arguments,
        ]
        environment = cpu_environment(os.environ, arguments) | self.environment
        environment["PYTHONPATH"] = os.pathsep.join([str(PROBE), environment["PYTHONPATH"]])
        environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(self.storage)
        environment["TOOLGAP_CPU_FORK"] = "0" if self.spawn else "1"
        environment["TOOLGAP_PROBE_SOCKET"] = str(self.probe.path)
        command = [*self.launcher, sys.executable, "-m", "sglang.launch_server", *cpu_arguments(arguments)]
        if not self.hierarchical:
            command = [part for part in command if part != "--enable-hierarchical-cache"]
        self.child = ChildServer(
            command=command,
            health_url=f"{self.url}/health",
            log=self.log,
            environment=environment,
            grace_s=0.0,
        )
        self.child.start()
        self.child.wait_until_healthy(START_DEADLINE_S)
        return self

    def kill(self) -> None:
        """kill -9 of the server and all that it started."""
        if self.child is not None and self.child.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.end()
        self.child = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self.probe.close()
        self.toolgap.close()
        self.http.close()

    # ---- what tests do with it ----

    def call(self, **body: Any) -> httpx.Response:
        """One raw call of the endpoint."""
        return self.http.post("/hicache/prefetch", json=body)

    def generate(self, input_ids: list[int], tokens: int = 4, **fields: Any) -> Answer:
        """Greedy generation; fails unless the server answers 200."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        reply = self.http.post(
            "/generate", json={"input_ids": input_ids, "sampling_params": sampling, **fields}
        )
        assert reply.status_code == 200, reply.text
        body = reply.json()
        details = body["meta_info"].get("cached_tokens_details") or {}
        return Answer(
            body["output_ids"], details.get("device", 0), details.get("host", 0), details.get("storage", 0)
        )

    def flush(self) -> None:
        """Drop L1 and L2; L3 stays. Refused by SGLang while backups are pending, so repeated."""
        until("the cache is flushed", self._flushed)

    def _flushed(self) -> bool:
        if self.http.post("/flush_cache").status_code != 200:
            return False
        # With several replicas SGLang answers with the first one's success.
        engines = self.engines() if self.ranks > 1 else []
        return all(engine.host_free_tokens == engine.host_total_tokens for engine in engines[1:] and engines)

    def store(self, input_ids: list[int], **fields: Any) -> Answer:
        """Bring a prompt's KV into L3, and into L3 only."""
        answer = self.generate(input_ids, **fields)
        self.flush()
        self.probe.reset()
        return answer

    def states(self) -> list[dict[str, Any]]:
        """The probe's view of every rank at one step; fails if an invariant does not hold or ranks differ."""
        reply = self.http.get("/server_info").json()
        first: dict[str, Any] = reply["internal_states"][0]["toolgap_probe"]
        states = self.probe.states(first["number"], self.ranks)
        for state in states:
            assert state["problem"] is None, state["problem"]
            of_replica = next(other for other in states if other["dp_rank"] == state["dp_rank"])
            assert state["agreed"] == of_replica["agreed"], "ranks differ"
        return [first, *states[1:]]

    def state(self) -> dict[str, Any]:
        """The probe's view of the first rank."""
        return self.states()[0]

    def load(self) -> dict[str, int]:
        """SGLang's count of requests, of the only scheduler."""
        load: dict[str, int] = self.http.get("/v1/loads").json()["loads"][0]
        return load

    def is_busy(self) -> bool:
        """Whether the scheduler is in the middle of something: it does not answer now."""
        try:
            self.http.post("/hicache/prefetch", json={"action": "status"}, timeout=0.5)
        except httpx.TimeoutException:
            return True
        return False

    def ended(self, operation_id: str) -> OperationStatus:
        """Wait for an operation's outcome by long poll."""
        status = self.toolgap.status(operation_id, wait_s=DEADLINE_S)
        assert status.state.terminal, status
        return status

    def traces(self) -> dict[str, int]:
        """What an operation or a request must not leave behind, whether or not the cache is flushed."""
        engines = self.engines()
        states = self.states()
        return {
            "prefetch_occupied_tokens": sum(engine.prefetch_occupied_tokens for engine in engines),
            "prefetch_retries_pending": sum(engine.prefetch_retries_pending for engine in engines),
            "reads_in_flight": sum(engine.reads_in_flight for engine in engines),
            "waiting_joins": sum(engine.waiting_joins for engine in engines),
            "stalled_reads": sum(engine.stalled_reads for engine in engines),
            "host_locks": sum(state["host_locks"] for state in states),
            "handles": sum(state["handles"] for state in states),
            "waiting_calls": states[0]["waiting_calls"],
        }

    def engines(self) -> list[EngineStatus]:
        """Every replica's engine."""
        overview = self.toolgap.overview()
        return overview.replicas or [overview.engine]

    def baseline(self) -> dict[str, int]:
        """What must be the same before and after anything that leaves nothing behind."""
        return self.traces() | {"host_free_tokens": sum(e.host_free_tokens for e in self.engines())}

    @contextlib.contextmanager
    def left_as_found(self) -> Iterator[None]:
        """For a test on a server that others use too: an empty cache, and afterwards everything back at that."""
        self.probe.reset()
        self.flush()
        before = self.baseline()
        yield
        self.probe.reset()
        self.check_back_at(before)

    def check_back_at(self, before: dict[str, int]) -> None:
        """Fail unless everything is back at an earlier :meth:`baseline`."""
        # First without a flush, which would sweep away what was left behind.
        expected = {name: before[name] for name in self.traces()}
        until(f"no traces beyond {expected}", lambda: self.traces() == expected, 20.0)
        self.flush()
        assert self.baseline() == before


def joined(server: Server, operation_id: str) -> Callable[[], OperationStatus | None]:
    """For :func:`until`: the operation's status once a request waits for it, or has."""

    def condition() -> OperationStatus | None:
        status = server.toolgap.status(operation_id)
        return status if status.joined_requests else None

    return condition
