"""``toolgap doctor``: why restores would not work here, each finding with its mend.

The ``check_*`` functions are pure: they compute findings from plain values. ``inspect_installation``,
``inspect_store`` and ``ask_server`` gather those values from this environment and from a running server.
"""

import argparse
import importlib.util
import json
import os
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import httpx

from toolgap.client import REQUEST_TIMEOUT_S, Toolgap, ToolgapError, ToolgapUnreachable, connection
from toolgap.doctor.environment import RUST_SERVER_MEND
from toolgap.doctor.findings import Finding, Level, note, ok, problem
from toolgap.protocol import PATH, VERSION, Code, EngineStatus, Error, Overview
from toolgap.settings import variable
from toolgap.store import config as stores
from toolgap.store.errors import StoreError

GIB = 1 << 30

DEFAULT_THRESHOLD_TOKENS = 256
"""SGLang's ``prefetch_threshold`` where nothing sets it."""

# ---- a server's set-up: SGLang's arguments ----


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
        "Start SGLang with --hicache-storage-backend, or attach one: PUT /hicache/storage-backend.",
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


class StorePlace(NamedTuple):
    """A store that SGLang would be told of, and what this machine has for it."""

    path: Path
    limit_bytes: int | None
    reads_in_place: bool
    """Whether SGLang would use the interface that copies no page."""
    has_xxhash: bool
    free_bytes: int | None
    """Of the disk; None if the folder cannot be written."""


def inspect_store(extra_config: str | None) -> StorePlace | None:
    """The store that an extra config of SGLang's names; None if it names another backend.

    Raises:
        ValueError: the store would not open.
    """
    try:
        extra = json.loads(extra_config or "{}")
    except ValueError:
        return None  # a file, or nothing that SGLang would take: others look at that
    if not isinstance(extra, dict) or extra.get("class_name") != stores.CLASS:
        return None
    try:
        path, config = stores.read(extra)
    except StoreError as error:
        raise ValueError(str(error)) from None
    there = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    usable = there is not None and there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return StorePlace(
        path,
        config.limit_bytes,
        reads_in_place=bool(extra.get("interface_v1")),
        has_xxhash=importlib.util.find_spec("xxhash") is not None,
        free_bytes=shutil.disk_usage(there).free if there is not None and usable else None,
    )


def check_store(place: StorePlace) -> list[Finding]:
    """Findings about the store that SGLang would be started with."""
    findings = []
    if not place.has_xxhash:
        findings.append(problem("store-packages", "The store needs xxhash.", "pip install 'toolgap[store]'"))
    if not place.reads_in_place:
        findings.append(
            note(
                "store-interface",
                "Without interface_v1 SGLang copies every page twice.",
                'Add "interface_v1": 1 to its extra config, or let toolgap serve --store write that.',
            )
        )
    if place.free_bytes is None:
        return [
            *findings,
            problem(
                "store",
                f"{place.path} cannot be written.",
                "Name a folder that the server may write: --store PATH.",
            ),
        ]
    limit = (
        "without a limit" if place.limit_bytes is None else f"of at most {place.limit_bytes / GIB:.1f} GiB"
    )
    free = f"{place.free_bytes / GIB:.1f} GiB"
    findings.append(ok("store", f"L3 is Toolgap's store {limit} in {place.path}; the disk has {free} free."))
    if place.limit_bytes is None:
        findings.append(
            note(
                "store-limit",
                "The store grows until the disk is full, and then stores nothing more.",
                "Give it a limit: toolgap serve --store PATH --store-limit-gib N.",
            )
        )
    return findings


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


# ---- a running server ----


class ServerAnswers(NamedTuple):
    """What a server said."""

    url: str
    info_status: int
    info: Mapping[str, Any] | None
    """``/server_info``, if it could be read."""
    endpoint_status: int
    overview: Overview | None
    error: Error | None
    """Why Toolgap refused the overview."""


