"""Settings from the environment: what is read, what is refused, and that the refusal names the variable."""

import math
from dataclasses import FrozenInstanceError, fields
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolgap.settings import PREFIX, Admission, Settings, SettingsError, variable

NUMBERS = [field.name for field in fields(Settings) if isinstance(field.default, int | float)]
NUMBERS = [name for name in NUMBERS if not isinstance(getattr(Settings(), name), bool)]
WHOLE = [name for name in NUMBERS if isinstance(getattr(Settings(), name), int)]
FRACTIONS = [name for name in NUMBERS if name not in WHOLE]


def read(name: str, text: str) -> Any:
    return getattr(Settings.from_environ({variable(name): text}), name)


def complaint(name: str, text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environ({variable(name): text})
    return str(caught.value)


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_environ({}) == Settings()
    assert Settings() == Settings(
        max_operations=16,
        max_outcomes=32,
        default_ttl_s=60.0,
        host_share=0.5,
        join=True,
        join_timeout_s=0.0,
        stall_timeout_s=30.0,
        stop_grace_s=2.0,
        max_body_bytes=32 * 2**20,
        reply_timeout_s=30.0,
    )


def test_every_setting_is_a_variable_with_its_own_help() -> None:
    for field in fields(Settings):
        assert variable(field.name) == f"{PREFIX}{field.name.upper()}"
        assert field.metadata["help"].endswith(".")
    assert len({field.metadata["help"] for field in fields(Settings)}) == len(fields(Settings))


def test_the_default_of_every_setting_is_within_its_bounds() -> None:
    assert Settings.from_environ(Settings().to_environ()) == Settings()


def test_other_variables_are_left_alone() -> None:
    environ = {
        "PATH": "/bin",
        "TOOLGAP_SOMETHING_ELSE": "x",
        "toolgap_max_operations": "2",
        "MAX_OPERATIONS": "3",
    }
    assert Settings.from_environ(environ) == Settings()


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
@pytest.mark.parametrize("text", ["", " ", "\t\n"])
def test_an_empty_variable_keeps_the_default(name: str, text: str) -> None:
    assert Settings.from_environ({variable(name): text}) == Settings()


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().max_operations = 1  # type: ignore[misc]


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "yes", "On", " true "])
def test_what_is_true(text: str) -> None:
    assert read("join", text) is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no", "OFF", " 0\n"])
def test_what_is_false(text: str) -> None:
    assert read("join", text) is False


@pytest.mark.parametrize("text", ["2", "y", "t", "enabled", "-1", "1.0", "none"])
def test_what_is_neither_is_refused(text: str) -> None:
    assert complaint("join", text) == f"TOOLGAP_JOIN={text!r}: write true or false"


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("text", ["1.5", "1e3", "0x10", "many", "1 2", "nan", "inf", "true"])
def test_a_count_that_is_no_whole_number_is_refused(name: str, text: str) -> None:
    assert complaint(name, text) == f"{variable(name)}={text!r}: write a whole number"


@pytest.mark.parametrize("name", FRACTIONS)
@pytest.mark.parametrize("text", ["soon", "1,5", "30s", "0x10", "1 2", "true"])
def test_a_time_or_share_that_is_no_number_is_refused(name: str, text: str) -> None:
    assert complaint(name, text) == f"{variable(name)}={text!r}: write a number"


