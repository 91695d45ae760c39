"""The pages that every contender stores and reads back, and the host pool that they are read into."""

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

TOKEN_BYTES = 57_344
"""KV of one token of the Qwen2.5-7B shape: 28 layers, keys and values, 4 heads of 128, 2 bytes each."""

LAYERS, HEADS, HEAD_DIM = 28, 4, 128


class Pages(NamedTuple):
    """Random pages, the same for the same arguments."""

    keys: list[str]
    """64 hexadecimal digits each, as SGLang's page hashes."""
    data: "Bytes"
    """[pages, page_bytes]; the first half of a page is its keys, the second its values."""

    @property
    def page_bytes(self) -> int:
        """Of one page."""
        return int(self.data.shape[1])

    @property
    def total_bytes(self) -> int:
        """Of all pages."""
        return int(self.data.nbytes)

    @classmethod
    def random(cls, page_tokens: int, count: int, seed: int) -> "Pages":
        """Bytes that do not compress."""
        data = np.random.default_rng(seed).bytes(page_tokens * TOKEN_BYTES * count)
        keys = [hashlib.sha256(f"{seed}/{page_tokens}/{page}".encode()).hexdigest() for page in range(count)]
        return cls(keys, np.frombuffer(data, np.uint8).reshape(count, -1))


class Target:
    """SGLang's own host pool with a slot for each page, in an order as an allocator leaves it."""

    def __init__(self, pool: Any, page_tokens: int, count: int, seed: int) -> None:
        import torch

        self.pool = pool
        order = np.random.default_rng(seed).permutation(count)
        starts = torch.from_numpy(order) * page_tokens
        self.indices = (starts[:, None] + torch.arange(page_tokens)[None, :]).flatten()
        """The pages' token slots, as SGLang hands them to a storage backend."""
        half = (
            pool.kv_buffer.view(torch.uint8)
            .numpy()
            .reshape(2, -1)[:, : count * page_tokens * TOKEN_BYTES // 2]
        )
        halves = half.reshape(2, count, -1)
        self.pieces: list[tuple[memoryview, memoryview]] = [
            (halves[0, slot].data, halves[1, slot].data) for slot in order
        ]
        """Where the keys and the values of each page go."""
        self._halves = halves
        self._order = order

    def fill(self, pages: Pages) -> None:
        """Hold the pages, as if they had just been computed."""
        size = pages.page_bytes // 2
        self._halves[0, self._order] = pages.data[:, :size]
        self._halves[1, self._order] = pages.data[:, size:]

    def clear(self) -> None:
        """Forget what was read."""
        self._halves[:] = 0

    def holds(self, pages: Pages) -> bool:
        """Whether every page is there, byte for byte."""
        size = pages.page_bytes // 2
        return all(
            np.array_equal(self._halves[0, slot], pages.data[page, :size])
            and np.array_equal(self._halves[1, slot], pages.data[page, size:])
            for page, slot in enumerate(self._order)
        )


def host_pool(page_tokens: int, count: int, *, pinned: bool = False) -> Any:
    """SGLang's host pool for pages of these tokens, without a server.

    Args:
        page_tokens: Of each page.
        count: Pages.
        pinned: Whether it is registered with the GPU, which is needed for that.
    """
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    device = torch.device("cuda", 0) if pinned else torch.device("cpu")

    def layers() -> tuple[list[torch.Tensor], torch.Tensor]:
        buffers = [
            torch.zeros((page_tokens, HEADS, HEAD_DIM), dtype=torch.bfloat16, device=device)
            for _ in range(LAYERS)
        ]
        pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64, device=device)
        return buffers, pointers

    (keys, key_pointers), (values, value_pointers) = layers(), layers()
    return MHATokenToKVPoolHost(
        MHABufferInfo(
            buffers=KVBuffers(
                k=tuple(keys),
                v=tuple(values),
                k_data_ptrs=key_pointers,
                v_data_ptrs=value_pointers,
                layout=KVBufferLayout.NHD,
            ),
            page_size=page_tokens,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            dtype=torch.bfloat16,
            device=device,
        ),
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=page_tokens,
        layout="page_first",
        pin_memory=pinned,
        device_capacity_tokens=page_tokens,
        start_layer=0,
        end_layer=LAYERS - 1,
        host_token_capacity=count * page_tokens,
    )
