#!/usr/bin/env python3
"""Runs every example of examples/ against one real server on the CPU, as `make examples` does.

An example fails if it ends so, and if the server accepted no operation of it. The examples run in the agent
libraries' environment, the server in SGLang's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolgap.childserver import ChildServer, ServerError, free_port
from toolgap.client import Toolgap

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PYTHON = ROOT / ".venv-agents" / "bin" / "python"

START_DEADLINE_S = 400.0
EXAMPLE_DEADLINE_S = 300.0

SERVER_ARGUMENTS = (
    # Small enough to start quickly; an example's conversation is some 900 tokens.
    *("--max-total-tokens", "8192"),
    # `tool_choice` then makes the model write a JSON list of calls by a grammar, whatever model it is: a
    # small one calls no tool unless it must.
    *("--tool-call-parser", "pythonic"),
)

QUIET = {
    # What the libraries would otherwise ask of the network, or tell it.
    "FASTMCP_CHECK_FOR_UPDATES": "off",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


class ExampleError(Exception):
    """An example failed; the text says how."""


@contextmanager
def example_server(folder: Path) -> Iterator[str]:
    """A server on the CPU, as the examples want it; yields its URL. Its files are in `folder`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "toolgap", "serve", "--cpu", "--"]
    command += ["--host", "127.0.0.1", "--port", str(port), *SERVER_ARGUMENTS]
    environment = {**os.environ, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "l3")}
    (folder / "l3").mkdir()
    server = ChildServer(command, f"{url}/health", folder / "server.log", environment, grace_s=1.0)
    with server:
        server.wait_until_healthy(START_DEADLINE_S)
        yield url


def run_example(example: Path, url: str) -> str:
    """Run an example; what it printed.

    Raises:
        ExampleError: it failed, or nothing was restored for it.
    """
    with Toolgap(url) as toolgap:
        before = _operations(toolgap)
        try:
            done = subprocess.run(
                [str(PYTHON), str(example)],
                env={**os.environ, **QUIET, "TOOLGAP_URL": url},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=EXAMPLE_DEADLINE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ExampleError(f"{example.name} took over {error.timeout:g} s") from None
        if done.returncode:
            raise ExampleError(f"{example.name} ended with {done.returncode}:\n{done.stdout}")
        if not _operations(toolgap) - before:
            raise ExampleError(f"{example.name}: the server accepted no operation of it:\n{done.stdout}")
    return done.stdout


def _operations(toolgap: Toolgap) -> set[str]:
    overview = toolgap.overview()
    return {operation.operation_id for operation in (*overview.active, *overview.recent)}


def main(arguments: Sequence[str]) -> int:
    examples = [EXAMPLES / name for name in arguments] or sorted(EXAMPLES.glob("*.py"))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="toolgap-examples-") as name:
        try:
            print("starting a server on the CPU ...", flush=True)
            with example_server(Path(name)) as url:
                for example in examples:
                    start_s = time.monotonic()
                    print(f"\n{example.name}", flush=True)
                    try:
                        print(run_example(example, url).rstrip())
                        print(f"({time.monotonic() - start_s:.0f} s)", flush=True)
                    except ExampleError as error:
                        failed += 1
                        print(error, file=sys.stderr)
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    print(f"\n{len(examples) - failed} of {len(examples)} examples ran")
    return 1 if failed or not examples else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
