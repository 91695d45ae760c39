"""Reading and hashing in one call that holds no interpreter lock."""

import ctypes
import importlib
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import xxhash

from toolgap.store.native.compiler import CompilerError, compiled
from toolgap.store.page import address

SOURCE = Path(__file__).with_name("strip.c")
_FUNCTIONS = ("createState", "freeState", "128bits_reset", "128bits_update", "128bits_digest")


class _Xxh3(ctypes.Structure):
    """``struct xxh3``: addresses of functions."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("create", "release", "reset", "update", "digest"))


class StripReader:
    """Reads parts of a file into memory, hashing each piece while the processor's cache still has it.

    ``pread`` and the hash, one after the other, go through memory twice, and change hands of the interpreter lock
    for each page.

    Raises:
        CompilerError: it cannot be had here; pages are read without.
    """

    def __init__(self) -> None:
        self._read = compiled(SOURCE).toolgap_read_strip
        self._read.restype = ctypes.c_int64
        self._read.argtypes = (
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.POINTER(_Xxh3),
        )
        self._xxh3 = _xxh3()
        self._try()

    def read(
        self,
        fd: int,
        offset: int,
        parts: Sequence[memoryview],
        owners: Sequence[int],
        pages: int,
        piece_bytes: int,
    ) -> tuple[int, list[bytes]]:
        """Fill the parts with the file's bytes from `offset` on.

        Args:
            fd: An open file.
            offset: In bytes.
            parts: Where the bytes go, one after the other; they must be writable.
            owners: For each part the number of the page whose payload it is, from 1 and in their order; 0: nobody's.
            pages: How many pages there are.
            piece_bytes: Read between two calls of the hash, at most.

        Returns:
            How many bytes there were, fewer only at the file's end; and for each page the digest of its parts
            (XXH3, 16 bytes), which is right if all of them were filled.

        Raises:
            OSError: the disk says no.
        """
        table = array("Q")
        for part, owner in zip(parts, owners, strict=True):
            table.extend((address(part), len(part), owner))
        digests = ctypes.create_string_buffer(16 * pages)
        read = self._read(
            fd,
            offset,
            table.buffer_info()[0],
            len(parts),
            digests,
            piece_bytes,
            self._xxh3,
        )
        if read < 0:
            raise OSError(-read, os.strerror(-read))
        told = digests.raw
        return read, [told[at : at + 16] for at in range(0, len(told), 16)]

    def _try(self) -> None:
        """That it reads and hashes as Python does: nothing else says that these are the functions they should be."""
        try:
            sample = SOURCE.read_bytes()
            memory = memoryview(bytearray(len(sample)))
            parts, owners = [memory[:7], memory[7:99], memory[99:150], memory[150:]], [0, 1, 2, 2]
            with SOURCE.open("rb") as file:
                told = self.read(file.fileno(), 0, parts, owners, 2, piece_bytes=1000)
        except OSError as error:
            raise CompilerError(f"{SOURCE} cannot be read: {error.strerror or error}") from None
        digest = xxhash.xxh3_128_digest
        if memory != sample or told != (len(sample), [digest(sample[7:99]), digest(sample[99:])]):
            raise CompilerError("what was compiled does not do what it should")


def _xxh3() -> _Xxh3:
    """python-xxhash's own functions, the fastest ones for this processor where it has several."""
    try:
        library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    except (ImportError, OSError) as error:
        raise CompilerError(f"this build of xxhash is no library: {error}") from None
    addresses = []
    for name in _FUNCTIONS:
        function = getattr(library, f"XXH3_{name}_dispatch", None) or getattr(library, f"XXH3_{name}", None)
        if function is None:
            raise CompilerError(f"this build of xxhash has no XXH3_{name}")
        addresses.append(ctypes.cast(function, ctypes.c_void_p))
    return _Xxh3(*addresses)
