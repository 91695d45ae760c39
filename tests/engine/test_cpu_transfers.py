import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    # What is missing on this machine is none of these tests' business.
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang.srt.mem_cache.pool_host.mha")
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from toolgap.cpu.transfers import (  # noqa: E402
    SUPPORTED_LAYOUTS,
    backup_from_device_all_layer,
    backup_latent_from_device_all_layer,
    load_latent_to_device_per_layer,
    load_to_device_per_layer,
)

pytestmark = pytest.mark.engine

LAYERS, HEADS, DIM, PAGE, DEVICE_TOKENS, HOST_TOKENS = 3, 2, 8, 4, 40, 64

# Pages out of order and not aligned with each other; every slot once.
DEVICE_SLOTS = torch.cat([torch.arange(page, page + PAGE) for page in (20, 4, 36)])
HOST_SLOTS = torch.cat([torch.arange(page, page + PAGE) for page in (8, 56, 0)])


def random_layers(seed: int) -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(DEVICE_TOKENS, HEADS, DIM, generator=random) for _ in range(LAYERS))


def pointers(layers: tuple[Any, ...]) -> Any:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)


def host_pool(layout: str) -> Any:
    """SGLang's host pool over a device pool of random KV."""
    keys, values = random_layers(1), random_layers(2)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=keys,
            v=values,
            k_data_ptrs=pointers(keys),
            v_data_ptrs=pointers(values),
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKVPoolHost(
            info,
            1.0,
            0,
            PAGE,
            layout,
            pin_memory=False,
            device_capacity_tokens=DEVICE_TOKENS,
            start_layer=0,
            end_layer=LAYERS,
            host_token_capacity=HOST_TOKENS,
        )


@pytest.fixture(params=SUPPORTED_LAYOUTS)
def pool(request: pytest.FixtureRequest) -> Any:
    pool = host_pool(request.param)
    pool.kv_buffer.fill_(-1)
    return pool


def test_a_round_trip_keeps_every_value(pool: Any) -> None:
    keys = [layer.clone() for layer in pool.device_k_buffers]
    values = [layer.clone() for layer in pool.device_v_buffers]
    backup_from_device_all_layer(pool, None, HOST_SLOTS, DEVICE_SLOTS, "kernel")
    for layer in (*pool.device_k_buffers, *pool.device_v_buffers):
        layer[DEVICE_SLOTS] = 0
    for layer_id in range(LAYERS):
        load_to_device_per_layer(pool, None, HOST_SLOTS, DEVICE_SLOTS, layer_id, "kernel")
    # Equal everywhere: the slots came back, and the others were not touched.
    torch.testing.assert_close(list(pool.device_k_buffers), keys, rtol=0, atol=0)
    torch.testing.assert_close(list(pool.device_v_buffers), values, rtol=0, atol=0)


def test_pages_for_storage_hold_the_device_values(pool: Any) -> None:
    backup_from_device_all_layer(pool, None, HOST_SLOTS, DEVICE_SLOTS, "kernel")
    for first in range(0, len(HOST_SLOTS), PAGE):
        device = DEVICE_SLOTS[first : first + PAGE]
        page = pool.get_data_page(int(HOST_SLOTS[first]), flat=False)
        if pool.layout == "page_first":
            page = page.transpose(1, 2)
        for kind, layers in enumerate((pool.device_k_buffers, pool.device_v_buffers)):
            expected = torch.stack([layer[device] for layer in layers])
            torch.testing.assert_close(page[kind], expected, rtol=0, atol=0)


def test_pages_from_storage_reach_the_device(pool: Any) -> None:
    backup_from_device_all_layer(pool, None, HOST_SLOTS[:PAGE], DEVICE_SLOTS[:PAGE], "kernel")
    source, target = int(HOST_SLOTS[0]), int(HOST_SLOTS[PAGE])
    pool.set_from_flat_data_page(target, pool.get_data_page(source).clone())
    moved = DEVICE_SLOTS[PAGE : 2 * PAGE]
    for layer_id in range(LAYERS):
        load_to_device_per_layer(pool, None, HOST_SLOTS[PAGE : 2 * PAGE], moved, layer_id, "kernel")
    for layer in (*pool.device_k_buffers, *pool.device_v_buffers):
        torch.testing.assert_close(layer[moved], layer[DEVICE_SLOTS[:PAGE]], rtol=0, atol=0)


