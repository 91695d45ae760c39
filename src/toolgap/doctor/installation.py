"""What is installed beside Toolgap in this Python environment: SGLang's release, the hooks, the entry point."""

import contextlib
import io
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

from toolgap.doctor.findings import Finding, ok, problem
from toolgap.serve import INSTALL, PLUGIN

PLUGIN_GROUP = "sglang.srt.plugins"


class Installation(NamedTuple):
    """What is installed beside Toolgap."""

    sglang_version: str | None
    hook_problems: list[str]
    """What of SGLang's internals differs from what Toolgap hooks."""
    plugins: list[str]
    """Names of the plugins that SGLang would find."""


def inspect_installation() -> Installation:
    """Look at this environment. Imports SGLang where it is installed, which takes a while."""
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        version = None
    plugins = [entry_point.name for entry_point in metadata.entry_points(group=PLUGIN_GROUP)]
    return Installation(version, [] if version is None else _hook_problems(), plugins)


def _hook_problems() -> list[str]:
    from toolgap.sglang.internals import targets

    # SGLang prints, warns and configures logging while it is imported.
    noise = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(noise),
        contextlib.redirect_stderr(noise),
    ):
        warnings.simplefilter("ignore")
        try:
            return targets.check(http=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever breaks its import is the finding
            return [f"SGLang cannot be imported: {type(error).__name__}: {error}"]


def check_installation(installation: Installation, supported: Sequence[str]) -> list[Finding]:
    """Findings about what is installed.

    Args:
        installation: As :func:`inspect_installation` found it.
        supported: SGLang releases that this release of Toolgap supports.
    """
    version = installation.sglang_version
    findings = []
    if version is None:
        findings.append(
            problem("sglang-release", "SGLang is not installed in this Python environment.", INSTALL)
        )
    elif version not in supported:
        findings.append(
            problem(
                "sglang-release",
                f"SGLang {version} is installed. Toolgap registers nothing on it, and the server starts "
                "without the endpoint.",
                f"pip install 'sglang=={supported[-1]}', or a Toolgap for SGLang {version}.",
            )
        )
    else:
        findings.append(ok("sglang-release", f"SGLang {version} is installed and supported."))
        findings += [
            problem(
                "hooks",
                f"{difference}. Toolgap registers nothing, and the server starts without the endpoint.",
                f"Install SGLang {version} anew, unpatched: pip install --force-reinstall --no-deps "
                f"'sglang=={version}'.",
            )
            for difference in installation.hook_problems
        ] or [ok("hooks", "Everything of SGLang that Toolgap hooks is as expected.")]
    if PLUGIN in installation.plugins:
        findings.append(ok("entry-point", "SGLang finds Toolgap's plugin."))
    else:
        findings.append(
            problem(
                "entry-point",
                f"No installed package has an entry point {PLUGIN!r} in {PLUGIN_GROUP}, so SGLang does "
                "not find Toolgap.",
                "Install Toolgap as a package into SGLang's environment: pip install toolgap.",
            )
        )
    return findings
