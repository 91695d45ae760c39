"""Pinned memory on a machine without an accelerator, in a process of its own: the hook changes torch."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CODE = """
from toolgap.cpu.pinning import ignore_pinning
ignore_pinning("any", argument=1)
import torch
assert torch.tensor([1, 2], dtype=torch.int32, device="cpu", pin_memory=True).tolist() == [1, 2]
assert torch.zeros((2,), pin_memory=True).tolist() == [0.0, 0.0]
assert torch.empty((2, 3), pin_memory=True).shape == (2, 3)
ordinary = torch.ones(3)
assert ordinary.pin_memory() is ordinary
"""


def test_what_asks_for_pinned_memory_gets_ordinary_memory() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
