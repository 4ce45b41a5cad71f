"""When calls are in flight, and the share of a time in which servers have none, against one counted on a grid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_collab.llm.busy import BusySpans, Spans, idle_share
from megatron_collab.llm.endpoint import POLICY
from megatron_collab.llm.served import RunServers
from megatron_collab.settings import EndpointConfig

SPAN = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda ends: (float(min(ends)), float(max(ends))))
PROCESSES = st.lists(st.dictionaries(st.sampled_from("abz"), st.lists(SPAN, max_size=4)), max_size=3)


@given(PROCESSES, st.integers(0, 19), st.integers(1, 20))
def test_idle_is_what_no_span_of_any_process_covers(processes: list[Spans], begin: int, length: int) -> None:
    idle = [
        not any(first <= second < last for spans in processes for first, last in spans.get(url, ()))
        for url in "abc"  # the last one has no calls, and z is no server of the policy
        for second in range(begin, begin + length)
    ]
    share = idle_share(processes, ["a", "b", "c"], begin, begin + length)
    assert share == pytest.approx(sum(idle) / len(idle), abs=1e-12)


def test_calls_that_overlap_are_one_span_and_one_that_goes_on_is_there() -> None:
    times = iter(range(100))
    busy = BusySpans(lambda: float(next(times)))
    with busy.call("a"):  # 0
        with busy.call("a"), busy.call("b"):  # 1
            pass  # 2
        assert busy.since(0.0) == {"b": [(1.0, 2.0)], "a": [(0.0, 3.0)]}
        with busy.call("b"):  # 4
            pass  # 5
    assert busy.since(2.0) == {"b": [(4.0, 5.0)], "a": [(0.0, 6.0)]}
    assert busy.since(2.0) == {"b": [(4.0, 5.0)], "a": [(0.0, 6.0)]}, "an answer that is lost loses no span"
    with pytest.raises(ValueError), busy.call("b"):  # 9
        raise ValueError
    assert busy.since(6.0) == {"b": [(9.0, 10.0)]}, "also a call that fails ends"
    assert busy.since(10.0) == {}


def test_a_long_step_of_short_calls_is_busy() -> None:
    now = 0.0
    busy = BusySpans(lambda: now)
    for _ in range(200_000):
        with busy.call("a"):
            now += 0.005
        now += 0.001
    assert idle_share([busy.since(0.0)], ["a"], 0.0, now) == pytest.approx(0.0, abs=1e-5)


def test_calls_of_users_that_the_policy_plays_count_and_those_to_others_do_not() -> None:
    servers = RunServers({"http://a/v1": "key"}, {})
    for model in (f"{POLICY}/0", "openai/other"):
        with servers.server(EndpointConfig(model=model, api_base="http://a/v1"), []):
            pass
    ((url, spans),) = servers.busy.since(0.0).items()
    assert (url, len(spans)) == ("http://a", 1)
