"""What the doctor says of an installation."""

import pytest
from doctor_samples import SUPPORTED, problems

from toolgap.doctor.findings import Level
from toolgap.doctor.installation import Installation, check_installation


def test_a_sound_installation() -> None:
    found = check_installation(Installation("0.5.23", [], ["toolgap", "toolgap_cpu"]), SUPPORTED)
    assert [finding.level for finding in found] == [Level.OK] * 3


@pytest.mark.parametrize(
    ("installation", "expected"),
    [
        (Installation(None, [], ["toolgap"]), {"sglang-release"}),
        (Installation("0.5.24", ["sglang 0.5.24 is installed"], ["toolgap"]), {"sglang-release"}),
        (Installation("0.5.23", ["a.b: takes x, not y", "c: no d"], ["toolgap"]), {"hooks"}),
        (Installation("0.5.23", [], ["other"]), {"entry-point"}),
    ],
)
def test_installations_on_which_toolgap_is_off(installation: Installation, expected: set[str]) -> None:
    found = check_installation(installation, SUPPORTED)
    assert problems(found) == expected
    assert all(finding.mend for finding in found if finding.level is Level.PROBLEM)


def test_every_hook_that_does_not_fit_is_named() -> None:
    found = check_installation(Installation("0.5.23", ["a: is x", "b: is y"], ["toolgap"]), SUPPORTED)
    assert [f.meaning[:6] for f in found if f.name == "hooks"] == ["a: is ", "b: is "]
