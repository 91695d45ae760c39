"""A fingerprint of a model's weights: what tells two folders of one name apart, without reading all of them."""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

SAMPLES = 4
"""Pieces of every tensor that are looked at: its first and last bytes, and evenly between."""
SAMPLE_BYTES = 256
OTHER_SAMPLES = 1024
"""Pieces of a weight file whose tensors are not known."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SETTINGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "generation_config.json")[:3]


def fingerprint(model: Path) -> str:
    """16 hexadecimal digits, equal for equal weights and settings of a model.

    It covers the settings files whole, and of each weight file its name, size, header, and
    :data:`SAMPLES` pieces of :data:`SAMPLE_BYTES` of every tensor. Other training, another quantization and
    another merge differ there; a file in which no more than a few single numbers were changed by hand may not.

    Args:
        model: A folder in the form of a model hub's, or one weight file.

    Raises:
        OSError: a file cannot be read.
        FileNotFoundError: there is no weight file and no settings file.
    """
    files = [model] if model.is_file() else sorted(path for path in model.iterdir() if path.is_file())
    settings = [path for path in files if path.name in SETTINGS]
    weights = [path for path in files if path.suffix in WEIGHTS]
    if not settings and not weights:
        raise FileNotFoundError(f"{model} holds neither settings nor weights of a model")
    digest = hashlib.sha256()
    for path in settings:
        _add(digest, path.name.encode(), path.read_bytes())
    for path in weights:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            _add(digest, path.name.encode(), size.to_bytes(8, "little"))
            header, spans = (
                _safetensors(file.fileno(), size) if path.suffix == ".safetensors" else (b"", None)
            )
            _add(digest, header)
            pieces = (
                _spread(0, size, OTHER_SAMPLES)
                if spans is None
                else (piece for begin, end in spans for piece in _spread(begin, end, SAMPLES))
            )
            for offset, length in pieces:
                _add(digest, os.pread(file.fileno(), length, offset))
    return digest.hexdigest()[:16]


def _safetensors(file: int, size_bytes: int) -> tuple[bytes, list[tuple[int, int]] | None]:
    """Header and the tensors' spans in the file; no spans if it is none of that format."""
    prefix = os.pread(file, 8, 0)
    if len(prefix) < 8:
        return prefix, None
    (length,) = struct.unpack("<Q", prefix)
    if length > size_bytes - 8:
        return prefix, None
    header = os.pread(file, length, 8)
    try:
        tensors = json.loads(header)
        spans = sorted(
            (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
            for name, entry in tensors.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return header, None
    return header, spans


def _spread(begin: int, end: int, samples: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of evenly spread pieces; the whole span if that is no more."""
    if end - begin <= samples * SAMPLE_BYTES:
        yield begin, end - begin
        return
    last = end - begin - SAMPLE_BYTES
    for number in range(samples):
        yield begin + last * number // (samples - 1), SAMPLE_BYTES


def _add(digest: "hashlib._Hash", *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
