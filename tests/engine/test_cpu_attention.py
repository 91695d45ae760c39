import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    # What is missing on this machine is none of these tests' business.
    warnings.simplefilter("ignore")
    torch_native_backend = pytest.importorskip("sglang.srt.layers.attention.torch_native_backend")
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from toolgap.cpu.attention import (  # noqa: E402
    run_sdpa_forward_decode,
    run_sdpa_forward_extend,
    visible,
)

pytestmark = pytest.mark.engine

SLOTS, DIM = 512, 16


class Batch(NamedTuple):
    """Cached and new tokens of each sequence."""

    cached: Sequence[int]
    new: Sequence[int]


BATCHES = [
    pytest.param(Batch([0], [7]), id="cold"),
    pytest.param(Batch([48], [5]), id="hit"),
    pytest.param(Batch([48], [1]), id="one new token"),
    pytest.param(Batch([0, 32, 96, 1], [9, 1, 33, 64]), id="several"),
]


@pytest.fixture
def stock() -> Any:
    """The stock backend, without the model runner that its constructor reads."""
    backend = torch_native_backend.TorchNativeAttnBackend
    stock = backend.__new__(backend)
    stock.use_sliding_window_kv_pool = False
    return stock


def arguments(batch: Batch, heads: int, kv_heads: int, dtype: Any) -> dict[str, Any]:
    random = torch.Generator().manual_seed(7)
    total = [cached + new for cached, new in zip(batch.cached, batch.new, strict=True)]
    # Slots in random order, as after many allocations; rows of the table in another order.
    slots = torch.randperm(SLOTS, generator=random)
    rows = torch.randperm(len(total), generator=random)
    table = torch.zeros(len(total), max(total), dtype=torch.int32)
    start = 0
    for row, tokens in zip(rows, total, strict=True):
        table[row, :tokens] = slots[start : start + tokens]
        start += tokens

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=random).to(dtype)

    query = normal(sum(batch.new), heads, DIM)
    return {
        "query": query,
        "output": torch.empty_like(query),
        "k_cache": normal(SLOTS, kv_heads, DIM),
        "v_cache": normal(SLOTS, kv_heads, DIM),
        "req_to_token": table,
        "req_pool_indices": rows,
        "seq_lens": torch.tensor(total),
        "extend_prefix_lens": torch.tensor(batch.cached),
        "extend_seq_lens": torch.tensor(batch.new),
        "scaling": DIM**-0.5,
        "enable_gqa": heads != kv_heads,
        "causal": True,
    }


def both(stock: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    expected = stock._run_sdpa_forward_extend(**given).clone()
    given["output"] = torch.full_like(given["output"], torch.nan)
    return run_sdpa_forward_extend(stock, **given), expected


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_equals_stock(stock: Any, batch: Batch, heads: int, kv_heads: int) -> None:
    found, expected = both(stock, arguments(batch, heads, kv_heads, torch.float32))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", BATCHES)
def test_equals_stock_in_bfloat16(stock: Any, batch: Batch) -> None:
    found, expected = both(stock, arguments(batch, 6, 2, torch.bfloat16))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("window", [-1, 0, 8, 1000])
def test_equals_stock_with_a_sliding_window(stock: Any, batch: Batch, window: int) -> None:
    given = arguments(batch, 4, 2, torch.float32) | {"sliding_window_size": window}
    found, expected = both(stock, given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", BATCHES)
def test_equals_stock_without_a_mask(stock: Any, batch: Batch) -> None:
    found, expected = both(stock, arguments(batch, 4, 2, torch.float32) | {"causal": False})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_equals_stock_after_an_encoder(stock: Any) -> None:
    given = arguments(Batch([8, 0], [4, 8]), 4, 2, torch.float32)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
    given["req_to_token"] = slots[:64].reshape(2, 32).to(torch.int32)
    given["encoder_lens"] = torch.tensor([5, 9])
    found, expected = both(stock, given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_equals_stock_in_cross_attention(stock: Any) -> None:
    # Stock pads the queries to the encoder's length, so that has to fit them.
    given = arguments(Batch([0, 0], [12, 6]), 4, 2, torch.float32)
    given |= {"encoder_lens": torch.tensor([5, 6]), "is_cross_attn": True, "causal": False}
    found, expected = both(stock, given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_cache_of_another_dtype_is_converted(stock: Any) -> None:
    given = arguments(Batch([16], [4]), 4, 2, torch.float32)
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].to(torch.bfloat16)
    found, expected = both(stock, given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 8])
def test_a_decode_equals_stock(stock: Any, window: int | None) -> None:
    given = arguments(Batch([4, 31, 96], [1, 1, 1]), 6, 2, torch.float32)
    given |= {"sliding_window_size": window, "causal": False}
    del given["extend_prefix_lens"], given["extend_seq_lens"]
    expected = stock._run_sdpa_forward_decode(**given).clone()
    given["output"] = torch.full_like(given["output"], torch.nan)
    torch.testing.assert_close(run_sdpa_forward_decode(stock, **given), expected, rtol=1e-5, atol=1e-6)


def test_a_window_is_read_from_the_pool_of_the_windows(stock: Any) -> None:
    """The same KV in other slots, and nothing of what the window has left behind."""
    given = arguments(Batch([48], [5]), 4, 2, torch.float32) | {"sliding_window_size": 8}
    expected = run_sdpa_forward_extend(stock, **given).clone()

    stock.token_to_kv_pool = SWAKVPool(SLOTS, 64, 1, torch.float32, 2, DIM, [0], [1], "cpu")
    stock.use_sliding_window_kv_pool = True
    slots = given["req_to_token"][given["req_pool_indices"][0]].long()
    mapping = torch.zeros(SLOTS + 1, dtype=torch.int64)
    inside = slots[48 - 8 :]
    mapping[inside] = torch.randperm(64, generator=torch.Generator().manual_seed(2))[: len(inside)] + 1
    stock.token_to_kv_pool.register_mapping(mapping)
    for name in ("k_cache", "v_cache"):
        moved = torch.zeros(66, 2, DIM)
        moved[mapping[inside]] = given[name][inside]
        given[name] = moved
    found = run_sdpa_forward_extend(stock, **given | {"output": torch.empty_like(given["output"])})
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_hit_equals_the_end_of_a_cold_prefill(stock: Any) -> None:
    cold = arguments(Batch([0], [40]), 6, 2, torch.float32)
    whole = run_sdpa_forward_extend(stock, **cold).clone()
    hit = cold | {
        "query": cold["query"][32:],
        "output": torch.empty_like(cold["query"][32:]),
        "extend_prefix_lens": torch.tensor([32]),
        "extend_seq_lens": torch.tensor([8]),
    }
    found = run_sdpa_forward_extend(stock, **hit)
    torch.testing.assert_close(found, whole[32:], rtol=1e-5, atol=1e-6)


def test_the_mask_is_aligned_to_the_lower_right() -> None:
    assert visible(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert visible(2, 4, sliding_window=1).tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]