@pytest.mark.parametrize("name", FRACTIONS)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "-1e999"])
def test_a_number_must_be_finite(name: str, text: str) -> None:
    assert complaint(name, text).startswith(f"{variable(name)}={text!r}: must be ")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_operations", "1", 1),
        ("max_operations", "4096", 4096),
        ("max_outcomes", "1", 1),
        ("max_outcomes", "65536", 65536),
        ("max_operation_tokens", "0", 0),
        ("piece_tokens", "1", 1),
        ("reader_patience_s", "0.5", 0.5),
        ("reads_at_once", "1", 1),
        ("reads_at_once", "4096", 4096),
        ("switch_interval_s", "0", 0.0),
        ("switch_interval_s", "1", 1.0),
        ("lease_share", "0", 0.0),
        ("lease_share", "1", 1.0),
        ("max_lease_s", "86400", 86400.0),
        ("default_ttl_s", "5e-324", 5e-324),
        ("default_ttl_s", "86400", 86400.0),
        ("host_share", "1e-9", 1e-9),
        ("host_share", "1", 1.0),
        ("join_timeout_s", "0", 0.0),
        ("join_timeout_s", "1e9", 1e9),
        ("stall_timeout_s", "0.001", 0.001),
        ("stop_grace_s", "0", 0.0),
        ("recorded_tokens", "0", 0),
        ("max_body_bytes", "1024", 1024),
        ("max_body_bytes", str(2**40), 2**40),
        ("reply_timeout_s", "0.5", 0.5),
        ("max_operations", " 7 ", 7),
    ],
)
def test_values_on_the_bounds_are_read(name: str, text: str, value: float) -> None:
    found = read(name, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "bounds"),
    [
        ("max_operations", "0", "at least 1 and at most 4096"),
        ("max_operations", "-1", "at least 1 and at most 4096"),
        ("max_operations", "4097", "at least 1 and at most 4096"),
        ("max_outcomes", "0", "at least 1 and at most 65536"),
        ("max_operation_tokens", "-1", "at least 0"),
        ("piece_tokens", "0", "at least 1"),
        ("reader_patience_s", "0", "more than 0"),
        ("reads_at_once", "0", "at least 1 and at most 4096"),
        ("reads_at_once", "4097", "at least 1 and at most 4096"),
        ("switch_interval_s", "-1", "at least 0 and at most 1"),
        ("switch_interval_s", "1.1", "at least 0 and at most 1"),
        ("lease_share", "-0.1", "at least 0 and at most 1"),
        ("lease_share", "1.1", "at least 0 and at most 1"),
        ("max_lease_s", "0", "more than 0 and at most 86400"),
        ("max_lease_s", "86401", "more than 0 and at most 86400"),
        ("max_outcomes", "65537", "at least 1 and at most 65536"),
        ("default_ttl_s", "0", "more than 0 and at most 86400"),
        ("default_ttl_s", "-0", "more than 0 and at most 86400"),
        ("default_ttl_s", "86400.5", "more than 0 and at most 86400"),
        ("host_share", "0", "more than 0 and at most 1"),
        ("host_share", "1.0001", "more than 0 and at most 1"),
        ("host_share", "50", "more than 0 and at most 1"),
        ("join_timeout_s", "-0.1", "at least 0"),
        ("stall_timeout_s", "0", "more than 0"),
        ("stall_timeout_s", "-1", "more than 0"),
        ("stop_grace_s", "-0.001", "at least 0"),
        ("recorded_tokens", "-1", "at least 0"),
        ("max_body_bytes", "1023", "at least 1024"),
        ("reply_timeout_s", "0.0", "more than 0"),
    ],
)
def test_values_out_of_bounds_are_refused(name: str, text: str, bounds: str) -> None:
    assert complaint(name, text) == f"{variable(name)}={text!r}: must be {bounds}"


def test_every_bound_is_tested() -> None:
    tested = {name for name, *_ in _parameters(test_values_out_of_bounds_are_refused)}
    assert tested == set(NUMBERS)
    assert {name for name, *_ in _parameters(test_values_on_the_bounds_are_read)} == set(NUMBERS)


def _parameters(test: Any) -> list[tuple[str, ...]]:
    return list(test.pytestmark[0].args[1])


def _values(field: Any) -> st.SearchStrategy[Any]:
    low, high, above = field.metadata["low"], field.metadata["high"], field.metadata["above"]
    if isinstance(field.default, bool):
        return st.booleans()
    if isinstance(field.default, StrEnum):
        return st.sampled_from(type(field.default))
    if isinstance(field.default, int):
        return st.integers(low, min(high, 2**60))
    return st.floats(low, None if math.isinf(high) else high, exclude_min=above, allow_infinity=False)


SETTINGS = st.builds(Settings, **{field.name: _values(field) for field in fields(Settings)})


@settings(deadline=None)
@given(SETTINGS)
def test_settings_survive_the_environment(chosen: Settings) -> None:
    environ = chosen.to_environ()
    assert environ.keys() == {variable(field.name) for field in fields(Settings)}
    assert all(isinstance(text, str) for text in environ.values())
    assert Settings.from_environ(environ) == chosen


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from([field.name for field in fields(Settings)]), st.text(max_size=12) | st.floats().map(str)
)
def test_arbitrary_text_is_read_within_bounds_or_refused_by_name(name: str, text: str) -> None:
    try:
        value = read(name, text)
    except SettingsError as caught:
        error = str(caught)
    else:
        field = next(field for field in fields(Settings) if field.name == name)
        assert type(value) is type(field.default)
        if isinstance(value, StrEnum):
            return
        assert field.metadata["low"] <= value <= field.metadata["high"]
        assert not field.metadata["above"] or value > field.metadata["low"]
        return
    assert error.startswith(f"{variable(name)}=")


def test_a_choice_is_read_in_either_case_and_anything_else_is_told_what_there_is() -> None:
    assert read("admission", "Report") is Admission.REPORT
    assert complaint("admission", "off") == "TOOLGAP_ADMISSION='off': write decline or report"


def test_a_number_of_hundreds_of_digits_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="TOOLGAP_MAX_BODY_BYTES"):
        Settings.from_environ({"TOOLGAP_MAX_BODY_BYTES": "9" * 400})
