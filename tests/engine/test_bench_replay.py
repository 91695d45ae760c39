"""A recording is replayed on a real server, both ways, and what was measured is verified."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ADMIN_KEY, PAGE, Server

from toolgap.bench.evidence import TRIALS
from toolgap.bench.verify import problems
from toolgap.gateway.apis.answers import Usage
from toolgap.gateway.recording import Recording
from toolgap.gateway.watch import Asked, Seen
from toolgap.hooks.restores import Call
from toolgap.hooks.tool_calls import Answer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
ANSWER = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
TURNS = 3


def record(path: Path, *, content: bool) -> None:
    """A session of some turns, each of which calls a tool."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Which files are here? " * 40}]
    with Recording(path, content=content) as recording:
        for number in range(TURNS):
            seen = Seen(
                answer=Answer(request_id="r", messages=(ANSWER,), calls=["c"]),
                calls=(Call("c", "read"),),
                finish="tool_calls",
                answer_id="r",
                reasoned=False,
                usage=Usage(600 + 100 * number, 12),
                calling_s=10.0 * number + 1.5,
                whole_s=10.0 * number + 2.0,
            )
            recording.turn(
                "a", Asked("/v1/chat/completions", {"messages": list(messages)}), seen, 10.0 * number
            )
            messages += [ANSWER, {"role": "tool", "tool_call_id": "c", "content": "a file, " * 30}]


def test_a_recording_is_replayed_both_ways(server: Server, tmp_path: Path) -> None:
    path, folder = tmp_path / "turns.jsonl", tmp_path / "replayed"
    record(path, content=True)
    record(path, content=False)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "toolgap", "bench", "replay", str(path), "-o", str(folder), "--json"),
            *("--url", server.url, "--api-key", ADMIN_KEY, "--storage-dir", str(server.storage)),
            *("--page-tokens", str(PAGE), "--speed", "40", "--trials", "1", "--prompt-tokens", "4096"),
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert problems(folder) == []
    trials = [json.loads(line) for line in (folder / TRIALS).read_bytes().splitlines()]
    by_arm = {trial["cell"]["arm"]: trial for trial in trials}
    assert [trial["invalid"] for trial in trials] == [[], []]
    stock, toolgap = by_arm["stock"]["continuations"], by_arm["toolgap"]["continuations"]
    assert len(stock) == len(toolgap) == 2 * (TURNS - 1)
    assert {one["gap_s"] for one in toolgap} == {0.2}
    # Of what was said, the recorded answer is not the one that this server has given, and stored.
    assert {one["state"] for one in toolgap} <= {"restored", "partial"}
    assert {one["refused"] for one in toolgap} == {None}
    assert all(one["prefix_tokens"] > 0 for one in toolgap)
    # Made up or said, the prompts are the same for both, and so is what a server answers.
    for one, other in zip(stock, toolgap, strict=True):
        assert (one["prompt_tokens"], one["output_sha256"]) == (
            other["prompt_tokens"],
            other["output_sha256"],
        )
    assert str(tmp_path) not in (folder / "report.md").read_text()
