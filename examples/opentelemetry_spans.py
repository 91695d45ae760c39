"""OpenTelemetry: while a span of `execute_tool` is open, the conversation's KV is restored."""

import os
import subprocess
import sys
from pathlib import Path

from openai import OpenAI
from opentelemetry.sdk.trace import TracerProvider

from toolgap.hooks.opentelemetry import ToolgapSpanProcessor

URL = os.environ.get("TOOLGAP_URL", "http://127.0.0.1:30000")
toolgap = ToolgapSpanProcessor(URL)
provider = TracerProvider()
provider.add_span_processor(toolgap)
tracer = provider.get_tracer("agent")

with tracer.start_as_current_span("invoke_agent", attributes={"gen_ai.operation.name": "invoke_agent"}):
    with tracer.start_as_current_span("chat", attributes={"gen_ai.operation.name": "chat"}) as span:
        completion = OpenAI(base_url=f"{URL}/v1", api_key="none").chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": f"Benchmark this:\n{Path(__file__).read_text()}"}],
            tools=[{"type": "function", "function": {"name": "benchmark"}}],
            tool_choice="required",
            max_tokens=32,
        )
        span.set_attribute("gen_ai.response.id", completion.id)
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "benchmark"}
    with tracer.start_as_current_span("execute_tool benchmark", attributes=attributes):
        command = [sys.executable, "-m", "timeit", "sorted(range(999))"]
        print("result:", subprocess.run(command, capture_output=True, text=True).stdout)
print(toolgap.restores.report())
