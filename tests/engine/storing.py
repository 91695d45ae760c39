"""Servers over Toolgap's store."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import PAGE, PATIENT, Server

from toolgap.protocol import OperationStatus
from toolgap.store.config import StoreConfig, arguments

PAGES = 40
"""More than SGLang's shortest read (16 pages)."""
TOKENS = PAGES * PAGE


@contextmanager
def serving(
    model: Path, folder: Path, config: StoreConfig, extra: Sequence[str] = (), **fields: Any
) -> Iterator[Server]:
    with Server(
        model,
        folder,
        arguments=[
            *arguments(config),
            *("--hicache-mem-layout", "page_first", "--served-model-name", "tiny"),
            *extra,
        ],
        environment=PATIENT,
        **fields,
    ) as server:
        yield server


def restored(server: Server, prefix: Sequence[int]) -> OperationStatus:
    return server.ended(server.toolgap.submit(input_ids=prefix).operation_id)


def counted(server: Server, name: str, labels: str = "") -> float:
    """The sum of one of the store's metrics, where it has these labels."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(f"sglang:hicache_store_{name}{{") and labels in line
    )


def recomputed(server: Server, prompt: list[int]) -> list[int]:
    """What the model says to a prompt if nothing of it is cached."""
    answer = server.generate(prompt, tokens=8, extra_key="computed")
    assert answer.sources == (0, 0, 0)
    server.flush()
    return answer.output_ids


def sizes(store: Path) -> dict[Path, int]:
    return {file: file.stat().st_size for file in store.glob("segments/*.seg")}


def flip_pages(file: Path, begin: int, end: int, *, first: int = 0) -> None:
    """Flip bytes in the middle of each of the last stored pages but the first ones; sizes stay."""
    if end == begin:
        return
    content = bytearray(file.read_bytes())
    # The first page of a segment has a block before it.
    begin = max(begin, end - (end - begin) // PAGES * PAGES)
    record_bytes = (end - begin) // PAGES
    for page in range(first, PAGES):
        at = begin + page * record_bytes + record_bytes // 2
        content[at : at + 1024] = bytes(byte ^ 0xFF for byte in content[at : at + 1024])
    with file.open("r+b") as stream:
        stream.write(content)
