"""Which namespace a server's pages belong to, from what SGLang knows of itself."""

import hashlib
import json
from pathlib import Path
from typing import Any

from toolgap.store.errors import StoreError
from toolgap.store.keys import suffix
from toolgap.store.namespace import Namespace
from toolgap.store.weights import fingerprint

DECISIVE = ("dtype", "quantization", "load_format", "kv_cache_dtype", "json_model_override_args")
"""Arguments of SGLang under which the same files give other KV."""


def namespace(
    storage: Any, layout: str, dtype: str, page_tokens: int, *, weights: str, salt: str
) -> Namespace:
    """The namespace of a server's store.

    Args:
        storage: SGLang's ``HiCacheStorageConfig``.
        layout: What decides the bytes of a page, but for what a pipeline stage holds.
        dtype: Of the KV.
        page_tokens: SGLang's page size.
        weights: The operator's name for the weights and how they are loaded; empty for the fingerprint of both.
        salt: The operator's.

    Raises:
        StoreError: the weights are not found on this machine, or the parallel shape has no namespace.
    """
    if storage.should_split_heads:
        raise StoreError("the store keeps no pages that are split by heads: leave out tp_lcm_size")
    return Namespace(
        model=storage.model_name or "",
        weights=weights or _weights(_server_arguments()),
        dtype=dtype,
        layout=layout,
        page_size_tokens=page_tokens,
        ranks=f"tp{storage.tp_size} pp{storage.pp_size} cp{storage.attn_cp_size} dcp{storage.dcp_size}",
        salt=salt,
    )


def key_suffix(storage: Any, pool: str, description: str, *, replicated: bool) -> str:
    """What tells the page of this rank and pool from those of the others.

    Args:
        storage: SGLang's ``HiCacheStorageConfig``.
        pool: Its name there.
        description: What decides the bytes of its pages.
        replicated: Whether all tensor-parallel ranks hold the same bytes.
    """
    return suffix(
        pool,
        description,
        tensor="all" if replicated else storage.tp_rank,
        pipeline=storage.pp_rank,
        context=storage.attn_cp_rank,
        decode=storage.dcp_rank,
    )


def _server_arguments() -> Any:
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def _weights(arguments: Any) -> str:
    decisive = json.dumps({name: str(getattr(arguments, name, None)) for name in DECISIVE}, sort_keys=True)
    folder = _model_folder(arguments)
    try:
        found = fingerprint(folder)
    except OSError as error:
        raise StoreError(
            f"the weights in {folder} cannot be told from others ({error}): give them a name, --store-weights NAME"
        ) from None
    return f"{found}-{hashlib.sha256(decisive.encode()).hexdigest()[:8]}"


def _model_folder(arguments: Any) -> Path:
    path = Path(arguments.model_path)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(arguments.model_path, revision=arguments.revision, local_files_only=True)
        )
    except (OSError, ValueError) as error:
        raise StoreError(
            f"the weights of {arguments.model_path} are not found on this machine ({type(error).__name__}): give "
            "them a name, --store-weights NAME"
        ) from None
