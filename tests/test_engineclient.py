import json
from collections.abc import Callable
from typing import Any

import pytest

from toolgap.client import is_local
from toolgap.engineclient import EngineError, lines_of, read_samples, read_stream


def line(ids: list[int], text: str, completion_tokens: int, **meta: Any) -> str:
    meta |= {"completion_tokens": completion_tokens, "prompt_tokens": 7}
    return "data: " + json.dumps({"output_ids": ids, "text": text, "meta_info": meta})


def ticks(*times: float) -> Callable[[], float]:
    return iter(times).__next__


DETAILS = {"device": 0, "host": 32, "storage": 16, "storage_backend": "HiCacheFile"}


def test_the_clock_is_read_at_the_first_token_and_at_the_end() -> None:
    lines = [line([], "", 0), line([5], "a", 1), "", line([5, 6], "ab", 2, cached_tokens_details=DETAILS)]
    generation = read_stream([*lines, "data: [DONE]"], 10.0, ticks(10.5, 11.0, 12.0))
    assert (generation.ttft_s, generation.total_s) == (0.5, 2.0)
    assert generation.chunks == [(0.5, 1), (1.0, 2)]
    assert (generation.output_ids, generation.text, generation.prompt_tokens) == ([5, 6], "ab", 7)
    assert (generation.device_tokens, generation.host_tokens, generation.storage_tokens) == (0, 32, 16)


def test_a_server_that_streams_only_new_tokens() -> None:
    lines = [line([5], "a", 1), line([6, 7], "bc", 3)]
    generation = read_stream(lines, 0.0, ticks(1.0, 2.0, 3.0))
    assert (generation.output_ids, generation.text) == ([5, 6, 7], "abc")


def test_no_details_mean_that_nothing_was_cached() -> None:
    generation = read_stream([line([5], "a", 1, cached_tokens_details=None)], 0.0, ticks(1.0, 2.0))
    assert (generation.device_tokens, generation.host_tokens, generation.storage_tokens) == (0, 0, 0)


def test_an_error_in_the_stream_is_raised() -> None:
    with pytest.raises(EngineError, match="too long"):
        read_stream(['data: {"error": {"message": "too long"}}'], 0.0, ticks())


def test_a_stream_without_a_token_is_raised() -> None:
    with pytest.raises(EngineError, match="before its first token"):
        read_stream(["data: [DONE]"], 0.0, ticks(1.0))


@pytest.mark.parametrize(
    ("url", "local"),
    [("http://127.0.0.1:30000", True), ("http://localhost:1", True), ("http://gpu-host:30000", False)],
)
def test_is_local(url: str, local: bool) -> None:
    assert is_local(url) is local


def test_samples_are_summed_over_their_labels() -> None:
    text = '# HELP a_total of a\na_total{rank="0",why="b c}"} 1.5\na_total{rank="1"} 2 1700000000\nb 3e2\n'
    assert read_samples(text) == {"a_total": 3.5, "b": 300.0}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_where_streams_end_it_and_nowhere_else(size: int, end: str) -> None:
    text = "a\u2028b\u2029c\u0085d"
    sent = f'data: {{"text": "{text}"}}{end}{end}data: [DONE]{end}data: last'.encode()
    chunks = [sent[at : at + size] for at in range(0, len(sent), size)]
    assert list(lines_of(chunks)) == [f'data: {{"text": "{text}"}}', "", "data: [DONE]", "data: last"]
    assert list(lines_of([])) == []
