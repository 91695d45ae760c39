"""LiteLLM: while a tool runs that an answer called, the conversation's KV is restored."""

import os
import subprocess
import sys
from pathlib import Path

import litellm

from toolgap.hooks.litellm import ToolgapLogger

URL = os.environ.get("TOOLGAP_URL", "http://127.0.0.1:30000")
STATEMENT = {"type": "string", "enum": ["sorted(range(999))"]}
PARAMETERS = {"type": "object", "properties": {"statement": STATEMENT}, "required": ["statement"]}
TOOLS = [{"type": "function", "function": {"name": "benchmark", "parameters": PARAMETERS}}]
SERVER = {"model": "openai/default", "api_base": f"{URL}/v1", "api_key": "none"}

toolgap = ToolgapLogger(URL)
litellm.callbacks = [toolgap]
messages = [
    {"role": "system", "content": f"You make this program faster:\n{Path(__file__).read_text()}"},
    {"role": "user", "content": "Benchmark its statement."},
]
for choice in ("required", "none"):
    response = litellm.completion(
        messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=64, temperature=0, **SERVER
    )
    answer = response.choices[0].message
    messages.append(answer.model_dump(exclude_none=True))
    for call in answer.tool_calls or ():
        command = [sys.executable, "-m", "timeit", "sorted(range(999))"]
        result = subprocess.run(command, capture_output=True, text=True).stdout
        toolgap.tool_ended(call.id, result)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print("answer:", messages[-1].get("content"))
print(toolgap.restores.report())
