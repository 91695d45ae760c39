"""Settings of the gateway: where they come from, and what is wrong with them."""

from pathlib import Path
from typing import Any

import pytest

from toolgap.gateway.config import FIELDS, Config, ConfigError, base_url, load, variable

URL = "http://127.0.0.1:30000"


def test_flags_come_before_variables_before_the_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f'upstreams = ["{URL}"]\nport = 1\ndrain_s = 1\nread_timeout_s = 1\n')
    environ = {"TOOLGAP_GATEWAY_PORT": "2", "TOOLGAP_GATEWAY_DRAIN_S": "2", "HOME": "/"}
    config = load({"port": 3, "host": None, "upstreams": []}, environ, file)
    assert (config.port, config.drain_s, config.read_timeout_s, config.host) == (3, 2, 1.0, "127.0.0.1")
    assert config.upstreams == (URL,)
    assert load({}, {**environ, "TOOLGAP_GATEWAY_CONFIG": str(file)}) == load({}, environ, file)


def test_several_upstreams_in_a_variable() -> None:
    config = load({}, {"TOOLGAP_GATEWAY_UPSTREAMS": "http://a:1/, https://b/x/  http://c"})
    assert config.upstreams == ("http://a:1", "https://b/x", "http://c")


@pytest.mark.parametrize(
    ("flags", "environ", "file", "said"),
    [
        ({}, {}, None, "no upstream: give --upstream"),
        ({"upstreams": ["127.0.0.1:30000"]}, {}, None, "--upstream: the upstream '127.0.0.1:30000' must be"),
        ({"upstreams": ["ftp://a"]}, {}, None, "must be a URL like"),
        ({"upstreams": ["http://"]}, {}, None, "must be a URL like"),
        ({"upstreams": ["http://a:x"]}, {}, None, "is no URL"),
        ({"upstreams": [f"{URL}/v1"]}, {}, None, "without /v1"),
        ({"upstreams": [f"{URL}?a=1"]}, {}, None, "without a query"),
        ({"upstreams": [URL, f"{URL}/"]}, {}, None, "given twice"),
        ({"upstreams": [URL], "port": 70_000}, {}, None, "--port: Expected `int` <= 65535"),
        ({"upstreams": [URL], "connect_timeout_s": 0}, {}, None, "--connect-timeout-s: Expected"),
        ({"upstreams": [URL], "read_timeout_s": float("nan")}, {}, None, "--read-timeout-s: Expected"),
        ({"upstreams": [URL]}, {"TOOLGAP_GATEWAY_IDLE_S": "nan"}, None, "TOOLGAP_GATEWAY_IDLE_S: Expected"),
        ({"upstreams": [URL]}, {"TOOLGAP_GATEWAY_PORT": "x"}, None, "TOOLGAP_GATEWAY_PORT: Expected `int`"),
        ({"upstreams": [URL]}, {"TOOLGAP_GATEWAY_PRT": "1"}, None, "TOOLGAP_GATEWAY_PRT is no setting"),
        ({"upstreams": [URL]}, {}, "port = 'x'", "port in "),
        ({"upstreams": [URL]}, {}, "prt = 1", "prt in "),
        ({"upstreams": [URL]}, {}, "port", "is no TOML"),
        ({"upstreams": [URL], "check_path": "health"}, {}, None, "--check-path"),
    ],
)
def test_errors_name_the_setting_and_where_it_is_from(
    flags: dict[str, Any], environ: dict[str, str], file: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "gateway.toml"
    if file is not None:
        path.write_text(file)
    with pytest.raises(ConfigError) as caught:
        load(flags, environ, path if file is not None else None)
    assert said in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load({"upstreams": [URL]}, {}, tmp_path / "none.toml")


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="user or password") as caught:
        base_url("http://user:secret@a:1")
    assert "secret" not in str(caught.value)


def test_every_setting_says_what_it_is_and_is_frozen() -> None:
    config = Config(upstreams=(URL,))
    for field in FIELDS:
        assert variable(field.name) == f"TOOLGAP_GATEWAY_{field.name.upper()}"
    with pytest.raises(AttributeError):
        config.port = 1  # type: ignore[misc]
