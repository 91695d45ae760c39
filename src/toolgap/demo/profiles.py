"""What the demo runs on: a GPU with SGLang's kernels if there is one, else the CPU profile."""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolgap.cpu.launch import cpu_arguments, cpu_environment
from toolgap.cpu.model import ModelSetupError, ensure_smollm2
from toolgap.demo.errors import DemoError, DemoUsageError
from toolgap.hardware import describe_cpu, find_gpu

GPU_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
PAGE_TOKENS = 16

CONTINUATION_TOKENS = 512
"""Room for the tool's result and the answer."""


@dataclass(frozen=True)
class Sizes:
    """How much L1 and L2 hold: a prompt, its continuation and little more, so that traffic overflows both."""

    prompt_tokens: int

    @property
    def l1_tokens(self) -> int:
        """L1, in whole multiples of 256 tokens."""
        return -(-(self.prompt_tokens + 2 * CONTINUATION_TOKENS) // 256) * 256

    @property
    def l2_tokens(self) -> int:
        """L2: operations may read into half of it, and the prefix must fit into that half."""
        return 2 * (self.prompt_tokens + CONTINUATION_TOKENS)

    @property
    def l2_ratio(self) -> float:
        """L2 as SGLang wants it: in multiples of L1."""
        return self.l2_tokens / self.l1_tokens


@dataclass(frozen=True)
class Profile:
    """Where the demo's server runs, and with which model."""

    cpu: bool
    hardware: str
    model: str
    """Path or hub name, as SGLang takes it."""

    @property
    def model_label(self) -> str:
        """The model's name for people."""
        return model_label(self.model)

    @property
    def grace_s(self) -> float:
        """How long the server gets to end by itself.

        SGLang takes 5 to 10 seconds. A GPU is better left in order; on a CPU there is nothing to put in order.
        """
        return 60.0 if not self.cpu else 0.5

    def arguments(self, sizes: Sizes, port: int) -> list[str]:
        """SGLang's arguments."""
        arguments = [
            *("--model-path", self.model),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--page-size", str(PAGE_TOKENS)),
            *("--max-total-tokens", str(sizes.l1_tokens)),
            "--enable-hierarchical-cache",
            *("--hicache-ratio", f"{sizes.l2_ratio:.4f}"),
            *("--hicache-storage-backend", "file"),
            # Stock's default gives up on a slow disk after a second or two and recomputes the rest, which
            # would make arm B a mixture. This is stock's way to wait for all of it.
            *("--hicache-storage-prefetch-policy", "wait_complete"),
        ]
        return cpu_arguments(arguments) if self.cpu else arguments

    def command(self, arguments: list[str]) -> list[str]:
        """The command that starts stock SGLang."""
        return [sys.executable, "-m", "sglang.launch_server", *arguments]

    def environment(self, arguments: list[str], storage: Path) -> dict[str, str]:
        """The server's environment."""
        environment = cpu_environment(os.environ, arguments) if self.cpu else dict(os.environ)
        environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(storage)
        # SGLang compiles its page hashing with the ninja on PATH, which may be in this environment only.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
        return environment


def choose(model: str | None, report: Callable[[str], None], *, cpu: bool | None) -> Profile:
    """Pick the profile, and get its model ready.

    Args:
        model: A path or hub name; None for the profile's own.
        report: Called with a line before each slow step.
        cpu: Whether to run on the CPU; None to take a GPU if there is one.

    Raises:
        DemoError: a GPU is asked for and cannot be used, or the model cannot be had.
    """
    gpu = None if cpu else find_gpu()
    if cpu is False and gpu is None:
        raise DemoError(
            "a GPU is asked for, and there is none that SGLang can use here (it needs the package "
            "sglang-kernel, and torch must see the GPU)"
        )
    if gpu is not None:
        return Profile(cpu=False, hardware=gpu, model=model or GPU_MODEL)
    if importlib.util.find_spec("sglang") is None:
        raise DemoError("SGLang is not installed: run `make demo` in a clone, or pip install 'toolgap[cpu]'")
    if model is None:
        try:
            model = str(ensure_smollm2(report=report))
        except ModelSetupError as error:
            raise DemoError(str(error)) from error
    return Profile(cpu=True, hardware=describe_cpu(), model=model)


def context_tokens(model: str) -> int | None:
    """The context length that a model folder on this machine states; None if that cannot be known yet."""
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        length = config.get("max_position_embeddings")
        return length if isinstance(length, int) else None
    return None


def check_context(prompt_tokens: int, context: int | None) -> None:
    """Check that a prompt of this length and its continuation fit.

    Raises:
        DemoUsageError: they do not.
    """
    if context is not None and prompt_tokens + CONTINUATION_TOKENS > context:
        raise DemoUsageError(
            f"the model's context is {context:,} tokens: with its continuation, the prompt may have "
            f"{context - CONTINUATION_TOKENS:,} at most, not {prompt_tokens:,}"
        )


def model_label(model: str) -> str:
    """A model's name for people: the end of its path, without the marks of our own conversion."""
    return Path(model).name.removesuffix("-f32-1")
