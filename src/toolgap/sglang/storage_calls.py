"""Which storage calls are running: SGLang's threads make them, and nothing else tells.

SGLang ends its scheduler if it cannot join those threads within seconds when it resets the cache.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

_RETURNED_AT = "toolgap_returned_at"
"""Left on SGLang's record of the operation, so that it goes when that goes."""


class StorageCalls:
    """Calls in flight, by the SGLang operation that they are made for.

    Written by SGLang's storage threads and read by the scheduler's; each step is one dict operation.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, tuple[Any, threading.Thread]] = {}
        self._retired: set[threading.Thread] = set()

    def around(self, original: Callable[..., Any], controller: Any, operation: Any) -> Any:
        """Make a call, and keep note of it while it lasts."""
        thread = threading.current_thread()
        self._in_flight[id(operation)] = operation, thread
        try:
            return original(controller, operation)
        finally:
            self._in_flight.pop(id(operation), None)
            setattr(operation, _RETURNED_AT, time.monotonic())
            if thread in self._retired:
                # Another thread has taken its place. Its loop acknowledges the call on the way out.
                raise SystemExit

    def in_the_way_of(self, operation: Any) -> Any:
        """The operation whose call keeps this one from going on: itself, or the oldest in flight if it waits."""
        if self.running(operation):
            return operation
        return next((other for other, _ in list(self._in_flight.values())), operation)

    @staticmethod
    def returned_at(operation: Any) -> float | None:
        """When the last call for this operation returned, by the monotonic clock; None if none has."""
        value: float | None = getattr(operation, _RETURNED_AT, None)
        return value

    def retire(self, operation: Any) -> threading.Thread | None:
        """Let the thread that makes this call end with it; None if none makes it (any more)."""
        call = self._in_flight.get(id(operation))
        if call is None:
            return None
        self._retired.add(call[1])
        return call[1]

    def running(self, operation: Any) -> bool:
        """Whether a call for this operation has not returned."""
        return id(operation) in self._in_flight

    def __len__(self) -> int:
        """Calls in flight, and threads on their way out: SGLang does not join those when it stops its own."""
        self._retired = {thread for thread in self._retired if thread.is_alive()}
        leaving = self._retired - {thread for _, thread in list(self._in_flight.values())}
        return len(self._in_flight) + len(leaving)
