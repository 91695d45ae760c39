"""HiCache's host pool on a CPU: L1 <-> L2 copies with torch indexing instead of GPU kernels.

The functions stand in for methods of ``MHATokenToKVPoolHost`` and, those with ``latent`` in their
names, of ``MLATokenToKVPoolHost``, and so take its ``self`` as ``pool``. Shapes: a device buffer of one
layer is ``[device_tokens, heads, head_dim]``; ``pool.k_data_refs`` holds the host's view of each layer,
``[host_tokens, heads, head_dim]``, for ``layer_first`` (dense) and ``page_first`` (strided) alike. With
latent attention there is one buffer instead of two, ``pool.data_refs``, and one head. Index tensors
are int64 token slots of equal length.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SUPPORTED_LAYOUTS = ("layer_first", "page_first")


def _require_supported(pool: Any, io_backend: str) -> None:
    if pool.layout not in SUPPORTED_LAYOUTS or io_backend != "kernel":
        raise ValueError(
            f"HiCache on CPU copies layouts {', '.join(SUPPORTED_LAYOUTS)} with "
            f"--hicache-io-backend kernel, not {pool.layout} with {io_backend}"
        )


def load_to_device_per_layer(
    pool: Any,
    device_pool: Any,
    host_indices: "torch.Tensor",
    device_indices: "torch.Tensor",
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy one layer of the slots from L2 to L1; layers of another pipeline stage are skipped.

    Raises:
        ValueError: the layout or the I/O backend has no CPU copy.
    """
    _require_supported(pool, io_backend)
    if not is_draft and not 0 <= layer_id < pool.target_layer_num:
        return
    pool.device_k_buffers[layer_id][device_indices] = pool.k_data_refs[layer_id][host_indices]
    pool.device_v_buffers[layer_id][device_indices] = pool.v_data_refs[layer_id][host_indices]


def backup_from_device_all_layer(
    pool: Any,
    device_pool: Any,
    host_indices: "torch.Tensor",
    device_indices: "torch.Tensor",
    io_backend: str,
) -> None:
    """Copy every layer of the slots from L1 to L2.

    Raises:
        ValueError: the layout or the I/O backend has no CPU copy.
    """
    _require_supported(pool, io_backend)
    for layer_id in range(pool.layer_num):
        pool.k_data_refs[layer_id][host_indices] = pool.device_k_buffers[layer_id][device_indices]
        pool.v_data_refs[layer_id][host_indices] = pool.device_v_buffers[layer_id][device_indices]


def load_latent_to_device_per_layer(
    pool: Any,
    device_pool: Any,
    host_indices: "torch.Tensor",
    device_indices: "torch.Tensor",
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Copy one layer of the slots from L2 to L1; layers of another pipeline stage are skipped.

    Raises:
        ValueError: the layout or the I/O backend has no CPU copy.
    """
    _require_supported(pool, io_backend)
    if not is_draft and layer_id not in pool._target_layer_indices:
        return
    device, host = _latent_buffers(pool, layer_id)
    device[device_indices] = host[host_indices]


def backup_latent_from_device_all_layer(
    pool: Any,
    device_pool: Any,
    host_indices: "torch.Tensor",
    device_indices: "torch.Tensor",
    io_backend: str,
) -> None:
    """Copy every layer of the slots from L1 to L2.

    Raises:
        ValueError: the layout or the I/O backend has no CPU copy.
    """
    _require_supported(pool, io_backend)
    for layer_id in pool._buffer_index_by_layer:
        device, host = _latent_buffers(pool, layer_id)
        host[host_indices] = device[device_indices]


def _latent_buffers(pool: Any, layer_id: int) -> tuple["torch.Tensor", "torch.Tensor"]:
    """A layer's buffer on the device and its view on the host."""
    return (
        pool.device_kv_buffers[pool._buffer_index_by_layer[layer_id]],
        pool.data_refs[pool._host_layer_by_controller[layer_id]],
    )
