"""A page as the caller has it: a key and memory."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple


class Page(NamedTuple):
    """One page and the caller's memory for it."""

    key: str
    """Unique within the namespace: the page's hash, with whatever tells ranks and pools apart."""
    buffers: Sequence[memoryview]
    """Flat, contiguous, of bytes (format ``B``), writable for reads: the payload is their concatenation."""


def memory(address: int, length_bytes: int) -> memoryview:
    """The bytes at an address, which must stay valid for as long as the view is used."""
    return memoryview((ctypes.c_ubyte * length_bytes).from_address(address)).cast("B")


def address(part: memoryview) -> int:
    """Where memory that can be written begins: the other way round of :func:`memory`.

    Raises:
        TypeError: it cannot be written.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(part))
