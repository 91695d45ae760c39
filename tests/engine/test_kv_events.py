"""KV events of a restore: what a cache-aware router hears of it is what it hears of SGLang's own read."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from harness import DEADLINE_S, PAGE, Prompt, Server, until

from toolgap.childserver import free_port
from toolgap.protocol import State

pytestmark = pytest.mark.engine

TOPIC = "kv-events"
DEVICE, HOST = "GPU", "CPU_PINNED"


class Block(NamedTuple):
    """One page of a ``BlockStored`` event, which may tell of several in a row."""

    medium: str
    block_hash: int
    parent_hash: int | None
    token_ids: tuple[int, ...]


class Router:
    """What a cache-aware router does: subscribe, and keep what it is told in order."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.socket.subscribe(TOPIC)
        self.events: list[dict[str, Any]] = []

    def subscribe(self, marker: list[int]) -> None:
        """Wait until the subscription stands, and until all that was said before is heard.

        Args:
            marker: A prompt that nothing else uses.
        """

        def heard() -> bool:
            self.server.flush()
            return bool(self.socket.poll(200))

        until("the subscription stands", heard)
        self.server.generate(marker)
        page = marker[:PAGE]
        self.hear(lambda event: event.get("medium") == HOST and event.get("token_ids", [])[:PAGE] == page)
        self.forget()

    def forget(self) -> None:
        """Drop the cache, and everything heard up to the word of it."""
        self.events.clear()
        self.server.flush()
        self.hear(lambda event: event["type"] == "AllBlocksCleared")
        self.events.clear()

    def hear(self, last: Callable[[dict[str, Any]], bool]) -> None:
        """Listen until an event for which ``last`` is true; fails loudly if none comes."""
        seen = 0
        while not any(map(last, self.events[seen:])):
            seen = len(self.events)
            assert self.socket.poll(int(DEADLINE_S * 1000)), f"heard only {self.events}"
            self._receive()

    def _receive(self) -> None:
        topic, _, payload = self.socket.recv_multipart()
        assert topic == TOPIC.encode()
        _, events, _ = msgspec.msgpack.decode(payload)
        self.events += events

    def stored(self, medium: str, until_hash: int) -> list[Block]:
        """Pages told to be stored in a medium, up to the one with that hash, in order."""
        self.hear(lambda event: event.get("medium") == medium and until_hash in event["block_hashes"])
        return [block for block in self.blocks() if block.medium == medium]

    def blocks(self) -> Iterator[Block]:
        """All pages heard of so far, in order."""
        for event in self.events:
            if event["type"] != "BlockStored":
                continue
            assert event["block_size"] == PAGE
            parent = event["parent_block_hash"]
            for number, block_hash in enumerate(event["block_hashes"]):
                tokens = event["token_ids"][number * PAGE : (number + 1) * PAGE]
                yield Block(event["medium"], block_hash, parent, tuple(tokens))
                parent = block_hash

    def close(self) -> None:
        self.socket.close(linger=0)


def test_a_restore_is_told_as_a_read_of_sglangs_own(model: Path, tmp_path: Path, prompt: Prompt) -> None:
    port = free_port()
    config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "bind": True, "topic": TOPIC}
    prefix = prompt(20 * PAGE)
    pages = [tuple(prefix[start : start + PAGE]) for start in range(0, len(prefix), PAGE)]
    with Server(model, tmp_path, arguments=["--kv-events-config", json.dumps(config)]) as server:
        router = Router(server, port)
        try:
            router.subscribe(marker=prompt(2 * PAGE))

            recomputed = server.generate(prefix + [5])
            router.hear(
                lambda event: event.get("medium") == DEVICE and tuple(event["token_ids"][-PAGE:]) == pages[-1]
            )
            original = [block for block in router.blocks() if block.medium == DEVICE][: len(pages)]
            assert [block.token_ids for block in original] == pages
            assert original[0].parent_hash is None
            last_hash = original[-1].block_hash
            router.stored(HOST, last_hash)  # backed up, so that the flush is not refused

            router.forget()
            assert server.generate(prefix + [5]).sources == (0, 0, len(prefix))
            read_on_request = router.stored(HOST, last_hash)
            assert read_on_request == [block._replace(medium=HOST) for block in original]

            router.forget()
            outcome = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
            assert (outcome.state, outcome.inserted_tokens) == (State.RESTORED, len(prefix))
            assert router.stored(HOST, last_hash) == read_on_request
            assert all(block.medium == HOST for block in router.blocks()), (
                "nothing of it is on the device yet"
            )

            continuation = server.generate(prefix + [5])
            assert continuation.sources == (0, len(prefix), 0)
            assert continuation.output_ids == recomputed.output_ids
            assert [block.block_hash for block in router.stored(DEVICE, last_hash)][: len(pages)] == [
                block.block_hash for block in original
            ]
        finally:
            router.close()
