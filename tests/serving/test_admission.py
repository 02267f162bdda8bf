"""Permits count inputs and bytes, are always given back, and a refusal tells when to return."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import Draining, Overloaded
from serving.observability.call import Call
from serving.rpc.admission import Admission

Take: TypeAlias = Callable[[Admission, Call, int], None]


def call(client: str = "") -> Call:
    return Call("RetrievalService/Embed", client=client)


@pytest.mark.parametrize(("way", "take"), [("inputs", Admission.admit), ("bytes", Admission.receive)])
@given(limit=st.integers(1, 50), calls=st.lists(st.integers(1, 60), max_size=20))
def test_what_is_in_flight_keeps_the_limit_and_permits_come_back(
    way: str, take: Callable[[Admission, Call, int], None], limit: int, calls: list[int]
) -> None:
    admission = Admission(limit, limit)
    made = []
    for wanted in calls:
        made.append(call())
        held = getattr(admission, way)
        try:
            take(admission, made[-1], wanted)
        except Overloaded:
            assert held + wanted > limit
        else:
            assert getattr(admission, way) == held + wanted <= limit
    for each in made:  # those that were refused, too
        admission.release(each)
    assert (admission.inputs, admission.bytes) == (0, 0)


def test_a_draining_server_receives_nothing_and_lets_what_runs_go_on() -> None:
    admission, running = Admission(10), call()
    admission.receive(running, 1)
    admission.draining = True
    admission.admit(running)
    with pytest.raises(Draining):
        admission.receive(call(), 1)
    with pytest.raises(Draining):
        admission.check_room("", 0)


def test_a_batch_cannot_pass_by_the_limit_that_single_inputs_meet() -> None:
    """Of a client as of all: one call of ten is refused where ten calls of one are."""
    refusals: list[str] = []
    admission, shop = Admission(100, most_a_client=9, refused=refusals.append), call("shop")
    with pytest.raises(Overloaded, match="0 of at most 9 inputs of the key shop"):
        admission.admit(shop, 10)
    for _ in range(9):
        admission.admit(shop)
    with pytest.raises(Overloaded) as refusal:
        admission.check_room("shop")
    admission.check_room("another")
    assert 0.05 <= refusal.value.retry_after <= 5
    assert refusals == ["client_inputs"] * 2
    assert shop.inputs == 9


def test_a_client_at_its_limit_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.rpc.admission.MAX_MESSAGE_BYTES", 1)
    admission, greedy, modest = Admission(10, 10, most_a_client=6), call("greedy"), call("modest")
    admission.receive(greedy, 6)
    with pytest.raises(Overloaded, match=r"6 of at most 6 .* of the key greedy"):
        admission.receive(greedy, 1)
    admission.receive(modest, 4)
    with pytest.raises(Overloaded, match="10 of at most 10"):
        admission.receive(modest, 1)
    monkeypatch.undo()  # a client has room for one message of any size that is allowed
    Admission(1_000, 256 << 20, most_a_client=1).receive(call("shop"), 64 << 20)


def test_permits_survive_many_threads() -> None:
    admission = Admission(50)

    def work(_: int) -> int:
        made = call("a")
        try:
            admission.receive(made, 1)
            admission.admit(made, 7)
            assert admission.inputs <= 50
        except Overloaded:
            return 0
        finally:
            admission.release(made)
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(2_000)))
    assert (admission.inputs, admission.bytes) == (0, 0)
