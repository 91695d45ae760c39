#!/usr/bin/env python3
"""Takes docs/images/gateway-page.png: the gateway's live page, in light and dark, with a made-up run.

.venv/bin/python scripts/page_picture.py
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path

import uvicorn
from msgspec.structs import replace
from PIL import Image
from starlette.applications import Starlette

import browser
from toolgap.gateway import events
from toolgap.gateway.page import Timeline, routes
from toolgap.protocol import Estimate, OperationStatus, Reason, State

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "gateway-page.png"
OPEN, HEIGHT = "6f1c09d2ab47-2", 850
"""The conversation that is shown in full, and the picture's height in pixels."""
NOW_S = 1_767_268_800.0
"""Noon of a day, UTC."""
WORKERS = ("http://10.0.0.11:30000", "http://10.0.0.12:30000")
TOKENS_PER_S, PREFILL_TOKENS_PER_S = 22_000.0, 6_500.0


class Run:
    """Tells a timeline of one conversation's gaps, one after another.

    Args:
        timeline: What is told.
        conversation: Its key.
        upstream: The worker that serves it.
        began_s: When its first answer left, in seconds before ``NOW_S``.
        tokens: Length of its prompt then.
    """

    def __init__(
        self, timeline: Timeline, conversation: str, upstream: str, began_s: float, tokens: int
    ) -> None:
        self.timeline, self.conversation, self.upstream = timeline, conversation, upstream
        self.at_s, self.tokens, self.operations = NOW_S - began_s, tokens, 0

    def wait(self, seconds: float) -> None:
        """The model generates."""
        self.at_s += seconds

    def gap(
        self,
        *tools: str,
        lasts_s: float | None,
        resident: bool = False,
        after_s: float = 0.05,
        used: float = 1.0,
        refused: str | None = None,
        hint_s: float | None = None,
        slow: float = 1.0,
    ) -> None:
        """An answer with these calls leaves; its gap ends after so long, or is open.

        Args:
            tools: Their names.
            lasts_s: None if it is open.
            resident: Whether everything is in host memory still.
            after_s: When the restore is submitted.
            used: The share of what landed that the continuation uses.
            refused: A code that the first submit gets.
            hint_s: When a hint comes.
            slow: How many times longer than usual storage takes.
        """
        start_s, key = self.at_s, self.conversation
        self.tokens += 900 + 13 * len(tools[0]) * len(tools)
        self.timeline.listen(
            events.Paused(
                conversation=key,
                at_s=start_s,
                upstream=self.upstream,
                tools=tools,
                prompt_tokens=self.tokens - 420,
                output_tokens=420,
                expected_gap_s=8.0 if lasts_s is None else lasts_s * 1.2,
            )
        )
        if refused is not None:
            self.timeline.listen(
                events.Refused(
                    conversation=key,
                    at_s=start_s + 0.04,
                    upstream=self.upstream,
                    operation_id=f"{key}:0",
                    code=refused,
                )
            )
        if hint_s is not None:
            self.timeline.listen(events.Hinted(conversation=key, at_s=start_s + hint_s, left_s=2.0))
        self.operations += 1
        first, ended, last = self._restore(after_s, lasts_s, resident=resident, used=used, slow=slow)
        submitted_s, ends_s = start_s + after_s, start_s + after_s + ended.elapsed_s
        self.timeline.listen(
            events.Submitted(conversation=key, at_s=submitted_s, upstream=self.upstream, status=first)
        )
        known = events.Known(conversation=key, at_s=ends_s, upstream=self.upstream, status=ended)
        if lasts_s is None:
            self.timeline.listen(known)
            return
        self.at_s = start_s + lasts_s
        if ends_s <= self.at_s:
            self.timeline.listen(known)
        self.timeline.listen(events.Returned(conversation=key, at_s=self.at_s, gap_s=lasts_s))
        if ends_s > self.at_s:
            self.timeline.listen(known)
        self.timeline.listen(
            events.Known(
                conversation=key, at_s=self.at_s + 0.3, upstream=self.upstream, status=last, final=True
            )
        )

    def _restore(
        self, after_s: float, lasts_s: float | None, *, resident: bool, used: float, slow: float
    ) -> tuple[OperationStatus, OperationStatus, OperationStatus]:
        aligned = self.tokens // 64 * 64
        held = aligned if resident else aligned // 10 // 64 * 64
        missing = aligned - held
        queried_s = 0.03
        read_s = None if resident else queried_s + slow * missing / TOKENS_PER_S
        ends_s = queried_s if read_s is None else read_s
        came_s = None if lasts_s is None else lasts_s - after_s
        first = OperationStatus(
            operation_id=f"{self.conversation}:{self.operations}",
            state=State.QUERYING,
            requested_tokens=self.tokens,
            aligned_tokens=aligned,
            resident_tokens=held,
            ttl_s=60.0,
            elapsed_s=0.004,
            namespace="made-up",
            estimate=Estimate(
                missing_tokens=missing,
                restore_s=missing / TOKENS_PER_S,
                recompute_s=missing / PREFILL_TOKENS_PER_S,
                gap_s=8.0,
                queued_tokens=0,
                restore_tokens_per_s=TOKENS_PER_S,
                prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
                worthwhile=True,
            ),
        )
        ended = replace(
            first,
            state=State.RESTORED,
            reason=Reason.ALREADY_RESIDENT if resident else Reason.COMPLETE,
            found_tokens=missing,
            read_tokens=missing,
            inserted_tokens=missing,
            queried_s=queried_s,
            read_s=read_s,
            elapsed_s=ends_s,
        )
        last = replace(
            ended,
            joined_requests=int(came_s is not None and came_s < ends_s),
            used_tokens=int(missing * used) // 64 * 64,
            used_after_s=None if came_s is None or not used else max(came_s, ends_s) + 0.02,
        )
        return first, ended, last


