"""Attention that computes only the new tokens, and finds the KV of sliding windows.

SGLang's torch-native backend pads the queries of a prefill to the whole sequence, so a cached
prefix still costs full quadratic attention and a cache hit saves little. Here a hit costs
``new_tokens x sequence_tokens``.

It also writes the KV of sliding-window layers to the slots of their own pool, and then reads it
from the slots of the full-attention pool: answers are wrong, or the read is out of bounds. Here
both use the same slots.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def visible(query_tokens: int, kv_tokens: int, *, sliding_window: int | None = None) -> torch.Tensor:
    """The lower-right causal mask, ``[query_tokens, kv_tokens]``, true where a key is seen.

    The last query sits at the last key; with ``sliding_window`` a query also sees no further back
    than that many keys before itself.
    """
    query = torch.arange(kv_tokens - query_tokens, kv_tokens).unsqueeze(1)
    key = torch.arange(kv_tokens).unsqueeze(0)
    mask = key <= query
    if sliding_window is not None:
        mask &= key >= query - sliding_window
    return mask


def run_sdpa_forward_extend(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001 (stock passes it by position or name)
    causal: bool = False,  # noqa: FBT001 (stock passes it by position or name)
    is_cross_attn: bool = False,  # noqa: FBT001 (stock passes it by position or name)
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Stands in for ``TorchNativeAttnBackend._run_sdpa_forward_extend``; same arguments and result.

    ``query`` and ``output`` are ``[new_tokens, heads, head_dim]``, the sequences of the batch one
    after another; ``k_cache`` and ``v_cache`` are ``[slots, kv_heads, head_dim]``;
    ``req_to_token[req_pool_indices[i]]`` lists the slots of sequence ``i``.
    """
    if sliding_window_size is not None and sliding_window_size < 0:
        sliding_window_size = None
    encoder_tokens = encoder_lens.tolist() if encoder_lens is not None else None
    sequences = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    start = 0
    for index, (row, seq_tokens, new_tokens) in enumerate(sequences):
        if encoder_tokens is None:
            kv_start, kv_end = 0, seq_tokens
        elif is_cross_attn:
            kv_start, kv_end = 0, encoder_tokens[index]
        else:
            kv_start, kv_end = encoder_tokens[index], encoder_tokens[index] + seq_tokens
        end = start + new_tokens
        slots = _pool_slots(backend, req_to_token[row, kv_start:kv_end], sliding_window_size)
        queries = query[start:end].transpose(0, 1)
        keys = k_cache[slots].transpose(0, 1).to(query.dtype)
        values = v_cache[slots].transpose(0, 1).to(query.dtype)
        kv_tokens = kv_end - kv_start
        # torch aligns is_causal to the upper left, which is right only without a prefix; there it
        # is also faster than a mask.
        needs_mask = sliding_window_size is not None or (causal and new_tokens != kv_tokens)
        mask = visible(new_tokens, kv_tokens, sliding_window=sliding_window_size) if needs_mask else None
        output[start:end] = (
            scaled_dot_product_attention(
                queries.unsqueeze(0),
                keys.unsqueeze(0),
                values.unsqueeze(0),
                attn_mask=mask,
                enable_gqa=enable_gqa,
                scale=scaling,
                is_causal=causal and mask is None,
            )
            .squeeze(0)
            .transpose(0, 1)
        )
        start = end
    return output


def run_sdpa_forward_decode(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001 (stock passes it by position or name)
    causal: bool = False,  # noqa: FBT001 (stock passes it by position or name)
    is_cross_attn: bool = False,  # noqa: FBT001 (stock passes it by position or name)
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Stands in for ``TorchNativeAttnBackend._run_sdpa_forward_decode``: one new token a sequence."""
    return run_sdpa_forward_extend(
        backend,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        seq_lens - 1,
        torch.ones_like(seq_lens),
        encoder_lens,
        scaling,
        enable_gqa,
        causal,
        is_cross_attn,
        sliding_window_size,
    )


def _pool_slots(backend: Any, slots: torch.Tensor, sliding_window_size: int | None) -> torch.Tensor:
    """Where a layer's KV lies: in the pool of the windows if there is one and the layer has a window.

    Slots that left the window have none there and give slot 0, which the mask hides.
    """
    if sliding_window_size is None or not backend.use_sliding_window_kv_pool:
        return slots
    translated: torch.Tensor = backend.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
    return translated
