"""FastMCP: while a tool runs, the conversation's KV is restored; the tool's progress tells when it ends."""

import asyncio
import os
from pathlib import Path

from fastmcp import Client, Context, FastMCP
from openai import OpenAI

from toolgap.hooks.fastmcp import ToolgapTools

URL = os.environ.get("TOOLGAP_URL", "http://127.0.0.1:30000")
server: FastMCP = FastMCP("tests")


@server.tool
async def run_tests(context: Context) -> str:
    """Run the program's tests."""
    for done in range(1, 5):
        await (await asyncio.create_subprocess_exec("sleep", "0.3")).wait()
        await context.report_progress(done, 4)
    return "4 tests passed"


async def call(completion_id: str) -> None:
    """Call the tool that the completion asked for."""
    async with Client(server) as client:
        tools = ToolgapTools(client, URL)
        tools.answered(completion_id)
        print("result:", (await tools.call_tool("run_tests")).data)
    for operation in tools.restores.operations():
        print(operation.operation_id, operation.state, operation.reason, f"{operation.used_tokens} tokens used")


completion = OpenAI(base_url=f"{URL}/v1", api_key="none").chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": f"Test this program:\n{Path(__file__).read_text()}"}],
    tools=[{"type": "function", "function": {"name": "run_tests"}}],
    tool_choice="required",
    max_tokens=32,
)
asyncio.run(call(completion.id))