def ask_server(url: str, api_key: str | None, transport: httpx.BaseTransport | None = None) -> ServerAnswers:
    """Ask a running server for its set-up and for Toolgap's overview.

    Raises:
        ToolgapUnreachable: nobody answers.
        ValueError: the URL or the key cannot be used.
    """
    overview, error, status = None, None, int(httpx.codes.OK)
    with Toolgap(url, api_key=api_key, transport=transport) as toolgap:
        try:
            overview = toolgap.overview()
        except ToolgapError as refusal:
            error, status = refusal.error, refusal.status_code
        except ToolgapUnreachable as foreign:
            if foreign.status_code is None:
                raise
            status = foreign.status_code
    info_status, info = _ask_info(url, api_key, transport)
    return ServerAnswers(url, info_status, info, status, overview, error)


def _ask_info(
    url: str, api_key: str | None, transport: httpx.BaseTransport | None
) -> tuple[int, dict[str, Any] | None]:
    try:
        with httpx.Client(**connection(url, api_key), transport=transport, timeout=REQUEST_TIMEOUT_S) as http:
            reply = http.get("/server_info")
    except httpx.TransportError as error:
        raise ToolgapUnreachable(f"no answer from {url}/server_info: {error}") from error
    try:
        info = reply.json() if reply.is_success else None
    except ValueError:
        info = None
    return reply.status_code, info if isinstance(info, dict) else None


def check_server(
    answers: ServerAnswers, supported: Sequence[str], prompt_tokens: int | None = None
) -> list[Finding]:
    """Findings about a running server.

    Args:
        answers: As :func:`ask_server` got them.
        supported: SGLang releases that this release of Toolgap supports.
        prompt_tokens: Length of a prefix that is to be restored.
    """
    info = answers.info
    findings = [_check_info(answers)] if info is None else _check_release(info, supported)
    findings.append(_check_endpoint(answers))
    if info is not None:
        engine = None if answers.overview is None else answers.overview.engine
        # A backend can be attached and detached at run time: the engine knows better.
        stale = () if engine is None else ("hicache_storage_backend",)
        findings += check_set_up({name: value for name, value in info.items() if name not in stale})
        findings += _check_key(answers, info)
    if answers.overview is not None:
        findings += _check_engine(answers.overview.engine, prompt_tokens)
        findings += _check_storage_calls(answers.overview)
    return findings


def _check_info(answers: ServerAnswers) -> Finding:
    if answers.info_status in (401, 403):
        return note(
            "server-info",
            "/server_info wants SGLang's --api-key (also where the endpoint wants --admin-api-key), so the "
            "server's arguments are not checked.",
            "Run this once more with that key.",
        )
    return problem(
        "server-info",
        f"{answers.url}/server_info answered {answers.info_status}: this is no SGLang server, or it has not "
        "started yet.",
        "Check the URL, and wait until GET /health answers 200.",
    )


def _check_release(info: Mapping[str, Any], supported: Sequence[str]) -> list[Finding]:
    version = info.get("version")
    findings = []
    if version in supported:
        findings.append(ok("sglang-release", f"The server runs SGLang {version}."))
    else:
        findings.append(
            problem(
                "sglang-release",
                f"The server runs SGLang {version}, which this release of Toolgap does not support.",
                f"Run SGLang {supported[-1]}, or a Toolgap for SGLang {version}.",
            )
        )
    if info.get("frontend", "python") != "python":
        findings.append(
            problem(
                "http-server",
                f"The server's HTTP interface is SGLang's {info['frontend']} one, which loads no plugins.",
                RUST_SERVER_MEND,
            )
        )
    announced = info.get("toolgap")
    if isinstance(announced, dict) and announced.get("protocol") != VERSION:
        findings.append(
            problem(
                "toolgap-release",
                "The server runs another release of Toolgap than this one.",
                "Install the same release at both ends.",
            )
        )
    return findings


