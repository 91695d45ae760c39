"""A running server's endpoint: whether it answers, and to whom."""

from collections.abc import Mapping
from typing import Any

from toolgap.doctor.answers import ServerAnswers
from toolgap.doctor.findings import Finding, note, ok, problem
from toolgap.protocol import PATH, Code


def check_endpoint(answers: ServerAnswers) -> Finding:
    """Whether Toolgap answers, and if not, why."""
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


def check_key(answers: ServerAnswers, info: Mapping[str, Any]) -> list[Finding]:
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
