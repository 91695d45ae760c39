"""A prompt's length against SGLang's threshold and operations' share of host memory."""

import json
import tomllib
from pathlib import Path

from toolgap.doctor.findings import Finding, note, ok, problem
from toolgap.settings import variable

DEFAULT_THRESHOLD_TOKENS = 256
"""SGLang's ``prefetch_threshold`` where nothing sets it."""


def read_threshold(extra_config: str | None) -> int | None:
    """``prefetch_threshold`` of ``--hicache-storage-backend-extra-config``; None if it cannot be read here.

    Raises:
        ValueError: SGLang would not accept the value.
    """
    name = "--hicache-storage-backend-extra-config"
    if not extra_config:
        return DEFAULT_THRESHOLD_TOKENS
    try:
        match extra_config[1:] if extra_config.startswith("@") else None:
            case None:
                values = json.loads(extra_config)
            case str(path) if path.endswith(".json"):
                values = json.loads(Path(path).read_bytes())
            case str(path) if path.endswith(".toml"):
                values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            case _:
                return None
    except (ValueError, OSError) as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name}: is no JSON object")
    threshold = values.get("prefetch_threshold", DEFAULT_THRESHOLD_TOKENS)
    if not isinstance(threshold, int):
        raise ValueError(f"{name}: prefetch_threshold must be a whole number")
    return threshold


def check_prompt(
    prompt_tokens: int | None,
    threshold_tokens: int,
    page_tokens: int,
    max_operation_tokens: int | None = None,
) -> Finding:
    """Whether a prefix of that length is ever restored."""
    # SGLang reads whole pages, and at least one.
    threshold_tokens = max(threshold_tokens, page_tokens)
    if prompt_tokens is None:
        return note(
            "prompt",
            f"Prefixes with less than {threshold_tokens} tokens missing are never read from storage.",
            "Check your own prompts' length: --prompt-tokens N.",
        )
    aligned_tokens = prompt_tokens - prompt_tokens % page_tokens
    if aligned_tokens < threshold_tokens:
        return problem(
            "prompt",
            f"Of {prompt_tokens} tokens, {aligned_tokens} fill whole pages, less than SGLang's "
            f"prefetch_threshold of {threshold_tokens}: it is never restored (below_threshold).",
            "Lower it: --hicache-storage-backend-extra-config "
            f"""'{{"prefetch_threshold": {max(page_tokens, min(64, aligned_tokens))}}}'.""",
        )
    if max_operation_tokens is not None and aligned_tokens > max_operation_tokens:
        return problem(
            "prompt",
            f"{aligned_tokens} tokens exceed operations' share of host memory, {max_operation_tokens}: "
            "if none of them is resident, the submit gets 429 (prefix_too_large).",
            f"Raise {variable('host_share')}, or give SGLang more host memory (--hicache-size).",
        )
    return ok("prompt", f"{aligned_tokens} of {prompt_tokens} tokens can be restored.")
