"""An agent of the OpenAI Agents SDK whose tool drops all KV that is in memory: run by tests/engine/test_examples.py.

Prints the outcome of the operation that the tool's end submitted, as JSON, once the continuation has been served.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, Tool, function_tool
from openai import AsyncOpenAI

from toolgap.client import Toolgap
from toolgap.hooks.openai_agents import ToolgapRunHooks

URL = os.environ["TOOLGAP_URL"]


class Patient(ToolgapRunHooks):
    """Waits for what a tool's end submitted, so that it is not the continuation that reads it."""

    async def on_tool_end(self, context: Any, agent: Agent[Any], tool: Tool, result: object) -> None:
        await super().on_tool_end(context, agent, tool, result)
        await asyncio.to_thread(self.wait_for_the_last)

    def wait_for_the_last(self) -> None:
        last = self.restores.operations()[-1]
        with Toolgap(URL) as toolgap:
            toolgap.wait(last.operation_id)


@function_tool
def flush() -> str:
    """Drop what is in memory."""
    # Refused as long as a page is on its way to storage.
    while httpx.post(f"{URL}/flush_cache").status_code != httpx.codes.OK:
        time.sleep(0.05)
    return "flushed"


async def main(program: str) -> None:
    model = OpenAIChatCompletionsModel("default", AsyncOpenAI(base_url=f"{URL}/v1", api_key="none"))
    settings = ModelSettings(tool_choice="required", temperature=0, max_tokens=32)
    hooks = Patient(URL, strict=True)
    agent = Agent("a", instructions=program, model=model, tools=[flush], model_settings=settings)
    await Runner.run(agent, "Flush.", hooks=hooks)
    operations = await asyncio.to_thread(hooks.restores.operations)
    sys.stdout.write(msgspec.json.encode(operations[-1]).decode())


if __name__ == "__main__":
    asyncio.run(main(Path(__file__).read_text(encoding="utf-8")))
