"""The page's state: what became of restores, the estimate, its bounds, and what is told of changes."""

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from toolgap.gateway import events
from toolgap.gateway.page import Timeline
from toolgap.gateway.page.savings import saved_s
from toolgap.gateway.page.timeline import MAX_CODES, MAX_LISTED
from toolgap.protocol import Estimate, OperationStatus, Reason, State

UPSTREAM = "http://10.0.0.1:30000"
KEY = "0123456789ab-1"

ACCEPTED = OperationStatus(
    operation_id="one",
    state=State.QUERYING,
    requested_tokens=1000,
    aligned_tokens=960,
    resident_tokens=160,
    ttl_s=60.0,
    elapsed_s=0.0,
    namespace="n",
)
ENDED = replace(
    ACCEPTED,
    state=State.RESTORED,
    reason=Reason.COMPLETE,
    found_tokens=800,
    read_tokens=800,
    inserted_tokens=800,
    queried_s=0.5,
    read_s=2.5,
    elapsed_s=2.6,
)


class Teller:
    """Tells a timeline what happens in one conversation; times are seconds from its start."""

    def __init__(self, timeline: Timeline, key: str = KEY) -> None:
        self.timeline, self.key = timeline, key

    def paused(self, at_s: float, *tools: str) -> None:
        self.timeline.listen(events.Paused(conversation=self.key, at_s=at_s, upstream=UPSTREAM, tools=tools))

    def submitted(self, at_s: float, status: OperationStatus = ACCEPTED) -> None:
        self.timeline.listen(
            events.Submitted(conversation=self.key, at_s=at_s, upstream=UPSTREAM, status=status)
        )

    def known(self, at_s: float, status: OperationStatus = ENDED, *, final: bool = False) -> None:
        self.timeline.listen(
            events.Known(conversation=self.key, at_s=at_s, upstream=UPSTREAM, status=status, final=final)
        )

    def refused(self, at_s: float, code: str, operation_id: str = "none") -> None:
        self.timeline.listen(
            events.Refused(
                conversation=self.key, at_s=at_s, upstream=UPSTREAM, operation_id=operation_id, code=code
            )
        )

    def returned(self, at_s: float) -> None:
        self.timeline.listen(events.Returned(conversation=self.key, at_s=at_s, gap_s=at_s))

    def closed(self, at_s: float) -> None:
        self.timeline.listen(events.Closed(conversation=self.key, at_s=at_s))


def state(timeline: Timeline, *given: Any) -> Any:
    timeline.check_integrity()
    return json.loads(timeline.state(*given))


def figures(timeline: Timeline) -> Any:
    page = state(timeline)
    own = page["conversations"][0]["figures"]
    assert own == pytest.approx(page["figures"])
    return own


# ---- what became of a restore ----


def test_used_in_time() -> None:
    tell = Teller(timeline := Timeline())
    tell.paused(0.0, "bash")
    tell.submitted(1.0)
    tell.known(3.6)
    assert figures(timeline)["undecided_tokens"] == 800
    tell.returned(10.0)
    assert figures(timeline)["undecided_tokens"] == 800
    tell.known(10.5, replace(ENDED, used_tokens=800, used_after_s=9.1), final=True)
    sums = figures(timeline)
    assert (sums["used_tokens"], sums["joined_tokens"], sums["wasted_tokens"]) == (800, 0, 0)
    # It was read from 0.5 s to 2.5 s.
    assert sums["saved_s"] == pytest.approx(2.0)
    assert (sums["gaps"], sums["returned"], sums["gap_s"], sums["restores"]) == (1, 1, 10.0, 1)


def test_used_by_a_continuation_that_joined() -> None:
    tell = Teller(timeline := Timeline())
    tell.paused(0.0, "bash")
    tell.submitted(1.0)
    tell.returned(2.7)
    tell.known(3.6, replace(ENDED, joined_requests=1))
    assert figures(timeline)["undecided_tokens"] == 800
    tell.known(3.7, replace(ENDED, joined_requests=1, used_tokens=800, used_after_s=2.6), final=True)
    sums = figures(timeline)
    assert (sums["used_tokens"], sums["joined_tokens"], sums["undecided_tokens"]) == (800, 800, 0)
    # 1.7 s after acceptance it came: 1.2 s of the reading lay before.
    assert sums["saved_s"] == pytest.approx(1.2)


