"""``toolgap doctor``: why restores would not work here, each finding with its mend.

The ``check_*`` functions are pure: they compute findings from plain values. ``inspect_installation``,
``inspect_store`` and ``ask_server`` gather those values from this environment and from a running server.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from toolgap.client import REQUEST_TIMEOUT_S, Toolgap, ToolgapError, ToolgapUnreachable, connection
from toolgap.doctor.environment import RUST_SERVER_MEND
from toolgap.doctor.findings import Finding, note, ok, problem
from toolgap.doctor.prompt import check_prompt
from toolgap.doctor.rules import check_set_up
from toolgap.protocol import PATH, VERSION, Code, EngineStatus, Error, Overview

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
