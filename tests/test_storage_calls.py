"""Which storage calls are running, and threads that another one has replaced."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from toolgap.sglang.storage_calls import StorageCalls


class Reader:
    """A thread that makes calls one after another, each of which lasts until it is let go."""

    def __init__(self, calls: StorageCalls, *operations: Any, fails: bool = False) -> None:
        self.calls = calls
        self.made: list[Any] = []
        self.fails = fails
        self.began = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.acknowledged = threading.Event()
        self.way_out = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(operations,))
        self.thread.start()
        assert self.began.acquire(timeout=10)

    def _run(self, operations: tuple[Any, ...]) -> None:
        for operation in operations:
            try:
                self.calls.around(self._call, None, operation)
            finally:
                self.acknowledged.set()
                assert self.way_out.acquire(timeout=10)

    def _call(self, _controller: Any, operation: Any) -> None:
        self.made.append(operation)
        self.began.release()
        assert self.gate.acquire(timeout=10)
        if self.fails:
            raise OSError

    def end(self) -> None:
        self.gate.release()
        self.way_out.release()
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_a_call_is_running_until_it_returns() -> None:
    calls, operation = StorageCalls(), SimpleNamespace()
    reader = Reader(calls, operation)
    assert calls.running(operation)
    assert len(calls) == 1
    assert calls.returned_at(operation) is None
    reader.end()
    assert not calls.running(operation)
    assert not calls
    assert calls.returned_at(operation) is not None


def test_what_waits_is_kept_by_the_call_before_it() -> None:
    calls, first, second = StorageCalls(), SimpleNamespace(), SimpleNamespace()
    assert calls.in_the_way_of(second) is second
    reader = Reader(calls, first)
    assert calls.in_the_way_of(first) is first
    assert calls.in_the_way_of(second) is first
    reader.end()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_a_replaced_thread_ends_with_its_call_and_counts_until_it_is_gone(*, fails: bool) -> None:
    calls, first, second = StorageCalls(), SimpleNamespace(), SimpleNamespace()
    reader = Reader(calls, first, second, fails=fails)
    assert calls.retire(second) is None
    assert calls.retire(first) is reader.thread
    assert len(calls) == 1  # as a call, not once more as a thread
    reader.gate.release()
    assert reader.acknowledged.wait(10)
    assert not calls.running(first)
    assert len(calls) == 1  # its loop has something to do on the way out
    reader.end()
    assert reader.made == [first]
    assert not calls
