"""Toolgap's store: the folder that SGLang would be told of, and its disk."""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from toolgap.doctor.findings import Finding, note, ok, problem
from toolgap.store import config as stores
from toolgap.store.errors import StoreError
from toolgap.store.native import compiler

GIB = 1 << 30


class StorePlace(NamedTuple):
    """A store that SGLang would be told of, and what this machine has for it."""

    path: Path
    limit_bytes: int | None
    reads_in_place: bool
    """Whether SGLang would use the interface that copies no page."""
    has_xxhash: bool
    has_compiler: bool
    free_bytes: int | None
    """Of the disk; None if the folder cannot be written."""


def inspect_store(extra_config: str | None) -> StorePlace | None:
    """The store that an extra config of SGLang's names; None if it names another backend.

    Raises:
        ValueError: the store would not open.
    """
    try:
        extra = json.loads(extra_config or "{}")
    except ValueError:
        return None  # a file, or nothing that SGLang would take: others look at that
    if not isinstance(extra, dict) or extra.get("class_name") != stores.CLASS:
        return None
    try:
        path, config = stores.read(extra)
    except StoreError as error:
        raise ValueError(str(error)) from None
    there = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    usable = there is not None and there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return StorePlace(
        path,
        config.limit_bytes,
        reads_in_place=bool(extra.get("interface_v1")),
        has_xxhash=importlib.util.find_spec("xxhash") is not None,
        has_compiler=compiler.found() is not None,
        free_bytes=shutil.disk_usage(there).free if there is not None and usable else None,
    )


def check_store(place: StorePlace) -> list[Finding]:
    """Findings about the store that SGLang would be started with."""
    findings = []
    if not place.has_xxhash:
        findings.append(problem("store-packages", "The store needs xxhash.", "pip install 'toolgap[store]'"))
    if not place.has_compiler:
        findings.append(
            note(
                "store-compiler",
                "Without a C compiler Python reads and checks the pages, which is slower.",
                "Install one, such as Debian's gcc and libc6-dev: SGLang compiles with it too.",
            )
        )
    if not place.reads_in_place:
        findings.append(
            note(
                "store-interface",
                "Without interface_v1 SGLang copies every page twice.",
                'Add "interface_v1": 1 to its extra config, or let toolgap serve --store write that.',
            )
        )
    if place.free_bytes is None:
        return [
            *findings,
            problem(
                "store",
                f"{place.path} cannot be written.",
                "Name a folder that the server may write: --store PATH.",
            ),
        ]
    limit = (
        "without a limit" if place.limit_bytes is None else f"of at most {place.limit_bytes / GIB:.1f} GiB"
    )
    free = f"{place.free_bytes / GIB:.1f} GiB"
    findings.append(ok("store", f"L3 is Toolgap's store {limit} in {place.path}; the disk has {free} free."))
    if place.limit_bytes is None:
        findings.append(
            note(
                "store-limit",
                "The store grows until the disk is full, and then stores nothing more.",
                "Give it a limit: toolgap serve --store PATH --store-limit-gib N.",
            )
        )
    return findings