def made_up() -> Timeline:
    """A run of some minutes, of five agents on two workers."""
    # Of a gateway that was started five minutes ago.
    clock = chain((NOW_S - 300,), repeat(NOW_S))
    timeline = Timeline(lambda: next(clock))
    one = Run(timeline, "6f1c09d2ab47-1", WORKERS[0], 282, 31_000)
    for tool, lasts_s, wait_s in (
        ("read_file", 3.1, 6),
        ("bash", 21.4, 9),
        ("bash", 34.0, 7),
        ("edit", 2.2, 5),
    ):
        one.gap(tool, lasts_s=lasts_s, resident=lasts_s < 3)
        one.wait(wait_s)
    one.gap("bash", lasts_s=48.0, hint_s=40.0, after_s=40.1)
    one.wait(8)
    one.gap("grep", "read_file", lasts_s=4.4)
    one.wait(6)
    one.gap("bash", lasts_s=62.0, after_s=0.1)
    one.wait(7)
    one.gap("bash", lasts_s=None)

    two = Run(timeline, "6f1c09d2ab47-2", WORKERS[0], 240, 18_000)
    two.gap("web_search", lasts_s=6.2)
    two.wait(11)
    two.gap("web_fetch", "web_fetch", lasts_s=1.0, slow=2.4)
    two.wait(14)
    two.gap("web_search", lasts_s=7.9, refused="too_many_operations", after_s=1.1)
    two.wait(21)
    two.gap("web_fetch", lasts_s=12.6)
    two.timeline.listen(events.Closed(conversation=two.conversation, at_s=two.at_s + 19))

    three = Run(timeline, "b07d5532e81c-3", WORKERS[1], 205, 52_000)
    three.gap("run_tests", lasts_s=71.0, hint_s=66.0)
    three.wait(12)
    three.gap("apply_patch", lasts_s=1.6, slow=1.3)
    three.wait(9)
    three.gap("run_tests", lasts_s=68.0, refused="host_budget", after_s=2.2)
    three.wait(10)
    three.gap("run_tests", lasts_s=None)

    four = Run(timeline, "48aa90c7f6d3-4", WORKERS[1], 168, 24_000)
    four.gap("bash", lasts_s=15.2)
    four.wait(8)
    four.gap("compact", lasts_s=9.0, used=0.0)
    four.wait(6)
    four.gap("bash", lasts_s=26.0)
    four.wait(11)
    four.gap("bash", lasts_s=17.5)

    five = Run(timeline, "e3518b64d09f-5", WORKERS[0], 96, 12_500)
    five.gap("ask_user", lasts_s=None, after_s=0.2)
    five.timeline.listen(events.Closed(conversation=five.conversation, at_s=NOW_S - 21))
    return timeline


@contextmanager
def served(timeline: Timeline) -> Iterator[str]:
    """The page's URL."""
    bound = socket.create_server(("127.0.0.1", 0))
    app = Starlette(routes=routes(timeline))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/toolgap"
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


def main() -> int:
    program = browser.find()
    if program is None:
        print("Chromium is missing; on Debian: sudo apt-get install chromium", file=sys.stderr)
        return 1
    timeline = made_up()
    with served(timeline) as url:
        for path, dark in ((PICTURE, False), (PICTURE.with_stem(f"{PICTURE.stem}-dark"), True)):
            seen = browser.look(
                program, f"{url}#range=300&open={OPEN}", picture=path, height=HEIGHT, dark=dark
            )
            # Flat colours: a palette is a third of the size.
            with Image.open(path) as picture:
                picture.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(path, optimize=True)
            print(path, f"{path.stat().st_size / 1024:.0f} KiB", *seen.console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
