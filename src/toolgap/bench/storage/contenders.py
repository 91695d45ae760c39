"""A contender: one way to keep pages on a disk and to read them into the host pool."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from toolgap.bench.storage.pages import Pages, Target

IO_BYTES = 4 << 20
"""Neighbouring pages are read together up to this."""

Read = Callable[[], None]
"""Reads every page into the target."""


class Contender(ABC):
    """One way. A folder of its own is given to each."""

    name: str
    caches: ClassVar[tuple[str, ...]] = ("cold", "warm")
    """States of the page cache that it can be measured in."""

    @property
    def data(self) -> str:
        """Contenders of one name here read the same files."""
        return self.name

    @abstractmethod
    def write(self, folder: Path, pages: Pages, target: Target) -> None:
        """Store the pages, and leave them on the device.

        The target holds them already.
        """

    @abstractmethod
    def opened(self, folder: Path, pages: Pages, target: Target) -> AbstractContextManager[Read]:
        """What reads all pages; opening and closing are not measured."""

    def files(self, folder: Path) -> list[Path]:
        """What the page cache may hold of it."""
        return [path for path in folder.rglob("*") if path.is_file()]
