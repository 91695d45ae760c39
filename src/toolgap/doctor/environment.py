"""The environment variables that a server would start with."""

import difflib
from collections.abc import Mapping

from toolgap.doctor.findings import Finding, note, ok, problem
from toolgap.serve import PLUGIN, wants_rust_server
from toolgap.settings import PREFIX, Settings, SettingsError
from toolgap.sglang.plugin import APP_PATH, APP_PATH_VARIABLE

CPU_PLUGIN = "toolgap_cpu"
RUST_SERVER_MEND = "Start SGLang without SGLANG_RUST_SERVER."


def check_environment(environ: Mapping[str, str]) -> list[Finding]:
    """Findings about environment variables that a server would start with."""
    return [
        *_check_settings(environ),
        *_check_plugin_list(environ),
        *_check_rust_server(environ),
        *_check_app_path(environ),
    ]


def _check_settings(environ: Mapping[str, str]) -> list[Finding]:
    findings = []
    try:
        Settings.from_environ(environ)
        findings.append(ok("settings", f"The {PREFIX} variables can be used."))
    except SettingsError as error:
        findings.append(
            problem(
                "settings",
                f"{error}. Toolgap is off in a server that starts with it.",
                "Correct the variable, or unset it.",
            )
        )
    known = list(Settings().to_environ())
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            # A near miss is a slip; other names may be of other tools.
            findings += [
                note("settings", f"No setting reads {name}.", f"Did you mean {near}?")
                for near in difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            ]
    return findings


def _check_plugin_list(environ: Mapping[str, str]) -> list[Finding]:
    allowed = {name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    wanted = [PLUGIN, CPU_PLUGIN] if environ.get("TOOLGAP_CPU") == "1" else [PLUGIN]
    missing = [name for name in wanted if allowed and name not in allowed]
    if not missing:
        return [ok("plugin-list", "SGLANG_PLUGINS does not exclude Toolgap.")]
    return [
        problem(
            "plugin-list",
            f"SGLANG_PLUGINS lists the plugins that SGLang may load, and not {' and '.join(missing)}.",
            f"Unset it, or set SGLANG_PLUGINS={','.join(sorted(allowed | set(missing)))}.",
        )
    ]


def _check_rust_server(environ: Mapping[str, str]) -> list[Finding]:
    if wants_rust_server(environ):
        return [
            problem(
                "http-server",
                "SGLANG_RUST_SERVER replaces SGLang's Python HTTP server, which plugins add routes to.",
                RUST_SERVER_MEND,
            )
        ]
    return [ok("http-server", "SGLang's Python HTTP server is in use.")]


def _check_app_path(environ: Mapping[str, str]) -> list[Finding]:
    app_path = environ.get(APP_PATH_VARIABLE, APP_PATH)
    if app_path == APP_PATH:
        return []
    return [
        note(
            "http-server",
            f"{APP_PATH_VARIABLE} names {app_path}: with several tokenizer workers they serve that app, and "
            "SGLang loads no plugins in them.",
            f"Unset it, or let that app's module import {APP_PATH.partition(':')[0]} first.",
        )
    ]