def test_in_part_used() -> None:
    tell = Teller(timeline := Timeline())
    tell.paused(0.0, "bash")
    tell.submitted(1.0)
    tell.known(3.6)
    tell.returned(10.0)
    tell.known(10.5, replace(ENDED, used_tokens=200, used_after_s=9.1), final=True)
    sums = figures(timeline)
    assert (sums["used_tokens"], sums["wasted_tokens"], sums["saved_s"]) == (200, 600, pytest.approx(0.5))


def test_not_used() -> None:
    tell = Teller(timeline := Timeline())
    tell.paused(0.0, "bash")
    tell.submitted(1.0)
    tell.known(3.6)
    tell.returned(10.0)
    tell.known(10.5, final=True)
    assert figures(timeline)["wasted_tokens"] == 800


@pytest.mark.parametrize("next_event", ["paused", "closed"])
def test_no_continuation(next_event: str) -> None:
    tell = Teller(timeline := Timeline())
    tell.paused(0.0, "bash")
    tell.submitted(1.0)
    tell.known(3.6)
    getattr(tell, next_event)(20.0)
    sums = figures(timeline)
    assert (sums["wasted_tokens"], sums["undecided_tokens"], sums["returned"]) == (800, 0, 0)
    # Later than thought, but true.
    tell.known(21.0, replace(ENDED, used_tokens=800, used_after_s=18.0), final=True)
    assert figures(timeline)["used_tokens"] == 800


def test_not_wasted_before_it_is_known() -> None:
    """The next gap may begin before the server has told."""
    tell = Teller(timeline := Timeline())
    tell.paused(0.0, "bash")
    tell.submitted(1.0)
    tell.known(3.6)
    tell.returned(10.0)
    tell.paused(12.0, "bash")
    assert figures(timeline)["undecided_tokens"] == 800
    tell.known(12.1, replace(ENDED, used_tokens=800, used_after_s=9.1), final=True)
    assert figures(timeline)["used_tokens"] == 800


def test_lost_with_its_server() -> None:
    tell = Teller(timeline := Timeline())
    tell.paused(0.0, "bash")
    tell.submitted(1.0)
    tell.refused(5.0, "unreachable", ACCEPTED.operation_id)
    tell.returned(6.0)
    page = state(timeline)
    (gap,) = page["conversations"][0]["gaps"]
    assert [(one["state"], one["reason"]) for one in gap["restores"]] == [("lost", "unreachable")]
    assert (gap["refusals"], page["refusals"]) == ([], {"unreachable": 1})


def test_refusals_by_code() -> None:
    tell = Teller(timeline := Timeline())
    tell.paused(0.0, "bash")
    for code in ("host_budget", "unreachable", "host_budget"):
        tell.refused(1.0, code)
    page = state(timeline)
    assert page["refusals"] == {"host_budget": 2, "unreachable": 1}
    assert [one["code"] for one in page["conversations"][0]["gaps"][0]["refusals"]] == [
        "host_budget",
        "unreachable",
        "host_budget",
    ]


def test_what_belongs_to_nothing_shown_is_left_out() -> None:
    tell = Teller(timeline := Timeline())
    tell.known(1.0)
    tell.returned(1.0)
    tell.closed(1.0)
    assert state(timeline)["keys"] == []


# ---- the estimate ----


def test_saved_is_at_most_a_recompute() -> None:
    estimate = Estimate(
        missing_tokens=800,
        restore_s=2.0,
        recompute_s=0.4,
        gap_s=5.0,
        queued_tokens=0,
        restore_tokens_per_s=400.0,
        prefill_tokens_per_s=2000.0,
        worthwhile=True,
    )
    status = replace(ENDED, used_tokens=400, used_after_s=9.0, estimate=estimate)
    assert saved_s(status, 9.0) == pytest.approx(0.2)


