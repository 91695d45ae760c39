"""Tiny models with random weights, for tests of the engine: nothing to download, start quickly."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Shape = tuple[str, tuple[int, ...]]
"""A weight's name and shape."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's, without its default system message."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2, as in SmolLM2; the last one ends an answer."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def build_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 49152,
    context_tokens: int = 32768,
    tokenizer_from: Path | None = None,
) -> Path:
    """Write the folder of a Llama with seeded random float32 weights; returns ``folder``.

    Greedy answers look random but are reproducible and depend on the whole prompt, so equal ids
    mean equal KV. ``kv_heads`` is the largest ``--tp-size`` that splits the KV evenly.

    Args:
        folder: made if missing; files in it are replaced.
        seed: of the weights.
        layers: decoder layers; the largest ``--pp-size``.
        hidden: width of the model, a multiple of ``2 * heads``.
        heads: attention heads, a multiple of ``kv_heads``.
        kv_heads: heads of KV.
        vocabulary: number of token ids.
        context_tokens: longest sequence that the model accepts.
        tokenizer_from: a model folder whose tokenizer to copy, such as that of
            :func:`~toolgap.cpu.model.ensure_smollm2`; by default one in which every byte and most
            pairs of bytes are a token.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_dimensions(layers, hidden, heads, kv_heads, vocabulary, context_tokens),
        "mlp_bias": False,
    }
    return _write_model(
        folder, config, _llama_shapes(layers, hidden, heads, kv_heads, vocabulary), seed, tokenizer_from
    )


def build_tiny_window_model(
    folder: Path,
    *,
    window_tokens: int,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 49152,
    context_tokens: int = 32768,
    tokenizer_from: Path | None = None,
) -> Path:
    """Write the folder of a Spark 2.5: three of four layers see a sliding window, the fourth sees all.

    SGLang keeps the KV of the two kinds in pools of their own, as for GPT-OSS, Gemma 4 or Llama 4:
    a hybrid cache.

    Args:
        window_tokens: tokens before itself that a token sees in those layers; what a prefix must
            end with for SGLang to go on from it.
        folder: see :func:`build_tiny_model`, as for all others.
        seed: of the weights.
        layers: decoder layers, at least 4.
        hidden: width of the model.
        heads: attention heads.
        kv_heads: heads of KV.
        vocabulary: number of token ids.
        context_tokens: longest sequence that the model accepts.
        tokenizer_from: a model folder whose tokenizer to copy.
    """
    config = {
        "architectures": ["Spark2_5ForCausalLM"],
        "model_type": "spark2_5",
        **_dimensions(layers, hidden, heads, kv_heads, vocabulary, context_tokens),
        # The model's own convention, by which the window counts the token itself.
        "sliding_window": window_tokens + 1,
    }
    return _write_model(
        folder, config, _spark_shapes(layers, hidden, heads, kv_heads, vocabulary), seed, tokenizer_from
    )


def build_tiny_latent_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocabulary: int = 49152,
    context_tokens: int = 32768,
    tokenizer_from: Path | None = None,
) -> Path:
    """Write the folder of a MiniCPM 3: multi-head latent attention (MLA), as in DeepSeek V2 and V3.

    One latent vector a token stands for the keys and values of all heads; every tensor-parallel
    rank has all of it.

    Args:
        folder: see :func:`build_tiny_model`, as for all others.
        seed: of the weights.
        layers: decoder layers.
        hidden: width of the model, a multiple of ``2 * heads``.
        heads: attention heads.
        vocabulary: number of token ids.
        context_tokens: longest sequence that the model accepts.
        tokenizer_from: a model folder whose tokenizer to copy.
    """
    head_dim = hidden // heads
    config = {
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        **_dimensions(layers, hidden, heads, heads, vocabulary, context_tokens),
        "q_lora_rank": hidden // 2,
        "kv_lora_rank": hidden // 2,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": head_dim,
        "v_head_dim": head_dim,
        # Scales of the embedding, the residual and the logits, all of which become 1.
        "scale_emb": 1,
        "scale_depth": layers**0.5,
        "dim_model_base": hidden,
    }
    return _write_model(
        folder, config, _minicpm_shapes(layers, hidden, heads, vocabulary), seed, tokenizer_from
    )


def _dimensions(
    layers: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, context_tokens: int
) -> dict[str, Any]:
    """What every model's config.json says."""
    return {
        "dtype": "float32",
        "torch_dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "attention_bias": False,
        # SGLang's Llama cannot split tied embeddings over pipeline stages.
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _write_model(
    folder: Path, config: dict[str, Any], shapes: Iterable[Shape], seed: int, tokenizer_from: Path | None
) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    # Wide enough that attention picks out positions: with the usual narrow start it averages the
    # prompt, and a wrong page might go unnoticed.
    weights = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.standard_normal(shape, np.float32) * np.float32(0.2)
        for name, shape in shapes
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    if tokenizer_from is None:
        _write_tokenizer(folder, config["vocab_size"], config["max_position_embeddings"])
    else:
        for name in TOKENIZER_FILES:
            if (tokenizer_from / name).is_file():
                shutil.copyfile(tokenizer_from / name, folder / name)
    return folder


def _llama_shapes(layers: int, hidden: int, heads: int, kv_heads: int, vocabulary: int) -> Iterator[Shape]:
    head_dim = hidden // heads
    attention = (
        ("q_proj", (heads * head_dim, hidden)),
        ("k_proj", (kv_heads * head_dim, hidden)),
        ("v_proj", (kv_heads * head_dim, hidden)),
        ("o_proj", (hidden, heads * head_dim)),
    )
    return _decoder_shapes(layers, hidden, vocabulary, attention)


def _spark_shapes(layers: int, hidden: int, heads: int, kv_heads: int, vocabulary: int) -> Iterator[Shape]:
    head_dim = hidden // heads
    attention = (
        ("q_k_v_proj", ((heads + 2 * kv_heads) * head_dim, hidden)),
        ("g_proj", (heads, hidden)),
        ("out_proj", (hidden, heads * head_dim)),
    )
    return _decoder_shapes(layers, hidden, vocabulary, attention)


def _minicpm_shapes(layers: int, hidden: int, heads: int, vocabulary: int) -> Iterator[Shape]:
    head_dim, rank = hidden // heads, hidden // 2
    attention = (
        ("q_a_proj", (rank, hidden)),
        ("q_a_layernorm", (rank,)),
        ("q_b_proj", (heads * 2 * head_dim, rank)),
        ("kv_a_proj_with_mqa", (rank + head_dim, hidden)),
        ("kv_a_layernorm", (rank,)),
        ("kv_b_proj", (heads * 2 * head_dim, rank)),
        ("o_proj", (hidden, hidden)),
    )
    return _decoder_shapes(layers, hidden, vocabulary, attention)


def _decoder_shapes(layers: int, hidden: int, vocabulary: int, attention: Iterable[Shape]) -> Iterator[Shape]:
    inner = 2 * hidden
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for name, shape in attention:
            yield f"{prefix}self_attn.{name}.weight", shape
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _write_tokenizer(folder: Path, vocabulary: int, context_tokens: int) -> None:
    """Byte-level BPE: special tokens, the 256 bytes, then pairs of bytes until the ids run out."""
    letters = _byte_letters()
    # Printable bytes first, so that ordinary text gets its pairs even with few ids.
    order = sorted(range(256), key=lambda byte: (not 32 <= byte < 127, byte))
    pairs = [(letters[first], letters[second]) for first in order for second in order]
    pairs = pairs[: max(vocabulary - len(SPECIAL_TOKENS) - len(letters), 0)]
    tokens = [*SPECIAL_TOKENS, *letters, *(first + second for first, second in pairs)]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    _write(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": index,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for index, token in enumerate(SPECIAL_TOKENS)
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": [list(pair) for pair in pairs],
            },
        },
    )
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": context_tokens,
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _byte_letters() -> list[str]:
    """The letter by which byte-level BPE writes each byte: itself if printable, else from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, spare = [], 256
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
