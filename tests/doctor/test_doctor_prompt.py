"""What the doctor says of a prompt of some length."""

import json
from pathlib import Path

import pytest
from doctor_samples import HICACHE, problems

from toolgap.doctor.arguments import check_arguments
from toolgap.doctor.findings import Level
from toolgap.doctor.prompt import check_prompt, read_threshold


@pytest.mark.parametrize(
    ("prompt_tokens", "page", "config", "sound"),
    [
        (256, 16, None, True),
        (255, 16, None, False),
        (271, 64, None, True),
        (319, 64, None, True),
        (255, 64, None, False),
        (64, 16, '{"prefetch_threshold": 64}', True),
        (63, 16, '{"prefetch_threshold": 64}', False),
        (127, 128, '{"prefetch_threshold": 64}', False),
        (128, 128, '{"prefetch_threshold": 64}', True),
    ],
)
def test_prompts_against_the_threshold(
    prompt_tokens: int, page: int, config: str | None, *, sound: bool
) -> None:
    arguments = [*HICACHE, "--page-size", str(page)]
    if config is not None:
        arguments += ["--hicache-storage-backend-extra-config", config]
    assert (problems(check_arguments(arguments, prompt_tokens)) == set()) is sound


def test_the_threshold_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"prefetch_threshold": 64}')
    (tmp_path / "c.toml").write_text("prefetch_threshold = 32\n")
    assert read_threshold(f"@{tmp_path}/c.json") == 64
    assert read_threshold(f"@{tmp_path}/c.toml") == 32
    assert read_threshold(f"@{tmp_path}/c.yaml") is None
    assert read_threshold('{"other": 1}') == 256
    with pytest.raises(ValueError, match="whole number"):
        read_threshold('{"prefetch_threshold": "64"}')


def test_the_mend_of_a_short_prompt_is_a_threshold_that_restores_it() -> None:
    mend = str(check_prompt(100, 256, 16).mend)
    config = mend[mend.index("{") : mend.index("}") + 1]
    assert check_prompt(100, json.loads(config)["prefetch_threshold"], 16).level is Level.OK