def test_no_estimate_without_the_times_of_the_read() -> None:
    used = replace(ENDED, used_tokens=800, read_s=None, used_after_s=9.0)
    assert saved_s(used, 9.0) is None
    tell = Teller(timeline := Timeline())
    tell.paused(0.0, "bash")
    tell.submitted(1.0)
    tell.returned(10.0)
    tell.known(10.5, used, final=True)
    assert (figures(timeline)["unestimated"], figures(timeline)["saved_s"]) == (1, 0.0)


def test_nothing_is_saved_by_what_was_read_after_the_continuation_came() -> None:
    assert saved_s(replace(ENDED, used_tokens=800, used_after_s=3.0), 0.2) == 0.0


# ---- changes ----


def test_only_what_has_changed() -> None:
    timeline = Timeline()
    Teller(timeline, "a").paused(0.0, "bash")
    Teller(timeline, "b").paused(1.0, "bash")
    first = state(timeline)
    assert [one["key"] for one in first["conversations"]] == ["a", "b"]
    Teller(timeline, "a").returned(2.0)
    second = state(timeline, first["version"], first["epoch"])
    assert [one["key"] for one in second["conversations"]] == ["a"]
    assert second["keys"] == ["a", "b"]
    assert state(timeline, second["version"], second["epoch"])["conversations"] == []
    assert len(state(timeline, second["version"], "another gateway's")["conversations"]) == 2


# ---- bounds ----


def test_a_week_stays_bounded() -> None:
    timeline = Timeline(max_conversations=4, max_gaps=3)
    sizes = []
    for number in range(400):
        tell = Teller(timeline, f"c-{number % 9}")
        tell.paused(number, *(["bash" * 100] * 20))
        for one in range(MAX_LISTED + 3):
            tell.submitted(number, replace(ACCEPTED, operation_id=f"{number}-{one}"))
            tell.refused(number, f"code {number} {one % 2}")
            timeline.listen(events.Hinted(conversation=tell.key, at_s=number, left_s=1.0))
        if number % 100 == 99:
            sizes.append(len(timeline.state()))
    page = state(timeline)
    assert page["figures"]["restores"] == page["figures"]["refused"] == 400 * (MAX_LISTED + 3)
    assert page["figures"]["gaps"] == 400
    assert (len(page["keys"]), page["forgotten"]) == (4, 396)
    assert page["refusals"]["other"] > 0
    assert len(page["refusals"]) == MAX_CODES + 1
    assert max(sizes) - min(sizes) < 2000


@st.composite
def statuses(draw: st.DrawFn) -> OperationStatus:
    inserted = draw(st.integers(0, 800))
    ended = draw(st.booleans())
    times = st.none() | st.floats(0, 100)
    return replace(
        ACCEPTED,
        operation_id=draw(st.sampled_from("pqr")),
        state=draw(st.sampled_from([one for one in State if one.terminal == ended])),
        reason=Reason.COMPLETE if ended else None,
        inserted_tokens=inserted,
        used_tokens=draw(st.integers(0, inserted)),
        joined_requests=draw(st.integers(0, 1)),
        queried_s=draw(times),
        read_s=draw(times),
        used_after_s=draw(times),
        elapsed_s=draw(st.floats(0, 100)),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_events_in_any_order(data: st.DataObject) -> None:
    timeline = Timeline(max_conversations=2, max_gaps=2)
    known: dict[str, Any] = {}
    version, epoch = 0, None
    seconds = count()
    for what in data.draw(
        st.lists(
            st.sampled_from(["paused", "submitted", "known", "refused", "returned", "closed", "looked"]),
            max_size=40,
        )
    ):
        tell = Teller(timeline, data.draw(st.sampled_from("abc")))
        at_s = float(next(seconds))
        match what:
            case "looked":
                page = state(timeline, version, epoch)
                known |= {one["key"]: one for one in page["conversations"]}
                known = {key: known[key] for key in page["keys"]}
                version, epoch = page["version"], page["epoch"]
                assert known == {one["key"]: one for one in state(timeline)["conversations"]}
            case "submitted" | "known":
                told = {"final": data.draw(st.booleans())} if what == "known" else {}
                getattr(tell, what)(at_s, data.draw(statuses()), **told)
            case "refused":
                tell.refused(at_s, "host_budget")
            case _:
                getattr(tell, what)(at_s)
        timeline.check_integrity()
