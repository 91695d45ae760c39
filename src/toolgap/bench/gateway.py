"""``toolgap bench gateway``: what a gateway adds to the time of streams, against asking their server directly.

Client, gateway and upstream are processes of their own. A round plays the same streams once in each arm, in an
order of its own, so that drift of the machine hits all arms alike; the client's own cost is in all of them.
"""

import asyncio
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from toolgap.bench import gateway_streams
from toolgap.bench.errors import BenchError
from toolgap.bench.gateway_streams import Reply, Stream
from toolgap.childserver import ChildServer, free_port
from toolgap.signals import Stopped, StopSignals

PREFIX = "toolgap_gateway_"
"""Of the gateway's metrics."""
START_TIMEOUT_S = 60.0
STEP_US = 10
"""How finely times are kept."""
QUIET_CORES = 0.25
"""What other processes may compute beside a trial. A trial with more is told apart."""
CHILD = (sys.executable, "-m", "toolgap.bench.gateway_child")
QUESTION = "Write a short story about a gap."

Counts = list[tuple[int, int]]
"""Microseconds, rounded down to ``STEP_US``, and how many values there are of them, in order."""


class Arm(StrEnum):
    """A way to the upstream."""

    DIRECT = "direct"
    GATEWAY = "gateway"
    """One that restores nothing, and so looks at nothing."""
    RESTORING = "restoring"
    """As it is by default: every answer is read, its conversation found, and a restore asked for."""


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """Everything that decides what a run does."""

    streams: int
    """At once."""
    requests: int
    """Of each stream, one after the other on one connection."""
    events: int
    """Of each answer; of a real server the most output tokens."""
    events_per_s: float
    """Of each stream, in the mean; a real server has its own pace."""
    rounds: int
    seed: int
    arms: tuple[Arm, ...] = tuple(Arm)
    upstream: str = "bench"
    """``bench`` for the server of toolgap.bench.gateway_child, ``real`` for one that somebody else runs."""


class Trial(msgspec.Struct, kw_only=True):
    """One arm of one round."""

    trial_id: str
    round: int
    arm: Arm
    began_ts: float
    """Unix time."""
    wall_s: float
    asked: int
    """Requests sent."""
    whole: int
    """Answers that came to their end."""
    equal: int
    """Of these, with the bytes that the direct answer to the same request has in this round."""
    events: int
    unwatched: int
    """Answers that the gateway's observer missed or failed at."""
    first_byte_us: Counts
    """From sending a request to the first byte of the answer's body, without the time that the upstream took
    for itself; of a real server with it."""
    event_us: Counts
    """From the upstream's write of an event until the client has all of it; of a real server, the intervals
    between events."""
    cpu_s: dict[str, float]
    """What client, gateway and upstream computed."""
    other_cores: float
    """What everything else on the machine computed meanwhile, in cores."""


class Server(NamedTuple):
    """Whom an arm asks."""

    arm: Arm
    url: str
    pid: int | None


