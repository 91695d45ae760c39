"""The one part of the store that is compiled, where the machine has a C compiler: see ``strip.c``."""

import functools
import logging
from typing import TYPE_CHECKING

from toolgap.store.native.compiler import CompilerError

if TYPE_CHECKING:
    from toolgap.store.native.stripreader import StripReader

PIECE_BYTES = 128 << 10
"""What is read from the page cache before it is hashed: small enough for a core's own cache still to have it, and large
enough for a call to the system."""

_logger = logging.getLogger(__name__)


@functools.cache
def load() -> "StripReader | None":
    """One a process; None where it cannot be had, which is logged once: pages are read and hashed by Python then."""
    # It needs xxhash, which not everybody has who asks whether there is a compiler.
    from toolgap.store.native.stripreader import StripReader

    try:
        return StripReader()
    except CompilerError as error:
        _logger.warning("toolgap store: Python reads and checks the pages, which is slower: %s", error)
        return None
