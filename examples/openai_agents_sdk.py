"""OpenAI Agents SDK: while the agent's tool runs, its KV is restored."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

from toolgap.hooks.openai_agents import ToolgapRunHooks

URL = os.environ.get("TOOLGAP_URL", "http://127.0.0.1:30000")
PROMPT = f"You make this program faster:\n{Path(__file__).read_text()}"


@function_tool
async def benchmark(statement: Literal["sorted(range(999))"]) -> str:
    """Measure how long a Python statement takes."""
    command = (sys.executable, "-m", "timeit", statement)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()


async def main() -> None:
    model = OpenAIChatCompletionsModel("default", AsyncOpenAI(base_url=f"{URL}/v1", api_key="none"))
    settings = ModelSettings(tool_choice="required", temperature=0, max_tokens=64)
    agent = Agent("tuner", instructions=PROMPT, model=model, tools=[benchmark], model_settings=settings)
    hooks = ToolgapRunHooks(URL)
    result = await Runner.run(agent, "Benchmark its statement.", hooks=hooks)
    print("answer:", result.final_output)
    print(hooks.restores.report())


asyncio.run(main())
