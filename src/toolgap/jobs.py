"""Work that a client does beside its caller: it belongs to the client, whose end waits for it, but not for long.

Jobs of one owner run one after another. A job raises nothing.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine

CLOSING_S = 2.0
"""How long closing a client waits for its jobs, all of them together."""


class Threads:
    """Jobs of a sync client, each on a thread of its own that does not keep the process alive."""

    def __init__(self) -> None:
        self._running: set[threading.Thread] = set()

    def start(self, job: Callable[[], None], after: threading.Thread | None) -> threading.Thread:
        """Run a job once an earlier one has ended.

        Raises:
            RuntimeError: the system gives no thread.
        """

        def run() -> None:
            try:
                if after is not None:
                    after.join()
                job()
            finally:
                self._running.discard(thread)

        thread = threading.Thread(target=run, name="toolgap", daemon=True)
        self._running.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._running.discard(thread)
            raise
        return thread

    def close(self) -> None:
        """Wait for the jobs; those that last too long meet a closed connection."""
        end_s = time.monotonic() + CLOSING_S
        for thread in list(self._running):
            thread.join(max(0.0, end_s - time.monotonic()))


class Tasks:
    """Jobs of an async client, each a task of its event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(
        self, job: Callable[[], Coroutine[None, None, None]], after: asyncio.Task[None] | None
    ) -> asyncio.Task[None]:
        """Run a job once an earlier one has ended.

        Raises:
            RuntimeError: no event loop runs, as when a coroutine is closed and not awaited.
        """
        loop = asyncio.get_running_loop()

        async def run() -> None:
            if after is not None:
                await asyncio.wait([after])
            await job()

        task = loop.create_task(run(), name="toolgap")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        """Wait for the jobs, and cancel those that last too long, or all of them if this is cancelled."""
        try:
            if self._running:
                await asyncio.wait(self._running, timeout=CLOSING_S)
        finally:
            left = list(self._running)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
