"""Traffic that has nothing to do with restores: the same for the same seed, whoever serves it."""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

from toolgap.bench.plan import prompt_ids
from toolgap.engineclient import Generation

Send = Callable[[Sequence[int]], Generation]
"""Sends one prompt and returns when its answer has ended; called from several threads at once."""


class Arrival(NamedTuple):
    """One request of an open loop, which does not wait for earlier ones."""

    due_s: float
    """From the window's begin."""
    input_ids: list[int]


class Served(NamedTuple):
    """One request that was answered."""

    due_s: float
    """From the begin; in a closed loop when it was its turn."""
    late_ms: float
    """From being due to being sent."""
    generation: Generation


class Burst(NamedTuple):
    """What a closed loop has served."""

    served: list[Served]
    wall_s: float
    """From the first request sent to the last answer's end."""


def poisson_s(seed: int, name: str, rate_per_s: float, window_s: float) -> list[float]:
    """Due times of a Poisson process, in seconds from the window's begin."""
    rng = random.Random(f"arrivals/{seed}/{name}")  # noqa: S311 - to be repeatable
    due: list[float] = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < window_s:
        due.append(at_s)
        at_s += rng.expovariate(rate_per_s)
    return due


def arrivals(
    seed: int, name: str, *, rate_per_s: float, window_s: float, prompt_tokens: int, vocabulary: int
) -> list[Arrival]:
    """Requests of a window, each with a prompt of its own."""
    due = poisson_s(seed, name, rate_per_s, window_s)
    return [
        Arrival(due_s, prompt_ids(seed, f"{name}/{number}", prompt_tokens, vocabulary))
        for number, due_s in enumerate(due)
    ]


def open_loop(send: Send, requests: Sequence[Arrival]) -> list[Served]:
    """Send each request when it is due, whether or not earlier ones have ended; wait for all answers.

    An exception of a request is raised here, once those in flight have ended; no other is sent then.
    """
    failed = threading.Event()

    def note(future: "Future[Served]") -> None:
        if future.exception() is not None:
            failed.set()

    begin_s = time.perf_counter()
    futures = []
    with ThreadPoolExecutor(max(1, len(requests))) as threads:
        for request in requests:
            if failed.wait(max(0.0, begin_s + request.due_s - time.perf_counter())):
                break
            future = threads.submit(_send, send, request, begin_s)
            future.add_done_callback(note)
            futures.append(future)
    return [future.result() for future in futures]


def closed_loop(send: Send, prompts: Sequence[Sequence[int]], concurrency: int) -> Burst:
    """Keep so many requests in flight until every prompt is answered.

    An exception of a request is raised here, once those in flight have ended.
    """
    begin_s = time.perf_counter()

    def turn(input_ids: Sequence[int]) -> Served:
        return _send(send, Arrival(time.perf_counter() - begin_s, list(input_ids)), begin_s)

    with ThreadPoolExecutor(concurrency) as threads:
        served = list(threads.map(turn, prompts))
    return Burst(served, time.perf_counter() - begin_s)


def _send(send: Send, request: Arrival, begin_s: float) -> Served:
    late_s = time.perf_counter() - begin_s - request.due_s
    return Served(request.due_s, late_s * 1e3, send(request.input_ids))


def inter_token_ms(chunks: Sequence[tuple[float, int]]) -> list[float]:
    """Latencies between tokens, from :attr:`Generation.chunks`: an event of k tokens counts as k equal ones."""
    found: list[float] = []
    for (before_s, before_tokens), (at_s, tokens) in pairwise(chunks):
        brought = tokens - before_tokens
        found += [(at_s - before_s) * 1e3 / brought] * brought
    return found


def cached_tokens(served: Iterable[Served]) -> int:
    """Prompt tokens that were not computed, over all requests."""
    return sum(
        s.generation.device_tokens + s.generation.host_tokens + s.generation.storage_tokens for s in served
    )


def outputs_sha256(served: Iterable[Served]) -> str:
    """Digest of every output id, in the order of the requests."""
    text = "\n".join(",".join(map(str, s.generation.output_ids)) for s in served)
    return hashlib.sha256(text.encode()).hexdigest()
