"""Work in portions of so many bytes."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from toolgap.store.options import MIB

BATCH_BYTES = 64 * MIB
"""What is written between two commits to the index."""

T = TypeVar("T")


def batches(items: Iterable[T], size_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in their order, together up to :data:`BATCH_BYTES`."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = size_bytes(item)
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