def _check_endpoint(answers: ServerAnswers) -> Finding:
    endpoint, status = f"POST {PATH}", answers.endpoint_status
    message = "" if answers.error is None else answers.error.message
    match status:
        case 200 if answers.overview is not None:
            return ok("endpoint", f"{endpoint} answers.")
        case 200:
            return problem(
                "endpoint",
                f"{endpoint} answers, but not as this release of Toolgap does.",
                "Install the same release of Toolgap at both ends, and check the URL.",
            )
        case 401 | 403:
            return problem(
                "endpoint",
                f"{endpoint} answered {status}: the API key is missing or wrong.",
                "Give SGLang's --admin-api-key if it has one, else its --api-key: --api-key here, or "
                "TOOLGAP_API_KEY.",
            )
        case 404 | 405:
            return problem(
                "endpoint",
                f"There is no {endpoint}: Toolgap is not loaded in the server's HTTP process.",
                "Mend the other problems first. Is there none: install Toolgap into SGLang's environment and "
                "restart the server. Is it there: the server's log says why it is off (look for 'toolgap'), "
                "as does `toolgap doctor` there.",
            )
        case 501:
            return problem(
                "endpoint",
                f"{endpoint} answered 501: {message or 'without a reason'}.",
                "Do what it says; the server's log says more (look for 'toolgap').",
            )
        case _ if answers.error is not None and answers.error.code is Code.ENGINE_BUSY:
            return problem(
                "endpoint",
                f"{endpoint} answered {status}: {message}. A long prefill may be running, or the scheduler hangs.",
                "Try again; if it stays, see the server's log.",
            )
        case _:
            return problem(
                "endpoint",
                f"{endpoint} answered {status}{': ' + message if message else ''}.",
                "See the server's log.",
            )


def _check_key(answers: ServerAnswers, info: Mapping[str, Any]) -> list[Finding]:
    """Which key the endpoint wants. The keys themselves, which SGLang shows, are never repeated."""
    if answers.overview is None or "admin_api_key" not in info:
        return []
    if info["admin_api_key"]:
        return [ok("api-key", "The endpoint wants the server's admin API key.")]
    if info.get("api_key"):
        return [ok("api-key", "The endpoint wants the server's API key.")]
    return [
        note(
            "api-key",
            "The server has no API key: everyone who reaches it may submit and cancel.",
            "Start SGLang with --admin-api-key where others reach it.",
        )
    ]


def _check_engine(engine: EngineStatus, prompt_tokens: int | None) -> list[Finding]:
    findings = []
    if engine.storage_backend is None:
        findings.append(
            problem(
                "storage-backend",
                "No storage backend is attached: there is nothing to restore from, and submits are refused.",
                "Start SGLang with --hicache-storage-backend, or attach one: PUT /hicache/storage-backend.",
            )
        )
    else:
        findings.append(ok("storage-backend", f"The storage backend is {engine.storage_backend}."))
        findings.append(_check_capacity(engine))
        findings.append(
            check_prompt(
                prompt_tokens,
                engine.prefetch_threshold_tokens,
                engine.page_tokens,
                engine.max_operation_tokens,
            )
        )
    if engine.paused:
        findings.append(
            note("paused", "Generation is paused, and submits get 503.", "POST /continue_generation.")
        )
    return findings


def _check_storage_calls(overview: Overview) -> list[Finding]:
    """Stalls of every replica."""
    return [
        problem(
            "storage-reads",
            f"{engine.stalled_reads} storage calls were given up and have not returned"
            f"{'' if engine.dp_rank is None else f' on replica {engine.dp_rank}'}; they keep "
            f"{engine.quarantined_tokens} tokens of host memory.",
            "See whether the storage behind the backend hangs.",
        )
        for engine in overview.replicas or [overview.engine]
        if engine.stalled_reads
    ]


def _check_capacity(engine: EngineStatus) -> Finding:
    if engine.prefetch_capacity_tokens <= 0:
        return problem(
            "prefetch-capacity",
            "The prefetch capacity is 0 tokens: SGLang reads nothing from storage, and submits are refused.",
            "Give SGLang more host memory: --hicache-size or --hicache-ratio.",
        )
    return ok(
        "prefetch-capacity",
        f"Reads of {engine.prefetch_capacity_tokens} tokens fit at once, and operations may fill "
        f"{engine.max_operation_tokens} of {engine.host_total_tokens} tokens of host memory.",
    )
