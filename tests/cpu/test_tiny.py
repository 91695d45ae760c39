import json
from pathlib import Path

import pytest

from toolgap.cpu.model import build_tiny_latent_model, build_tiny_model, build_tiny_window_model

safetensors = pytest.importorskip("safetensors.numpy")


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    def build(name: str, seed: int) -> bytes:
        folder = build_tiny_model(tmp_path / name, seed=seed, vocabulary=512, hidden=16)
        return (folder / "model.safetensors").read_bytes()

    assert build("a", 1) == build("b", 1)
    assert build("a", 1) != build("c", 2)


def test_weights_fit_the_config(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, layers=3, hidden=32, heads=4, kv_heads=2, vocabulary=512)
    config = json.loads((folder / "config.json").read_text())
    weights = safetensors.load_file(folder / "model.safetensors")
    assert config["num_hidden_layers"] == 3
    assert weights["model.embed_tokens.weight"].shape == (512, 32)
    assert weights["model.layers.2.self_attn.k_proj.weight"].shape == (16, 32)
    assert {str(weight.dtype) for weight in weights.values()} == {"float32"}


def test_a_window_model_names_its_window(tmp_path: Path) -> None:
    folder = build_tiny_window_model(tmp_path, window_tokens=64, hidden=32, vocabulary=512)
    config = json.loads((folder / "config.json").read_text())
    weights = safetensors.load_file(folder / "model.safetensors")
    assert config["sliding_window"] == 65, "it counts the token itself"
    assert weights["model.layers.3.self_attn.q_k_v_proj.weight"].shape == (64, 32)


def test_a_latent_model_has_one_latent_for_all_heads(tmp_path: Path) -> None:
    folder = build_tiny_latent_model(tmp_path, hidden=32, heads=4, vocabulary=512)
    config = json.loads((folder / "config.json").read_text())
    weights = safetensors.load_file(folder / "model.safetensors")
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert weights["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"].shape == (latent, 32)


@pytest.mark.parametrize("vocabulary", [300, 2000, 49152])
def test_the_tokenizer_reads_back_any_text(tmp_path: Path, vocabulary: int) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = build_tiny_model(tmp_path, vocabulary=vocabulary, hidden=16)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "In 2024: don't\n\tdef f(x): return 'äö€' <|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[-1] == 2
    assert tokenizer.get_vocab_size() <= vocabulary


def test_a_tokenizer_can_be_taken_from_another_model(tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", vocabulary=300, hidden=16)
    folder = build_tiny_model(tmp_path / "mine", vocabulary=512, hidden=16, tokenizer_from=other)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()
