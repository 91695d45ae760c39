"""A server on which trials are played: brings prefixes where a trial wants them, and counts."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from toolgap.bench import pagecache
from toolgap.bench.errors import BenchError
from toolgap.bench.plan import OUTPUT_TOKENS, SENTINEL_TOKENS, Plan, prefix_tokens, prompt_ids
from toolgap.client import Toolgap
from toolgap.engineclient import Engine, Generation
from toolgap.protocol import OperationStatus
from toolgap.store.config import BACKEND

VOCABULARY = 40_000
RESTORE_DEADLINE_S = 300.0
SETTLE_DEADLINE_S = 120.0
POLL_S = 0.02


@dataclass
class Prompt:
    """A prompt whose KV is in L3."""

    ids: list[int]
    prefix_ids: list[int]
    reference_ids: list[int]
    pages: set[Path]
    """The files that hold its prefix; empty where the storage folder is not known."""


@dataclass
class Stage:
    """A running server, and what of it trials need.

    Contract: between trials nothing is in flight, L1 and L2 are empty, and L3 holds the prompts and
    fillers that were stored here and nothing that a trial has added.
    """

    engine: Engine
    toolgap: Toolgap
    plan: Plan
    l1_tokens: int
    storage: Path | None
    """The folder of the ``file`` backend if it is on this machine."""
    storage_backend: str = "file"
    policy: str = "timeout"
    """SGLang's prefetch policy as it stands."""
    nonce: str = ""
    """Part of every prompt's name, on a server whose L3 may hold the prompts of an earlier run."""
    _kept: set[Path] = field(default_factory=set)
    _prompts: dict[tuple[int, int], Prompt] = field(default_factory=dict)
    _fillers: list[list[int]] = field(default_factory=list)
    _sentinel: list[int] = field(default_factory=list)

    # ---- prompts ----

    def prompt(self, round_number: int, tokens: int) -> Prompt:
        """A round's prompt of that length, computed and stored on its first use."""
        key = (round_number, tokens)
        if key not in self._prompts:
            self._forget_other_rounds(round_number)
            self._prompts[key] = self.stored(f"{round_number}/{tokens}", tokens)
        return self._prompts[key]

    def stored(self, name: str, tokens: int) -> Prompt:
        """Compute a prompt of that name, and leave it in L3 only."""
        ids = prompt_ids(self.plan.seed, f"{self.nonce}{name}", tokens, VOCABULARY)
        prefix_ids = ids[: prefix_tokens(tokens, self.plan.page_tokens)]
        self.flush()
        before = self.pages()
        generation = self.engine.generate(ids, max_new_tokens=OUTPUT_TOKENS)
        self.flush()
        pages = self.pages() - before
        if self.storage is not None and len(pages) < len(prefix_ids) // self.plan.page_tokens:
            raise BenchError(
                f"SGLang stored {len(pages)} pages of {len(prefix_ids) // self.plan.page_tokens}: is the disk full?"
            )
        self._kept |= pages
        return Prompt(ids, prefix_ids, generation.output_ids, pages)

    def drop(self, prompt: Prompt) -> None:
        """Take a prompt's files out of L3."""
        self._kept -= prompt.pages
        _unlink(prompt.pages)

    def _forget_other_rounds(self, round_number: int) -> None:
        for key in [key for key in self._prompts if key[0] != round_number]:
            self.drop(self._prompts.pop(key))

    # ---- where things are ----

    def flush(self) -> None:
        """Wait until everything is backed up, then drop L1 and L2."""
        self.engine.flush()

    def pages(self) -> set[Path]:
        """The page files of L3."""
        return set() if self.storage is None else set(self.storage.glob("*.bin"))

    def settle(self) -> None:
        """After a trial: nothing in flight, L1 and L2 empty, and out of L3 what the trial has added."""
        self.flush()
        _unlink(self.pages() - self._kept)

    def clear(self) -> None:
        """Take everything out of L3 that was stored here."""
        _unlink(self._kept)
        self._kept.clear()

    def set_policy(self, policy: str) -> None:
        """Set SGLang's prefetch policy, if it is another."""
        if policy != self.policy:
            self.engine.set_prefetch_policy(self.storage_backend, policy)
            self.policy = policy

    def store_fillers(self) -> None:
        """Store what :meth:`fill_device` plays: two prompts that fill L1 between them."""
        while len(self._fillers) < 2:
            filler = self.stored(f"filler/{len(self._fillers)}", self.l1_tokens * 6 // 10)
            self._fillers.append(filler.ids)

    def fill_device(self) -> None:
        """Push everything out of L1 by ordinary traffic, which comes from L3; L2 has room for all of it."""
        for filler_ids in self._fillers:
            self.engine.generate(filler_ids, max_new_tokens=1)

    def place_sentinel(self) -> None:
        """Bring the unrelated prefix into L2, by a restore."""
        if not self._sentinel:
            self._sentinel = self.stored("sentinel", SENTINEL_TOKENS + 1).prefix_ids
        self.restored(self._sentinel)

    def sentinel_tokens(self) -> tuple[int, int]:
        """Its length, and how much of it is resident."""
        status = self.restored(self._sentinel)
        return status.aligned_tokens, status.resident_tokens

    def restored(self, prefix_ids: Sequence[int]) -> OperationStatus:
        """Restore a prefix and wait for the outcome."""
        return self.toolgap.wait(
            self.toolgap.submit(input_ids=prefix_ids, force=True).operation_id, RESTORE_DEADLINE_S
        )

    def prepare_page_cache(self, pages: Iterable[Path]) -> float | None:
        """Make the page cache what the plan says; the share of these files that it then holds."""
        paths = list(pages)
        if self.storage is None:
            return None
        if self.plan.page_cache == "cold":
            pagecache.drop(paths)
        elif pagecache.resident_share(paths) < 1.0:
            pagecache.warm(paths)
        share: float = pagecache.resident_share(paths)
        return share

    # ---- counts ----

    def counters(self, names: Sequence[str]) -> dict[str, float]:
        """The engine's counters of these names; those that it never touched are 0.

        Raises:
            BenchError: the server keeps no counters.
        """
        samples = self.engine.counters()
        if not samples:
            raise BenchError("the server has no /metrics: start it with --enable-metrics")
        return {name: samples.get(name, 0.0) for name in names}

    def settled_counters(self, names: Sequence[str], name: str, least: float) -> dict[str, float]:
        """As :meth:`counters`, once ``name`` has come to ``least``; whatever it is after a second.

        The engine may count a transfer a moment after the request that needed it has ended.
        """
        end = time.monotonic() + 1.0
        while (found := self.counters(names))[name] < least and time.monotonic() < end:
            time.sleep(POLL_S)
        return found

    def host_free_tokens(self) -> int:
        """Unused host memory."""
        return self.toolgap.overview().engine.host_free_tokens

    def settled_host_free_tokens(self, expected: int) -> int:
        """Unused host memory once it has come to what is expected; whatever it is after a second.

        What a stopped read had taken and not filled is released by SGLang's scheduler a step later.
        """
        end = time.monotonic() + 1.0
        while (found := self.host_free_tokens()) != expected and time.monotonic() < end:
            time.sleep(POLL_S)
        return found


@dataclass
class StoreStage(Stage):
    """A server over Toolgap's store, whose pages have no files of their own.

    What a trial adds to L3 stays there: no trial asks for it again.
    """

    storage_backend: str = BACKEND

    def stored(self, name: str, tokens: int) -> Prompt:
        """Compute a prompt of that name, and leave it in L3 only."""
        ids = prompt_ids(self.plan.seed, f"{self.nonce}{name}", tokens, VOCABULARY)
        self.flush()
        generation = self.engine.generate(ids, max_new_tokens=OUTPUT_TOKENS)
        self.flush()
        return Prompt(ids, ids[: prefix_tokens(tokens, self.plan.page_tokens)], generation.output_ids, set())

    def pages(self) -> set[Path]:
        """None that belong to one page alone."""
        return set()

    def prepare_page_cache(self, pages: Iterable[Path]) -> float | None:
        """Make the page cache of the whole store what the plan says; the share that it then holds."""
        assert self.storage is not None
        return super().prepare_page_cache(self.storage.glob("segments/*.seg"))


def fresh_salt() -> str:
    """A ``cache_salt`` under which no tier holds anything."""
    return f"toolgap-bench-{uuid4().hex}"


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            path.unlink()


class Background:
    """One call in a thread of its own; its result or exception is had from :meth:`result`."""

    def __init__(self, call: Callable[[], Generation]) -> None:
        self.outcome: Any = None
        self._error: BaseException | None = None
        self.ended_s: float | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Generation]) -> None:
        try:
            self.outcome = call()
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error
        self.ended_s = time.perf_counter()

    def result(self) -> Any:
        """Wait for it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.outcome
