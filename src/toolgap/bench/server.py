"""The servers of a run: stock SGLang with what the benchmark needs, sized for its prompts."""

import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from toolgap.bench.plan import SENTINEL_TOKENS, Plan
from toolgap.bench.stage import Stage, StoreStage
from toolgap.childserver import ChildServer, free_port
from toolgap.client import Toolgap
from toolgap.cpu.launch import cpu_arguments, cpu_environment
from toolgap.engineclient import Engine
from toolgap.store import config as stores

HEADROOM_TOKENS = 1024
"""L1 beyond the longest prompt: its answer, and the first pages of what follows it."""

L2_RATIO = 3.0
"""L2 in multiples of L1: it must hold a prompt and what pushes that out of L1, and operations get half of it."""

START_DEADLINE_S = {True: 600.0, False: 1800.0}
"""By whether it runs on a CPU."""

_PRIVATE = ("--model-path", "--port", "--host", "--admin-api-key", "--tokenizer-path", "--api-key")
"""Flags whose values are left out of the manifest."""

_PUBLISHED = ("SGLANG_", "TOOLGAP_", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_UNPUBLISHED = ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "TOOLGAP_API_KEY", "TOOLGAP_URL")


@dataclass(frozen=True)
class Setup:
    """How to start the servers of a run."""

    model: str
    """Path or hub name."""
    cpu: bool
    plan: Plan
    arguments: Sequence[str] = ()
    """SGLang's, beside what the benchmark sets."""
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path = Path("server.log")
    store: bool = False
    """Whether L3 is Toolgap's store instead of SGLang's file backend."""

    @property
    def l1_tokens(self) -> int:
        """L1, in whole multiples of 256 tokens; an option of the plan's recipe wins."""
        longest = max(*self.plan.prompt_tokens, 4 * SENTINEL_TOKENS)
        return int(self.plan.options.get("l1_tokens", -(-(longest + HEADROOM_TOKENS) // 256) * 256))

    @property
    def l2_ratio(self) -> float:
        """L2 in multiples of L1."""
        return float(self.plan.options.get("l2_ratio", L2_RATIO))

    def server_arguments(self, port: int, admin_key: str) -> list[str]:
        """SGLang's arguments; what the user gave comes last and so wins."""
        arguments = [
            *("--model-path", self.model, "--host", "127.0.0.1", "--port", str(port)),
            *("--admin-api-key", admin_key),
            *("--page-size", str(self.plan.page_tokens)),
            *("--max-total-tokens", str(self.l1_tokens)),
            "--enable-hierarchical-cache",
            *("--hicache-ratio", f"{self.l2_ratio:g}"),
            *(
                stores.arguments(stores.StoreConfig())
                if self.store
                else ("--hicache-storage-backend", "file")
            ),
            "--enable-metrics",
            *self.arguments,
        ]
        return cpu_arguments(arguments) if self.cpu else arguments

    def server_environment(self, arguments: list[str], storage: Path) -> dict[str, str]:
        """The server's environment."""
        environment = cpu_environment(os.environ, arguments) if self.cpu else dict(os.environ)
        environment |= self.environment
        environment[stores.PATH if self.store else "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(storage)
        # SGLang compiles its page hashing with the ninja on PATH, which may be in this environment only.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
        return environment

    def published(self) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment as the manifest gives them: without what is this machine's own."""
        arguments = self.server_arguments(0, "")
        shown: list[str] = []
        skip = False
        for argument in arguments:
            if not skip and argument not in _PRIVATE:
                shown.append(argument)
            skip = argument in _PRIVATE
        environment = self.server_environment(arguments, Path())
        public = {
            name: value
            for name, value in sorted(environment.items())
            if name.startswith(_PUBLISHED) and name not in _UNPUBLISHED and "/" not in value
        }
        return shown, public

    @contextmanager
    def running(self, watch: Callable[[str], None] | None = None) -> Iterator[Stage]:
        """A server of one's own, from its start to its end."""
        port, admin_key = free_port(), secrets.token_hex(16)
        url = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryDirectory(prefix="toolgap-bench-l3-") as folder:
            arguments = self.server_arguments(port, admin_key)
            server = ChildServer(
                command=[sys.executable, "-m", "sglang.launch_server", *arguments],
                health_url=f"{url}/health",
                log=self.log,
                environment=self.server_environment(arguments, Path(folder)),
                grace_s=0.5 if self.cpu else 20.0,
            )
            with server, Engine(url, admin_key) as engine, Toolgap(url, api_key=admin_key) as toolgap:
                server.wait_until_healthy(START_DEADLINE_S[self.cpu], watch)
                stage_type = StoreStage if self.store else Stage
                yield stage_type(engine, toolgap, self.plan, self.l1_tokens, Path(folder))
                server.check_running()
