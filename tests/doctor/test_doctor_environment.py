"""What the doctor says of environment variables."""

import pytest
from doctor_samples import problems

from toolgap.doctor.environment import check_environment
from toolgap.doctor.findings import Level
from toolgap.sglang.plugin import APP_PATH, APP_PATH_VARIABLE


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, set()),
        ({"SGLANG_PLUGINS": ""}, set()),
        ({"SGLANG_PLUGINS": "other, toolgap"}, set()),
        ({"SGLANG_PLUGINS": "other"}, {"plugin-list"}),
        ({"SGLANG_PLUGINS": "toolgap", "TOOLGAP_CPU": "1"}, {"plugin-list"}),
        ({"TOOLGAP_MAX_OPERATIONS": "0"}, {"settings"}),
        ({"SGLANG_RUST_SERVER": "0"}, set()),
        ({"SGLANG_RUST_SERVER": "Yes"}, {"http-server"}),
        ({"TOOLGAP_URL": "http://x", "TOOLGAP_API_KEY": "k", "TOOLGAP_CPU": "1"}, set()),
    ],
)
def test_environments(environ: dict[str, str], expected: set[str]) -> None:
    assert problems(check_environment(environ)) == expected


def test_a_variable_that_is_nearly_a_setting_is_noted() -> None:
    found = check_environment({"TOOLGAP_MAX_OPERATION": "1", "TOOLGAP_CPU": "1", "TOOLGAP_URL": "x"})
    [note] = [finding for finding in found if finding.level is Level.NOTE]
    assert "TOOLGAP_MAX_OPERATION." in note.meaning
    assert "TOOLGAP_MAX_OPERATIONS?" in str(note.mend)


def test_an_app_of_the_operators_own_is_noted() -> None:
    own = check_environment({APP_PATH_VARIABLE: "my.server:app"})
    [note] = [finding for finding in own if finding.level is Level.NOTE]
    assert "my.server:app" in note.meaning
    assert "toolgap.sglang.workers" in str(note.mend)
    assert check_environment({APP_PATH_VARIABLE: APP_PATH}) == check_environment({})
