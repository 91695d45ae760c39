"""How a page of a host pool is called in a store."""

import hashlib


def suffix(
    pool: str, description: str, *, tensor: int | str, pipeline: int = 0, context: int = 0, decode: int = 0
) -> str:
    """What follows SGLang's hash of a page.

    Args:
        pool: SGLang's name for the pool, such as ``kv``.
        description: What decides the bytes of its pages.
        tensor: The tensor-parallel rank, or ``all`` where all hold the same bytes.
        pipeline: The pipeline stage.
        context: The context-parallel rank.
        decode: The rank in decode context parallelism.
    """
    form = hashlib.sha256(description.encode()).hexdigest()[:8]
    return f".{pool}.{form}.tp{tensor}-pp{pipeline}-cp{context}-dcp{decode}"
