"""Claude Code's hooks, posted by an agent of ten lines as Claude Code does: the receiver restores its KV."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
from anthropic import Anthropic

from toolgap.childserver import ChildServer, free_port
from toolgap.client import Toolgap

URL = os.environ.get("TOOLGAP_URL", "http://127.0.0.1:30000")
SESSION, PORT = f"example-{os.getpid()}", free_port()
RECEIVER = f"http://127.0.0.1:{PORT}"
COMMAND = [sys.executable, "-m", "toolgap", "hooks", "claude-code", "--url", URL, "--port", str(PORT)]

with ChildServer(COMMAND, f"{RECEIVER}/health", Path(os.devnull)) as receiver:
    receiver.wait_until_healthy(60)
    headers = {"x-claude-code-session-id": SESSION}
    message = Anthropic(base_url=RECEIVER, api_key="none", default_headers=headers).messages.create(
        model="default",
        max_tokens=64,
        extra_body={"temperature": 0},
        messages=[{"role": "user", "content": f"Benchmark this:\n{Path(__file__).read_text()}"}],
        tools=[{"name": "benchmark", "input_schema": {"type": "object", "additionalProperties": False}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    for call in (block for block in message.content if block.type == "tool_use"):
        event = {"session_id": SESSION, "tool_name": call.name, "tool_use_id": call.id}
        httpx.post(f"{RECEIVER}/hooks", json={**event, "hook_event_name": "PreToolUse"})
        subprocess.run([sys.executable, "-m", "timeit", "sorted(range(999))"], check=True)
        httpx.post(f"{RECEIVER}/hooks", json={**event, "hook_event_name": "PostToolUse"})
    httpx.post(f"{RECEIVER}/hooks", json={"session_id": SESSION, "hook_event_name": "SessionEnd"})
for operation in Toolgap(URL).overview().recent[:2]:
    print(f"{operation.operation_id}: {operation.state} ({operation.reason}), {operation.used_tokens} used")
