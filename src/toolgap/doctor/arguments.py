"""SGLang's command line, before a server is started with it."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from toolgap.doctor.findings import Finding, note, problem
from toolgap.doctor.prompt import check_prompt, read_threshold
from toolgap.doctor.rules import check_set_up
from toolgap.doctor.store import check_store, inspect_store


class _ArgumentError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _ArgumentError(message)


_SWITCHES = (
    ("--enable-hierarchical-cache", "--enable-hicache"),
    ("--disable-radix-cache",),
    ("--enable-unified-cache-external-linker",),
    ("--enable-lmcache",),
    ("--enable-flexkv",),
    ("--grpc-mode",),
    ("--smg-grpc-mode",),
    ("--encoder-only",),
    ("--use-ray",),
    ("--enable-pd-role-switch",),
)
_NUMBERS = (
    ("--tokenizer-worker-num",),
    ("--tp-size", "--tensor-parallel-size"),
    ("--pp-size", "--pipeline-parallel-size"),
    ("--dp-size", "--data-parallel-size"),
    ("--attn-cp-size", "--attention-context-parallel-size"),
    ("--dcp-size", "--decode-context-parallel-size"),
    ("--page-size",),
)
_TEXTS = (
    ("--config",),
    ("--disaggregation-mode",),
    ("--speculative-algorithm",),
    ("--hicache-host-memory-mode",),
    ("--hicache-write-policy",),
    ("--hicache-storage-backend",),
    ("--hicache-storage-backend-extra-config",),
)


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """What SGLang's command line says about restores; a text that was not given is None.

    Understands it as SGLang does, abbreviations included, without importing it.

    Raises:
        ValueError: SGLang would not accept the line.
    """
    parser = _Parser(add_help=False)
    for names in _SWITCHES:
        parser.add_argument(*names, action="store_true")
    for names in _NUMBERS:
        parser.add_argument(*names, type=int)
    for names in _TEXTS:
        parser.add_argument(*names)
    try:
        values, _ = parser.parse_known_args(list(arguments))
    except _ArgumentError as error:
        raise ValueError(str(error)) from None
    return vars(values)


def check_arguments(arguments: Sequence[str], prompt_tokens: int | None = None) -> list[Finding]:
    """Findings about the arguments that SGLang would be started with."""
    try:
        values = read_arguments(arguments)
        threshold_tokens = read_threshold(values["hicache_storage_backend_extra_config"])
        place = inspect_store(values["hicache_storage_backend_extra_config"])
    except ValueError as error:
        return [problem("arguments", f"SGLang would not start: {error}.", "Correct its arguments.")]
    findings = []
    if values["config"] is not None:
        findings.append(
            note(
                "arguments",
                f"What {values['config']} says is not checked here.",
                "Start the server and check it: toolgap doctor --url URL.",
            )
        )
    findings += check_set_up(values)
    if place is not None:
        findings += check_store(place)
    if threshold_tokens is not None:
        findings.append(check_prompt(prompt_tokens, threshold_tokens, values["page_size"] or 1))
    return findings
