"""Restore an agent's KV cache while its tool call runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolgap.client import AsyncToolgap, Toolgap, ToolgapError, ToolgapUnreachable

__all__ = ["AsyncToolgap", "Toolgap", "ToolgapError", "ToolgapUnreachable"]


def __getattr__(name: str) -> Any:
    # On first use: SGLang's processes import this package for the plugin, and need no HTTP client.
    if name in __all__:
        return getattr(import_module("toolgap.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
