"""FastMCP: while a tool runs, the conversation's KV is restored; the tool's progress tells when it ends."""

import asyncio
import os
from pathlib import Path
from typing import Any

from fastmcp import Client, Context, FastMCP
from openai import AsyncOpenAI

from toolgap.hooks.fastmcp import ToolgapTools

URL = os.environ.get("TOOLGAP_URL", "http://127.0.0.1:30000")
MESSAGE: Any = {"role": "user", "content": f"Test this program:\n{Path(__file__).read_text()}"}
OFFER: Any = {"tools": [{"type": "function", "function": {"name": "run_tests"}}], "tool_choice": "required"}
server: FastMCP = FastMCP("tests")


@server.tool
async def run_tests(context: Context) -> str:
    """Run the program's tests."""
    for done in range(4):
        await asyncio.sleep(0.3)
        await context.report_progress(done + 1, 4)
    return "4 tests passed"


async def main() -> None:
    chat = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none").chat.completions
    completion = await chat.create(model="default", messages=[MESSAGE], max_tokens=32, **OFFER)
    async with Client(server) as client:
        tools = ToolgapTools(client, URL)
        tools.answered(completion.id)
        print("result:", (await tools.call_tool("run_tests")).data)
    print(tools.restores.report())


asyncio.run(main())
