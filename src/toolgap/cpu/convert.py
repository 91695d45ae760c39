"""Turn a GGUF file of SmolLM2 into a model folder that SGLang reads: ``python -m`` this module.

A process of its own, so that torch and transformers never load into the caller, and what they
print stays out of its terminal.
"""

import json
import sys
from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 8192


def convert(gguf: Path, folder: Path) -> None:
    """Write ``folder`` (which exists) from ``gguf``, with float32 weights.

    float32 because it is the fastest on a CPU without AMX: see ``--dtype`` in
    :data:`toolgap.cpu.launch.DEFAULTS`.

    Raises:
        ImportError: transformers, gguf or accelerate is not installed.
        OSError, ValueError, RuntimeError: the file cannot be read or converted.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    source, name = str(gguf.parent), gguf.name
    dequantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    settings = dequantized.config.to_dict()
    # A model that came from a quantized file refuses to be saved; a fresh one of its shape does not.
    settings.pop("quantization_config", None)
    settings.pop("_model_name_or_path", None)
    settings["architectures"] = ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(settings), dtype=torch.float32)
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(folder)
    _write_tokenizer(source, name, folder)


def _write_tokenizer(source: str, name: str, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # GGUF only names the pre-tokenizer ("smollm"), and transformers makes a plain byte-level one
    # of it; SmolLM2 was trained with single digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    # The class that takes tokenizer.json as it is, in every release of transformers.
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
