"""What this machine has to run an engine on, in words."""

import importlib.util
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_FIND_GPU = (
    "import torch, sgl_kernel; "
    "print(f'{torch.cuda.device_count()} {torch.cuda.get_device_name(0)}' if torch.cuda.is_available() else 0)"
)


def find_gpu() -> str | None:
    """The GPUs that SGLang can use, in words; None if there are none.

    A process of its own looks, because torch takes seconds to load and keeps the GPU open.
    """
    if importlib.util.find_spec("sgl_kernel") is None or importlib.util.find_spec("torch") is None:
        return None
    done = subprocess.run([sys.executable, "-c", _FIND_GPU], capture_output=True, text=True)
    count, _, name = done.stdout.strip().partition(" ")
    return name if done.returncode == 0 and name and int(count) else None


def describe_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU in words, with the cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    name = "CPU"
    with suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                name = " ".join(value.replace("(R)", "").replace("(TM)", "").split())
                break
    return f"{name}, {cores} core{'s' if cores > 1 else ''}"
