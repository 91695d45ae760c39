import threading
import time
from collections.abc import Sequence
from statistics import mean

import pytest

from toolgap.bench.load import (
    Arrival,
    arrivals,
    cached_tokens,
    closed_loop,
    inter_token_ms,
    open_loop,
    outputs_sha256,
    poisson_s,
)
from toolgap.engineclient import EngineError, Generation


def generation(output_ids: Sequence[int] = (7, 8), tiers: tuple[int, int, int] = (0, 0, 0)) -> Generation:
    return Generation(0.1, 0.2, 3, list(output_ids), "", *tiers)


def test_arrivals_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    def window(seed: int, name: str) -> list[Arrival]:
        return arrivals(seed, name, rate_per_s=2.0, window_s=10.0, prompt_tokens=5, vocabulary=1000)

    assert window(1, "a") == window(1, "a")
    assert len({str(window(seed, name)) for seed in (1, 2) for name in "ab"}) == 4


def test_every_arrival_is_in_the_window_and_has_a_prompt_of_its_own() -> None:
    found = arrivals(1, "a", rate_per_s=5.0, window_s=10.0, prompt_tokens=9, vocabulary=1000)
    due = [request.due_s for request in found]
    assert due == sorted(due)
    assert due[0] > 0
    assert due[-1] < 10.0
    assert {len(request.input_ids) for request in found} == {9}
    assert len({tuple(request.input_ids) for request in found}) == len(found)


def test_arrivals_come_at_the_given_rate() -> None:
    counts = [len(poisson_s(seed, "a", 3.0, 20.0)) for seed in range(200)]
    # The mean of 200 counts of mean 60 has a standard deviation of 0.55.
    assert abs(mean(counts) - 60) < 3


def test_an_event_of_several_tokens_is_split_evenly() -> None:
    assert inter_token_ms([(1.0, 1), (1.5, 2), (2.5, 6)]) == [500.0, 250.0, 250.0, 250.0, 250.0]


def test_the_first_event_has_no_latency_between_tokens() -> None:
    assert inter_token_ms([(1.0, 3)]) == []
    assert inter_token_ms([]) == []


def test_requests_of_an_open_loop_do_not_wait_for_each_other() -> None:
    both = threading.Barrier(2)

    def send(input_ids: Sequence[int]) -> Generation:
        both.wait(10)
        return generation(input_ids)

    served = open_loop(send, [Arrival(0.0, [1]), Arrival(0.01, [2])])
    assert [(one.due_s, one.generation.output_ids) for one in served] == [(0.0, [1]), (0.01, [2])]
    assert all(0 <= one.late_ms < 5000 for one in served)


def test_no_request_of_an_open_loop_leaves_before_it_is_due() -> None:
    begin_s = time.perf_counter()
    sent_s = []

    def send(input_ids: Sequence[int]) -> Generation:
        sent_s.append(time.perf_counter() - begin_s)
        return generation()

    open_loop(send, [Arrival(due_s, [1]) for due_s in (0.0, 0.02, 0.05)])
    assert all(at_s >= due_s for at_s, due_s in zip(sent_s, (0.0, 0.02, 0.05), strict=True))


def test_an_error_in_an_open_loop_is_raised_and_ends_it() -> None:
    sent = []

    def send(input_ids: Sequence[int]) -> Generation:
        sent.append(list(input_ids))
        raise EngineError("out of memory")

    begin_s = time.perf_counter()
    with pytest.raises(EngineError, match="out of memory"):
        open_loop(send, [Arrival(0.0, [1]), Arrival(60.0, [2])])
    assert sent == [[1]]
    assert time.perf_counter() - begin_s < 30


def test_an_open_loop_of_nothing() -> None:
    assert open_loop(lambda ids: generation(ids), []) == []


def test_a_closed_loop_keeps_its_requests_in_flight_and_no_more() -> None:
    lock, now, most = threading.Lock(), 0, 0
    full = threading.Barrier(3)

    def send(input_ids: Sequence[int]) -> Generation:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        full.wait(10)
        with lock:
            now -= 1
        return generation(input_ids)

    burst = closed_loop(send, [[number] for number in range(9)], 3)
    assert [one.generation.output_ids for one in burst.served] == [[number] for number in range(9)]
    assert most == 3
    assert burst.wall_s > 0


def test_an_error_in_a_closed_loop_is_raised() -> None:
    def send(input_ids: Sequence[int]) -> Generation:
        if list(input_ids) == [2]:
            raise EngineError("out of memory")
        return generation()

    with pytest.raises(EngineError, match="out of memory"):
        closed_loop(send, [[number] for number in range(50)], 2)


def test_cached_tokens_are_of_every_tier() -> None:
    def send(input_ids: Sequence[int]) -> Generation:
        return generation(tiers=(1, 10, 100))

    assert cached_tokens(closed_loop(send, [[1], [2]], 1).served) == 222


def test_the_digest_depends_on_every_id_and_on_whose_it_is() -> None:
    def digest(*outputs: Sequence[int]) -> str:
        return outputs_sha256(closed_loop(generation, outputs, 2).served)

    assert digest([1, 2], [3]) == digest([1, 2], [3])
    assert len({digest([1, 2], [3]), digest([1], [2, 3]), digest([3], [1, 2]), digest([1, 2], [4])}) == 4
