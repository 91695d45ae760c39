"""A server's set-up: what SGLang's arguments must be for restores to work."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from toolgap.doctor.findings import Finding, Level, ok


class Rule(NamedTuple):
    """What one of SGLang's arguments must be for restores to work."""

    name: str
    argument: str
    """Name of the argument as SGLang has it, also in ``/server_info``."""
    fits: Callable[[Any], bool]
    good: str | None
    """Said if it fits; None keeps silent."""
    bad: str
    """Said if not; ``{}`` is its value."""
    mend: str
    level: Level = Level.PROBLEM


def _one(value: Any) -> bool:
    return value in (None, 1)


def _off(value: Any) -> bool:
    return value in (None, False)


NO_STORAGE_MEND = "Start SGLang with --hicache-storage-backend, or attach one: PUT /hicache/storage-backend."

RULES = (
    Rule(
        "hierarchical-cache",
        "enable_hierarchical_cache",
        bool,
        "The hierarchical cache is on.",
        "The hierarchical cache is off: there is no host memory to restore into, and submits get 501.",
        "Start SGLang with --enable-hierarchical-cache.",
    ),
    Rule(
        "radix-cache",
        "disable_radix_cache",
        _off,
        None,
        "The prefix cache is off, so nothing that is restored could be used.",
        "Start SGLang without --disable-radix-cache.",
    ),
    Rule(
        "host-memory-mode",
        "hicache_host_memory_mode",
        lambda value: value in (None, "cache"),
        "Host memory is a cache tier.",
        "Host memory mode is {}: it only buffers transfers and keeps nothing, so submits get 501.",
        "Start SGLang with --hicache-host-memory-mode cache, the default.",
    ),
    Rule(
        "storage-backend",
        "hicache_storage_backend",
        bool,
        "The storage backend is {}.",
        "No storage backend is configured: there is nothing to restore from, and submits are refused.",
        NO_STORAGE_MEND,
    ),
    Rule(
        "tokenizer-workers",
        "tokenizer_worker_num",
        _one,
        "There is one tokenizer worker.",
        "There are {} tokenizer workers: SGLang then asks nobody for a key on its own routes, clearing and "
        "detaching storage among them (Toolgap's endpoint does ask), and a long poll may answer half a second late.",
        "Start SGLang with --tokenizer-worker-num 1, the default, where others reach it.",
        Level.NOTE,
    ),
    *(
        Rule(
            "parallelism",
            argument,
            _one,
            None,
            f"{what} is {{}}: this release of Toolgap does not support it, and submits get 501.",
            f"Start SGLang with --{argument.replace('_', '-')} 1.",
        )
        for argument, what in (
            ("attn_cp_size", "Attention context parallelism"),
            ("dcp_size", "Decode context parallelism"),
        )
    ),
    Rule(
        "disaggregation",
        "disaggregation_mode",
        lambda value: value in (None, "null", "prefill"),
        None,
        "The server is the {} half of a disaggregated one, and submits get 501.",
        "Submit to the prefill server: it is the one that reads prefixes.",
    ),
    Rule(
        "disaggregation",
        "enable_pd_role_switch",
        _off,
        None,
        "The server may become the decode half of a disaggregated one at run time, and submits get 501.",
        "Start SGLang without --enable-pd-role-switch.",
    ),
    Rule(
        "speculation",
        "speculative_algorithm",
        lambda value: str(value).upper() not in ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP"),
        None,
        "Speculation with {} changes the cache's keys; this release does not support it: submits get 501.",
        "Start SGLang without --speculative-algorithm.",
    ),
    *(
        Rule(
            "cache",
            argument,
            _off,
            None,
            "Another cache takes the place of SGLang's own host memory, and submits get 501.",
            f"Start SGLang without --{argument.replace('_', '-')}.",
        )
        for argument in ("enable_unified_cache_external_linker", "enable_lmcache", "enable_flexkv")
    ),
    *(
        Rule(
            "http-server",
            argument,
            _off,
            None,
            "The server has no HTTP interface, or none of its own: the endpoint is not there.",
            f"Start SGLang without --{argument.replace('_', '-')}.",
        )
        for argument in ("grpc_mode", "smg_grpc_mode", "encoder_only")
    ),
    Rule(
        "schedulers",
        "use_ray",
        _off,
        None,
        "Schedulers that are Ray actors load no plugins, and submits get 501.",
        "Start SGLang without --use-ray.",
    ),
    Rule(
        "write-policy",
        "hicache_write_policy",
        lambda value: value in (None, "write_through"),
        None,
        "The write policy is {}: KV reaches host memory and storage late (when it is used again, or "
        "evicted), so a prefix may not be in storage yet, and a submit whose first part is on the device "
        "alone gets 409.",
        "Start SGLang with --hicache-write-policy write_through, the default.",
        Level.NOTE,
    ),
)


def check_set_up(arguments: Mapping[str, Any]) -> list[Finding]:
    """Findings about a server's arguments; those that are not in the mapping are not judged."""
    findings = []
    for rule in RULES:
        if rule.argument not in arguments:
            continue
        value = arguments[rule.argument]
        if not rule.fits(value):
            findings.append(
                Finding(name=rule.name, level=rule.level, meaning=rule.bad.format(value), mend=rule.mend)
            )
        elif rule.good is not None:
            findings.append(ok(rule.name, rule.good.format(value)))
    if not arguments.get("enable_hierarchical_cache", True):
        # Without it the rest of HiCache's arguments mean nothing.
        findings = [f for f in findings if f.name not in ("host-memory-mode", "write-policy")]
    return findings
