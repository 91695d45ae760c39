"""Random work on a real server, with every fault at once, and what must be true at its end.

Run by ``make soak`` (``SOAK_S`` seconds, ``SOAK_SEED``) and, shortly, by ``test_soak.py``.
"""

import argparse
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from harness import ADMIN_KEY, PAGE, Server, until

from toolgap.client import ToolgapError, ToolgapUnreachable
from toolgap.cpu.model import build_tiny_model
from toolgap.protocol import Code, State, Target

ARGUMENTS = ("--max-total-tokens", "4096")
"""L1; L2 is twice that, and the prompts are five times as much together."""

ENVIRONMENT = {
    "TOOLGAP_PIECE_TOKENS": "1024",
    "TOOLGAP_MAX_OPERATIONS": "8",
    "TOOLGAP_MAX_OUTCOMES": "64",
    "TOOLGAP_LEASE_SHARE": "0.25",
    "TOOLGAP_STALL_TIMEOUT_S": "3",
    "TOOLGAP_READER_PATIENCE_S": "2",
    "TOOLGAP_STOP_GRACE_S": "1",
    "TOOLGAP_DEFAULT_TTL_S": "20",
}

EXPECTED_LOG = tuple(
    re.compile(pattern)
    for pattern in (
        r"toolgap: ",
        r"the test made the (read|query)",
        r"HiCache (storage query|prefetch transfer) failed for request",
        r"Prefetch operation .* failed to retrieve page",
        r"Failed to fetch page",
        r"Cache flush|flush_cache|Cache not flushed|was not flushed",
        r"[Aa]ttach|[Dd]etach|storage backend|HiCacheFile|HiCache storage",
        r"scheduler is not idle|not idle",
        r"abort|Abort|disconnected",
        r"freeze_gc|/v1/responses|Connection refused|direct cause of|urllib3",
        r"[Ww]arm|deprecat|Deprecat|FutureWarning|UserWarning|torch_dtype",
    )
)
"""Warnings and errors that faults explain, or that SGLang prints on any start on a CPU."""

FLAT_KIB = 64 * 1024
"""What the scheduler's memory may grow by over all cycles but the first tenth."""

_COMPLAINT = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|Traceback|Error:|Exception:|assert", re.IGNORECASE)
_TOOLGAP_FAULT = re.compile(r"toolgap: (a fault|a request failed|a call failed|could not)")