def counts(values_ns: Iterable[int]) -> Counts:
    """Values as they are kept."""
    found = Counter(value // 1000 // STEP_US * STEP_US for value in values_ns)
    return sorted(found.items())


def run(
    plan: Plan,
    *,
    logs: Path,
    url: str | None = None,
    key: str | None = None,
    model: str = "default",
    say: Callable[[str], None] = lambda _: None,
) -> Generator[list[Trial], None, None]:
    """Play a plan, round by round; processes that were started are ended with the iterator.

    Args:
        plan: What to play.
        logs: A folder for what the processes print.
        url: A server that runs already, in place of the bench's own.
        key: Its API key.
        model: Its model's name.
        say: Told what is done.

    Raises:
        BenchError, ServerError: it cannot be played.
    """
    with ExitStack() as stack:
        say("starting upstream and gateways")
        upstream_pid = None
        if url is None:
            own = stack.enter_context(_child(logs, "upstream"))
            url, upstream_pid = own.url, own.pid
        servers = [Server(Arm.DIRECT, url, None)]
        for arm in plan.arms:
            if arm is not Arm.DIRECT:
                started = stack.enter_context(_child(logs, arm.value, url))
                servers.append(Server(arm, started.url, started.pid))
        for number in range(plan.rounds):
            order = servers.copy()
            random.Random(f"order/{plan.seed}/{number}").shuffle(order)  # noqa: S311 - to be repeatable
            played = []
            for server in order:
                say(f"round {number + 1} of {plan.rounds}, {server.arm}")
                played.append(_play(plan, number, server, url, upstream_pid, key, model))
            direct = next(streams for trial, streams in played if trial.arm is Arm.DIRECT)
            reference = {stream.name: stream.digest for stream in direct}
            for trial, streams in played:
                trial.equal = sum(reference.get(stream.name) == stream.digest for stream in streams)
            yield [trial for trial, _ in played]


class _Started(NamedTuple):
    url: str
    pid: int | None


@contextmanager
def _child(logs: Path, what: str, *arguments: str) -> Iterator[_Started]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = ChildServer([*CHILD, what, str(port), *arguments], f"{url}/healthz", logs / f"{what}.log")
    with server:
        server.wait_until_healthy(START_TIMEOUT_S)
        yield _Started(url, server.pid)


def _body(plan: Plan, name: str, model: str) -> bytes:
    body = {"model": model, "user": name, "stream": True, "temperature": 0, "max_tokens": plan.events}
    body["messages"] = [{"role": "user", "content": f"{QUESTION} ({name})"}]
    if plan.upstream == "bench":
        body["events_per_s"] = plan.events_per_s
    return msgspec.json.encode(body)


def _play(
    plan: Plan,
    number: int,
    server: Server,
    upstream: str,
    upstream_pid: int | None,
    key: str | None,
    model: str,
) -> tuple[Trial, list[Stream]]:
    def body(stream: int, request: int) -> tuple[str, bytes]:
        name = f"{plan.seed}-{number}-{stream}-{request}"
        return name, _body(plan, name, model)

    rng = random.Random(f"begin/{plan.seed}/{number}")  # noqa: S311 - to be repeatable
    length_s = plan.events / plan.events_per_s
    delays_s = [rng.uniform(0, min(length_s, 2.0)) for _ in range(plan.streams)]
    missed = _unwatched(server)
    began_ts, began_s = time.time(), time.monotonic()
    before = _cpu(server.pid, upstream_pid)
    # The client's own collections of garbage are no part of what is measured.
    gc.collect()
    gc.disable()
    try:
        replies = _until_stopped(
            gateway_streams.play(
                server.url, body, streams=plan.streams, requests=plan.requests, delays_s=delays_s, key=key
            )
        )
    except* OSError as errors:
        raise BenchError(f"{server.arm}: cannot be connected to: {errors.exceptions[0]}") from None
    finally:
        gc.enable()
    after, wall_s = _cpu(server.pid, upstream_pid), time.monotonic() - began_s
    used = {name: after[name] - before[name] for name in after}
    busy_s = used.pop("machine")
    times = _times(upstream) if plan.upstream == "bench" else {}
    unwatched = _unwatched(server) - missed
    return _trial(plan, number, server.arm, replies, times, began_ts, wall_s, used, busy_s, unwatched)


def _until_stopped(playing: Coroutine[Any, Any, list[Reply]]) -> list[Reply]:
    """Run it on a loop of its own.

    Raises:
        Stopped: a signal asks to stop. Raised by the signal's own handler it would end in one of the loop's callbacks.
    """
    import uvloop

    stopped: list[int] = []

    async def main() -> list[Reply]:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(playing)

        def stop(number: int) -> None:
            stopped.append(number)
            task.cancel()

        for number in before:
            loop.add_signal_handler(number, stop, number)
        try:
            return await task
        finally:
            for number in before:
                loop.remove_signal_handler(number)

    before = {number: signal.getsignal(number) for number in StopSignals.NUMBERS}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise Stopped(stopped[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _trial(
    plan: Plan,
    number: int,
    arm: Arm,
    replies: Sequence[Reply],
    times: dict[str, list[int]],
    began_ts: float,
    wall_s: float,
    cpu_s: dict[str, float],
    busy_s: float,
    unwatched: int,
) -> tuple[Trial, list[Stream]]:
    real = plan.upstream == "real"
    streams = [stream for reply in replies if (stream := gateway_streams.read(reply, real=real)) is not None]
    first_ns, event_ns = [], []
    for stream in streams:
        if real:
            first_ns.append(stream.first_ns - stream.sent_ns)
            event_ns += [b - a for a, b in zip(stream.events_ns, stream.events_ns[1:], strict=False)]
        else:
            arrived_ns, *written_ns = times[stream.name]
            first_ns.append(arrived_ns - stream.sent_ns + stream.first_ns - written_ns[0])
            event_ns += [b - a for a, b in zip(written_ns, stream.events_ns, strict=True)]
    trial = Trial(
        trial_id=f"r{number}-{arm}",
        round=number,
        arm=arm,
        began_ts=began_ts,
        wall_s=wall_s,
        asked=len(replies),
        whole=len(streams),
        equal=0,
        unwatched=unwatched,
        events=sum(len(stream.events_ns) for stream in streams),
        first_byte_us=counts(first_ns),
        event_us=counts(event_ns),
        cpu_s={name: round(value, 2) for name, value in cpu_s.items()},
        other_cores=round(max(0.0, busy_s - sum(cpu_s.values())) / wall_s, 3),
    )
    return trial, streams


def _times(upstream: str) -> dict[str, list[int]]:
    """When the upstream got each request, then when it wrote each event."""
    reply = httpx.get(f"{upstream}/times", trust_env=False, timeout=30.0)
    return msgspec.json.decode(reply.content, type=dict[str, list[int]])


def _unwatched(server: Server) -> int:
    """What a gateway's observer has missed until now."""
    if server.arm is not Arm.RESTORING:
        return 0
    lines = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=30.0).text.splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}
    return int(sum(values[f"{PREFIX}{name}_total"] for name in ("unseen_exchanges", "observer_errors")))


def _cpu(gateway: int | None, upstream: int | None) -> dict[str, float]:
    """Seconds computed until now: by this process, by the others, and by the whole machine."""
    found = {"client": time.process_time()}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for name, pid in (("gateway", gateway), ("upstream", upstream)):
        if pid is not None:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            found[name] = (int(fields[11]) + int(fields[12])) * tick_s
    total = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    # All but idle and waiting for a disk; time that a host takes away counts. Guests are in user's time already.
    found["machine"] = (
        sum(int(value) for place, value in enumerate(total[:8]) if place not in (3, 4)) * tick_s
    )
    return found
