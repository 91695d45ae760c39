"""Pinned host memory where there is nothing to pin it for.

SGLang's LoRA code asks for it on any device, and a CUDA build of torch then looks for a driver and
raises. On a CPU all memory is host memory, so the request means nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

FACTORIES = ("tensor", "zeros", "empty")
"""Functions of torch that SGLang's LoRA code for CPUs gives ``pin_memory=True``."""


def ignore_pinning(*args: Any, **kwargs: Any) -> None:
    """BEFORE hook: from now on this process's torch makes ordinary memory where pinned is asked for."""
    import torch

    for name in FACTORIES:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = _itself


def _without_pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return factory(*args, **kwargs)

    return make


def _itself(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor
