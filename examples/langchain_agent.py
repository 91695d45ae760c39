"""LangChain and LangGraph: while the agent's tool runs, its KV is restored."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from toolgap.hooks.langchain import ToolgapMiddleware

URL = os.environ.get("TOOLGAP_URL", "http://127.0.0.1:30000")


@tool
def benchmark(statement: Literal["sorted(range(999))"]) -> str:
    """Measure how long a Python statement takes."""
    return subprocess.run([sys.executable, "-m", "timeit", statement], capture_output=True, text=True).stdout


@wrap_model_call
def one_call(request: Any, handler: Any) -> Any:
    """Small models call no tool unless they must."""
    return handler(request.override(tool_choice="required" if len(request.messages) == 1 else "none"))


server: Any = {"base_url": f"{URL}/v1", "api_key": "none", "model": "default"}
model = ChatOpenAI(**server, temperature=0, max_completion_tokens=64)
prompt = f"You make this program faster:\n{Path(__file__).read_text()}"
toolgap = ToolgapMiddleware(URL)
agent = create_agent(model, [benchmark], system_prompt=prompt, middleware=[one_call, toolgap])
state = agent.invoke({"messages": [{"role": "user", "content": "Benchmark its statement."}]})
print("answer:", state["messages"][-1].content)
print(toolgap.restores.report())
