"""The doctor against a real server and a real installation."""

import os
import subprocess
import sys

import msgspec
import pytest
from harness import ADMIN_KEY, PAGE, Server
from typer.testing import CliRunner

from toolgap.cli import app
from toolgap.doctor.answers import ask_server
from toolgap.doctor.findings import Finding, Level
from toolgap.doctor.rules import RULES
from toolgap.doctor.server import check_server
from toolgap.sglang.internals.targets import SUPPORTED
from toolgap.terminal import Exit

pytestmark = pytest.mark.engine


def problems(findings: list[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.level is Level.PROBLEM}


def test_a_sound_server_has_no_problems(server: Server) -> None:
    answers = ask_server(server.url, ADMIN_KEY)
    assert answers.info is not None
    assert {rule.argument for rule in RULES} <= answers.info.keys(), "SGLang renamed an argument"
    found = check_server(answers, SUPPORTED, prompt_tokens=100 * PAGE)
    assert problems(found) == set()
    assert {finding.name for finding in found} >= {
        "endpoint",
        "storage-backend",
        "prefetch-capacity",
        "prompt",
    }
    assert problems(check_server(answers, SUPPORTED, prompt_tokens=PAGE)) == {"prompt"}


def test_a_missing_key_is_found_and_the_keys_are_not_shown(server: Server) -> None:
    environ = {"TOOLGAP_API_KEY": None, "COLUMNS": "200"}
    result = CliRunner(env=environ).invoke(app, ["doctor", "--url", server.url])
    assert result.exit_code == Exit.FAILED
    assert "the API key is missing or wrong" in result.stdout
    result = CliRunner(env=environ).invoke(app, ["doctor", "--url", server.url, "--api-key", ADMIN_KEY])
    assert result.exit_code == Exit.OK, result.output
    assert ADMIN_KEY not in result.output


def test_this_installation_and_a_sound_command_line_have_no_problems() -> None:
    arguments = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--page-size", str(PAGE)]
    # A process of its own, because importing SGLang changes this one.
    done = subprocess.run(
        [sys.executable, "-m", "toolgap", "doctor", "--json", "--prompt-tokens", "300", "--", *arguments],
        capture_output=True,
        env={name: value for name, value in os.environ.items() if name != "SGLANG_PLUGINS"},
    )
    findings = msgspec.json.decode(done.stdout, type=list[Finding])
    assert {finding.level for finding in findings} == {Level.OK}, findings
    assert done.returncode == Exit.OK