def test_other_host_slots_are_not_touched(pool: Any) -> None:
    backup_from_device_all_layer(pool, None, HOST_SLOTS, DEVICE_SLOTS, "kernel")
    rest = torch.ones(HOST_TOKENS, dtype=torch.bool)
    rest[HOST_SLOTS] = False
    for layer in (*pool.k_data_refs, *pool.v_data_refs):
        assert (layer[rest] == -1).all()


def test_a_layer_of_another_stage_is_skipped(pool: Any) -> None:
    load_to_device_per_layer(pool, None, HOST_SLOTS, DEVICE_SLOTS, LAYERS, "kernel")
    load_to_device_per_layer(pool, None, HOST_SLOTS, DEVICE_SLOTS, -1, "kernel")
    assert not any((layer == -1).any() for layer in pool.device_k_buffers)


def test_what_cannot_be_copied_is_refused() -> None:
    pool = host_pool("page_first_direct")
    with pytest.raises(ValueError, match="page_first_direct"):
        backup_from_device_all_layer(pool, None, HOST_SLOTS, DEVICE_SLOTS, "kernel")
    pool = host_pool("layer_first")
    with pytest.raises(ValueError, match="direct"):
        load_to_device_per_layer(pool, None, HOST_SLOTS, DEVICE_SLOTS, 0, "direct")


@pytest.fixture(params=SUPPORTED_LAYOUTS)
def latent_pool(request: pytest.FixtureRequest) -> Any:
    """SGLang's host pool over a device pool of random latents."""
    random = torch.Generator().manual_seed(3)
    layers = tuple(torch.randn(DEVICE_TOKENS, 1, DIM, generator=random) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=layers,
        data_ptrs=pointers(layers),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=DIM - 2,
        qk_rope_head_dim=2,
        kv_cache_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(1 << 30):
        pool = MLATokenToKVPoolHost(
            info,
            1.0,
            0,
            PAGE,
            request.param,
            pin_memory=False,
            device_capacity_tokens=DEVICE_TOKENS,
            start_layer=0,
            end_layer=LAYERS,
            target_layer_num=LAYERS,
            host_token_capacity=HOST_TOKENS,
        )
    pool.kv_buffer.fill_(-1)
    return pool


def test_a_round_trip_of_latents_keeps_every_value(latent_pool: Any) -> None:
    pool = latent_pool
    latents = [layer.clone() for layer in pool.device_kv_buffers]
    backup_latent_from_device_all_layer(pool, None, HOST_SLOTS, DEVICE_SLOTS, "kernel")
    for layer in pool.device_kv_buffers:
        layer[DEVICE_SLOTS] = 0
    for layer_id in range(LAYERS):
        load_latent_to_device_per_layer(pool, None, HOST_SLOTS, DEVICE_SLOTS, layer_id, "kernel")
    torch.testing.assert_close(list(pool.device_kv_buffers), latents, rtol=0, atol=0)
    rest = torch.ones(HOST_TOKENS, dtype=torch.bool)
    rest[HOST_SLOTS] = False
    assert all((layer[rest] == -1).all() for layer in pool.data_refs)


def test_a_page_of_latents_from_storage_reaches_the_device(latent_pool: Any) -> None:
    pool = latent_pool
    backup_latent_from_device_all_layer(pool, None, HOST_SLOTS[:PAGE], DEVICE_SLOTS[:PAGE], "kernel")
    pool.set_from_flat_data_page(int(HOST_SLOTS[PAGE]), pool.get_data_page(int(HOST_SLOTS[0])).clone())
    moved = DEVICE_SLOTS[PAGE : 2 * PAGE]
    for layer_id in range(LAYERS):
        load_latent_to_device_per_layer(pool, None, HOST_SLOTS[PAGE : 2 * PAGE], moved, layer_id, "kernel")
    for layer in pool.device_kv_buffers:
        torch.testing.assert_close(layer[moved], layer[DEVICE_SLOTS[:PAGE]], rtol=0, atol=0)


def test_a_latent_layer_of_another_stage_is_skipped(latent_pool: Any) -> None:
    load_latent_to_device_per_layer(latent_pool, None, HOST_SLOTS, DEVICE_SLOTS, LAYERS, "kernel")
    assert not any((layer == -1).any() for layer in latent_pool.device_kv_buffers)
