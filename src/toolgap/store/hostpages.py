"""Pages of SGLang's host pools as memory: in place where the pool tells where its pages lie, else by way of a copy."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from toolgap.store.store import Page, memory

if TYPE_CHECKING:
    import torch


class Borrowed(NamedTuple):
    """Pages of a pool, ready to be read into or written from."""

    pages: list[Page]
    landed: Callable[[int], None]
    """Called for each page, by its number, whose memory was read into."""


class HostPages:
    """One of SGLang's host pools (``HostKVCache``)."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        self.in_place = self._tells_places()

    def describe(self) -> str:
        """What decides the bytes of a page: equal for pools whose pages can stand in for each other."""
        pool = self.pool
        names = (
            "layout",
            "dtype",
            "layer_num",
            "start_layer",
            "end_layer",
            "head_num",
            "head_dim",
            "v_head_dim",
        )
        more = ("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "index_head_dim", "size_per_token")
        facts = [f"{name}={getattr(pool, name)}" for name in (*names, *more) if hasattr(pool, name)]
        return " ".join([type(pool).__name__, *facts, "in-place" if self.in_place else "flat"])

    def to_read(self, keys: Sequence[str], indices: "torch.Tensor") -> Borrowed:
        """Memory to read these pages into.

        Args:
            keys: One a page.
            indices: The token slots of all pages, [pages * page_tokens].
        """
        if self.in_place:
            return Borrowed(self._placed(keys, indices), lambda page: None)
        starts = indices[:: self.page_tokens].tolist()
        flat = [self.pool.get_dummy_flat_data_page() for _ in keys]
        pages = [Page(key, [_bytes(tensor)]) for key, tensor in zip(keys, flat, strict=True)]
        return Borrowed(pages, lambda page: self.pool.set_from_flat_data_page(starts[page], flat[page]))

    def to_write(self, keys: Sequence[str], indices: "torch.Tensor") -> list[Page]:
        """The memory of these pages; see :meth:`to_read`."""
        if self.in_place:
            return self._placed(keys, indices)
        starts = indices[:: self.page_tokens].tolist()
        flat = [self.pool.get_data_page(start, flat=True).contiguous() for start in starts]
        return [Page(key, [_bytes(tensor)]) for key, tensor in zip(keys, flat, strict=True)]

    def _placed(self, keys: Sequence[str], indices: "torch.Tensor") -> list[Page]:
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        each = len(addresses) // len(keys) if keys else 0
        pieces = [memory(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return [Page(key, pieces[each * page : each * (page + 1)]) for page, key in enumerate(keys)]

    def _tells_places(self) -> bool:
        import torch

        try:
            addresses, sizes = self.pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (AttributeError, AssertionError, NotImplementedError, ValueError, RuntimeError):
            # Layouts and pools that have no such thing say so in these ways.
            return False
        return bool(addresses) and len(addresses) == len(sizes)


def _bytes(tensor: "torch.Tensor") -> memoryview:
    import torch

    return (
        memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        if tensor.numel()
        else memoryview(torch.empty(0, dtype=torch.uint8).numpy())
    )
