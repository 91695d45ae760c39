"""Which storage calls are running: SGLang's threads make them, and nothing else tells.

SGLang ends its scheduler if it cannot join those threads within seconds when it resets the cache.
"""

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
        self._in_flight: dict[int, Any] = {}

    def around(self, original: Callable[..., Any], controller: Any, operation: Any) -> Any:
        """Make a call, and keep note of it while it lasts."""
        self._in_flight[id(operation)] = operation
        try:
            return original(controller, operation)
        finally:
            self._in_flight.pop(id(operation), None)
            setattr(operation, _RETURNED_AT, time.monotonic())

    @staticmethod
    def returned_at(operation: Any) -> float | None:
        """When the last call for this operation returned, by the monotonic clock; None if none has."""
        value: float | None = getattr(operation, _RETURNED_AT, None)
        return value

    def running(self, operation: Any) -> bool:
        """Whether a call for this operation has not returned."""
        return id(operation) in self._in_flight

    def __len__(self) -> int:
        return len(self._in_flight)
