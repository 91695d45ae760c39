import json
import struct
from pathlib import Path

import pytest

from toolgap.store.weights import SAMPLE_BYTES, fingerprint

TENSOR_BYTES = 64 * SAMPLE_BYTES


def model(folder: Path, *, tensors: int = 3, fill: int = 7) -> Path:
    folder.mkdir()
    entries = {
        f"layer.{number}": {
            "dtype": "U8",
            "shape": [TENSOR_BYTES],
            "data_offsets": [number * TENSOR_BYTES, (number + 1) * TENSOR_BYTES],
        }
        for number in range(tensors)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes([fill]) * (tensors * TENSOR_BYTES)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text('{"layers": 3}')
    return folder


def test_equal_models_have_one_fingerprint(tmp_path: Path) -> None:
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    (other / "README.md").write_text("about it")
    assert fingerprint(one) == fingerprint(other)
    assert len(fingerprint(one)) == 16


def test_other_weights_settings_and_shapes_have_another(tmp_path: Path) -> None:
    found = {
        fingerprint(model(tmp_path / "one")),
        fingerprint(model(tmp_path / "trained further", fill=8)),
        fingerprint(model(tmp_path / "longer", tensors=4)),
    }
    settings = model(tmp_path / "settings")
    (settings / "config.json").write_text('{"layers": 3, "rope_theta": 1e6}')
    found.add(fingerprint(settings))
    assert len(found) == 4


def test_every_tensor_is_looked_at(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    seen = {fingerprint(folder)}
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for number in range(3):
        content = bytearray(whole)
        end = len(whole) - number * TENSOR_BYTES
        content[end - TENSOR_BYTES : end] = bytes(TENSOR_BYTES)
        weights.write_bytes(content)
        seen.add(fingerprint(folder))
    assert len(seen) == 4


def test_a_file_whose_header_is_none_is_sampled_evenly(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    weights = folder / "pytorch_model.bin"
    weights.write_bytes(bytes(1 << 20))
    before = fingerprint(folder)
    weights.write_bytes(bytes(1 << 19) + bytes([1]) * (1 << 19))
    assert fingerprint(folder) != before
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    assert fingerprint(folder) != before


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither settings nor weights"):
        fingerprint(tmp_path)
