"""A running server: what it is, and how it was started."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolgap.doctor.answers import ServerAnswers
from toolgap.doctor.endpoint import check_endpoint, check_key
from toolgap.doctor.engine import check_engine, check_storage_calls
from toolgap.doctor.environment import RUST_SERVER_MEND
from toolgap.doctor.findings import Finding, note, ok, problem
from toolgap.doctor.rules import check_set_up
from toolgap.protocol import VERSION


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
    findings.append(check_endpoint(answers))
    if info is not None:
        engine = None if answers.overview is None else answers.overview.engine
        # A backend can be attached and detached at run time: the engine knows better.
        stale = () if engine is None else ("hicache_storage_backend",)
        findings += check_set_up({name: value for name, value in info.items() if name not in stale})
        findings += check_key(answers, info)
    if answers.overview is not None:
        findings += check_engine(answers.overview.engine, prompt_tokens)
        findings += check_storage_calls(answers.overview)
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