class Soak:
    """Threads that use a server, threads that disturb it, and the count of what happened."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.over = threading.Event()
        self.each_fault = threading.Event()
        """Set once every fault has happened: however short a soak is, it has them all."""
        self.busy = threading.Event()
        """Cleared while clients hold back, so that a change can be made which SGLang makes only if idle."""
        self.busy.set()
        self.prompts = [
            self._prompt(pages) for pages in (20, 30, 40, 60, 80, 100, 150, 180, 170, 160, 140, 130)
        ]
        # Some share their beginnings, as turns of one conversation do.
        self.prompts += [self.prompts[7][: 100 * PAGE], self.prompts[7] + self._prompt(30)]
        self.prompts += [self.prompts[5][: 50 * PAGE] + self._prompt(40), self._prompt(90)]
        self.answers: dict[int, list[int]] = {}
        self.operations: list[str] = []

    def _prompt(self, pages: int) -> list[int]:
        return [self.random.randrange(100, 40_000) for _ in range(pages * PAGE)]

    # ---- what clients do ----

    def client(self, number: int) -> None:
        """One client: random calls until the time is over."""
        chance = random.Random(f"{number}.{self.random.random()}")
        actions: list[tuple[Callable[[random.Random], None], int]] = [
            (self.submit, 10),
            (self.cancel, 4),
            (self.poll, 4),
            (self.leave_poll, 1),
            (self.generate, 6),
            (self.leave_request, 2),
            (self.look, 1),
        ]
        while not self.over.is_set():
            self.busy.wait()
            [action] = chance.choices([a for a, _ in actions], [weight for _, weight in actions])
            try:
                action(chance)
                self.counts[action.__name__] += 1
            except ToolgapError as refused:
                self.counts[f"refused: {refused.error.code}"] += 1
                if refused.error.code is Code.INTERNAL_ERROR:
                    self.problems.append(f"internal error: {refused.error.message}")
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told at the end
                self.problems.append(f"{action.__name__}: {type(error).__name__}: {error}"[:400])
                self.over.wait(1.0)

    def submit(self, chance: random.Random) -> None:
        """Submit a prefix of a prompt, in one of many ways."""
        prompt = chance.choice(self.prompts)
        fields: dict[str, Any] = {}
        if chance.random() < 0.3:
            fields["expected_gap_s"] = chance.choice([0.1, 1.0, 10.0])
        if chance.random() < 0.2:
            fields["ttl_s"] = chance.choice([0.01, 0.1, 1.0])
        if chance.random() < 0.2:
            fields["target"] = Target.DEVICE
        if chance.random() < 0.2:
            fields["lease_s"] = chance.choice([0.5, 5.0, 60.0])
        pages = chance.randint(1, len(prompt) // PAGE)
        try:
            status = self.server.toolgap.submit(input_ids=prompt[: pages * PAGE], **fields)
        except ToolgapUnreachable:
            if "expected_gap_s" not in fields:
                raise
            self.counts["gave up before the gap's end"] += 1  # a repeated submit has little time
            return
        self.operations = [*self.operations[-30:], status.operation_id]

    def _operation(self, chance: random.Random) -> str:
        return chance.choice(self.operations or ["none"])

    def cancel(self, chance: random.Random) -> None:
        """Cancel one of the last operations."""
        self.server.toolgap.cancel(self._operation(chance))

    def poll(self, chance: random.Random) -> None:
        """Wait a while for one of the last operations."""
        status = self.server.toolgap.status(self._operation(chance), wait_s=chance.choice([0.0, 0.5, 2.0]))
        if status.state.terminal:
            self.counts[f"seen: {status.state} {status.reason}"] += 1

    def leave_poll(self, chance: random.Random) -> None:
        """Wait for an operation, and hang up."""
        body = {"action": "status", "operation_id": self._operation(chance), "wait_s": 20}
        with contextlib.suppress(httpx.TimeoutException):
            self.server.http.post("/hicache/prefetch", json=body, timeout=0.2)

    def generate(self, chance: random.Random) -> None:
        """A continuation: its output is what it would be without Toolgap."""
        which = chance.randrange(len(self.prompts))
        answer = self.server.generate(self.prompts[which] + [5])
        for source, tokens in zip(("device", "host", "storage"), answer.sources, strict=True):
            self.counts[f"cached tokens: {source}"] += tokens
        if answer.output_ids != self.answers[which]:
            self.problems.append(f"prompt {which}: {answer.output_ids} instead of {self.answers[which]}")

    def leave_request(self, chance: random.Random) -> None:
        """Ask for a long answer, and hang up."""
        body = {
            "input_ids": [*chance.choice(self.prompts), 6],
            "stream": True,
            "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
        }
        with contextlib.suppress(httpx.TimeoutException):
            self.server.http.post("/generate", json=body, timeout=chance.choice([0.05, 0.3]))

    def look(self, _chance: random.Random) -> None:
        """Ask for everything."""
        self.server.toolgap.overview()

    # ---- what goes wrong meanwhile ----

    def disturb(self) -> None:
        """One fault after another until the time is over."""
        chance = random.Random(self.random.random())
        faults = [self.flush, self.fail, self.miss, self.delay, self.hang, self.replace, self.pause]
        left: list[Callable[[random.Random], None]] = []
        while not self.over.wait(chance.uniform(0.2, 2.0)):
            left = left or chance.sample(faults, len(faults))
            fault = left.pop()
            try:
                fault(chance)
                self.counts[f"fault: {fault.__name__}"] += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told at the end
                self.problems.append(f"{fault.__name__}: {type(error).__name__}: {error}"[:400])
            if not left:
                self.each_fault.set()

    @contextlib.contextmanager
    def calm(self, chance: random.Random) -> Iterator[None]:
        """Two times of three, clients hold back meanwhile; what runs goes on."""
        if chance.random() < 0.67:
            self.busy.clear()
            self.over.wait(chance.uniform(0.0, 2.0))
        try:
            yield
        finally:
            self.busy.set()

    def flush(self, chance: random.Random) -> None:
        """Drop L1 and L2; refused while requests run or a call hangs."""
        with self.calm(chance):
            self.counts[f"flush: {self.server.http.post('/flush_cache').status_code}"] += 1

    def fail(self, chance: random.Random) -> None:
        """Storage raises for a moment."""
        self._spoil(chance, chance.choice(["get", "exists"]), "fail")

    def miss(self, chance: random.Random) -> None:
        """Storage has lost pages for a moment."""
        self._spoil(chance, "get", "miss")

    def _spoil(self, chance: random.Random, call: str, answer: str) -> None:
        self.server.probe.spoil(call, answer)
        self.over.wait(chance.uniform(0.05, 0.5))
        self.server.probe.spoil(call, "go")

    def delay(self, chance: random.Random) -> None:
        """Storage answers nothing for a moment."""
        with self.server.probe.hold(chance.choice(["get", "exists"])):
            self.over.wait(chance.uniform(0.05, 1.0))

    def hang(self, chance: random.Random) -> None:
        """The next call hangs for longer than operations put up with, and returns much later."""
        call = chance.choice(["get", "exists"])
        self.server.probe.hang(call, number=self.server.probe.calls[call] + 1)
        self.over.wait(chance.uniform(4.0, 9.0))
        self.server.probe.let_go()

    def replace(self, chance: random.Random) -> None:
        """Detach storage and attach it again; SGLang refuses unless it is idle."""
        with self.calm(chance):
            headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
            detached = self.server.http.delete("/hicache/storage-backend", headers=headers)
            self.counts[f"detach: {detached.status_code}"] += 1
            if detached.status_code == 200:
                self.over.wait(chance.uniform(0.0, 0.3))
                self.attach()

    def attach(self) -> None:
        """Attach storage again, once SGLang is idle."""
        body = {"hicache_storage_backend": "file"}
        self.busy.clear()
        until(
            "storage is attached",
            lambda: self.server.http.put("/hicache/storage-backend", json=body).status_code == 200,
        )

    def pause(self, chance: random.Random) -> None:
        """Pause generation for a moment."""
        self.server.http.post("/pause_generation", json={"mode": "in_place"})
        self.over.wait(chance.uniform(0.05, 0.5))
        self.server.http.post("/continue_generation", json={})

    # ---- the whole ----

    def run(self, seconds: float, clients: int = 4, progress: bool = False) -> dict[str, Any]:
        """Soak, then look at what is left; returns a report whose ``problems`` should be empty."""
        for which, prompt in enumerate(self.prompts):
            self.answers[which] = self.server.store(prompt + [5]).output_ids
        before = self.server.baseline()
        kib = [self.server.state()["resident_kib"]]
        threads = [threading.Thread(target=self.client, args=(number,)) for number in range(clients)]
        threads.append(threading.Thread(target=self.disturb))
        started = time.monotonic()
        for thread in threads:
            thread.start()
        while (elapsed := time.monotonic() - started) < seconds:
            self.over.wait(min(10.0, seconds - elapsed))
            if progress:
                done = sum(self.counts[name] for name in ("submit", "cancel", "generate"))
                print(f"{elapsed:6.0f} s  {done} calls, {len(self.problems)} problems", flush=True)  # noqa: T201
        if not self.each_fault.wait(300.0):
            self.problems.append("the faults did not come round")
        self.over.set()
        self.busy.set()
        for thread in threads:
            thread.join(120.0)
        if any(thread.is_alive() for thread in threads):
            self.problems.append("a client did not come back")
        self._look_at_the_end(before)
        kib.append(self.server.state()["resident_kib"])
        return {
            "seconds": round(time.monotonic() - started, 1),
            "clients": clients,
            "counts": dict(sorted(self.counts.items())),
            "scheduler_resident_kib": kib,
            "problems": self.problems,
            "unexplained_log_lines": self.unexplained_lines(),
        }

    def cycle(self, cycles: int, progress: bool = False) -> list[int]:
        """Submit and cancel so many times; returns the scheduler's memory in KiB, ten times on the way."""
        server = self.server
        server.flush()
        before, kib = server.baseline(), []
        for number in range(cycles):
            prompt = self.prompts[number % len(self.prompts)]
            operation_id = server.toolgap.submit(input_ids=prompt).operation_id
            server.toolgap.cancel(operation_id)
            if not server.ended(operation_id).state.terminal:
                self.problems.append(f"cycle {number} did not end")
            if number % 50 == 49:
                server.flush()
            if number % (cycles // 10) == cycles // 10 - 1:
                kib.append(server.state()["resident_kib"])
                if progress:
                    print(f"{number + 1:6} submits and cancels, {kib[-1]} KiB", flush=True)  # noqa: T201
        server.check_back_at(before)
        if kib and kib[-1] - kib[0] > FLAT_KIB:
            self.problems.append(f"memory grew over {cycles} submits and cancels: {kib} KiB")
        return kib

    def _look_at_the_end(self, before: dict[str, int]) -> None:
        server = self.server
        server.probe.reset()
        try:
            until("no operation is active", lambda: not server.toolgap.overview().active)
            until("every call returned", lambda: server.toolgap.overview().engine.stalled_reads == 0)
            for status in server.toolgap.overview().recent:
                server.toolgap.cancel(status.operation_id)  # leases
            server.check_back_at(before)
            server.flush()
            for which, prompt in enumerate(self.prompts):
                outcome = server.ended(server.toolgap.submit(input_ids=prompt).operation_id)
                if outcome.state is not State.RESTORED:
                    self.problems.append(f"afterwards prompt {which} was {outcome.state} ({outcome.reason})")
                if server.generate(prompt + [5]).output_ids != self.answers[which]:
                    self.problems.append(f"afterwards prompt {which} has another answer")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            self.problems.append(f"at the end: {type(error).__name__}: {error}"[:400])

    def unexplained_lines(self) -> list[str]:
        """Complaints in the server's log that no fault explains."""
        lines = self.server.log.read_text(errors="replace").splitlines()
        found = [line for line in lines if _TOOLGAP_FAULT.search(line)]
        inside = False
        for line in lines:
            explained = any(pattern.search(line) for pattern in EXPECTED_LOG)
            if line.startswith("Traceback"):
                inside = True  # told by its last line, which names the error
            elif inside and not line.startswith(" "):
                inside = False
                if not explained:
                    found.append(line)
            elif not inside and _COMPLAINT.search(line) and not explained:
                found.append(line)
        return found


def _write(report: dict[str, Any], server: Server, folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "soak.json").write_text(json.dumps(report, indent=2) + "\n")
        (folder / "server.log").write_bytes(server.log.read_bytes())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_S", "120")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SOAK_SEED", "0")))
    parser.add_argument("--cycles", type=int, default=int(os.environ.get("SOAK_CYCLES", "1000")))
    parser.add_argument("--output", type=Path, help="folder for the report and the server's log")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(Path(folder) / "model")
        with Server(model, Path(folder) / "server", ARGUMENTS, environment=ENVIRONMENT) as server:
            soak = Soak(server, options.seed)
            report = {"seed": options.seed} | soak.run(options.seconds, progress=True)
            _write(report, server, options.output)
            if options.cycles:
                report |= {"cycles": options.cycles, "cycles_kib": soak.cycle(options.cycles, progress=True)}
                _write(report, server, options.output)
            print(json.dumps(report, indent=2))  # noqa: T201
    return 1 if report["problems"] or report["unexplained_log_lines"] else 0


if __name__ == "__main__":
    sys.exit(main())
