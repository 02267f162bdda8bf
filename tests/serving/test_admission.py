"""Permits count inputs and bytes, are always given back, and a refusal tells when to return."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import Draining, Overloaded
from serving.observability.call import Call
from serving.rpc.admission import Admission

WAYS: dict[str, Callable[[Admission, int], AbstractContextManager[None]]] = {
    "inputs": lambda admission, count: admission.admit(call(), count),
    "bytes": lambda admission, count: admission.receive(call(), count),
}


def call(client: str = "") -> Call:
    return Call("RetrievalService/Embed", client=client)


@pytest.mark.parametrize("way", WAYS)
@given(limit=st.integers(1, 50), calls=st.lists(st.integers(1, 60), max_size=20))
def test_what_is_in_flight_never_passes_the_limit_and_all_permits_come_back(
    way: str, limit: int, calls: list[int]
) -> None:
    admission = Admission(limit, limit)
    open_calls = []
    refusals: list[Overloaded] = []
    for wanted in calls:
        held = getattr(admission, way)
        permit = WAYS[way](admission, wanted)
        try:
            permit.__enter__()
        except Overloaded as error:
            refusals.append(error)
            assert held + wanted > limit
        else:
            open_calls.append(permit)
            assert getattr(admission, way) == held + wanted <= limit
    for permit in open_calls:
        permit.__exit__(None, None, None)
    assert getattr(admission, way) == 0
    assert all(0.05 <= each.retry_after <= 5 for each in refusals)


def test_one_call_with_many_images_cannot_pass_by_the_limit() -> None:
    admission = Admission(10)
    with (
        admission.admit(call(), 8),
        pytest.raises(Overloaded, match="8 of at most 10 inputs"),
        admission.admit(call(), 3),
    ):
        pass


def test_one_call_with_many_bytes_cannot_pass_by_the_limit() -> None:
    admission = Admission(10, 5_000)
    with (
        admission.receive(call(), 4_000),
        pytest.raises(Overloaded, match="4,000 of at most 5,000 bytes"),
        admission.receive(call(), 1_001),
    ):
        pass


@pytest.mark.parametrize("way", WAYS)
def test_a_failing_call_gives_its_permits_back(way: str) -> None:
    admission = Admission(10)
    with pytest.raises(RuntimeError), WAYS[way](admission, 10):
        raise RuntimeError
    assert getattr(admission, way) == 0


def test_a_draining_server_receives_nothing_and_lets_what_runs_go_on() -> None:
    admission = Admission(10)
    with admission.receive(call(), 1):
        admission.draining = True
        with admission.admit(call(), 1):
            pass
    with pytest.raises(Draining), admission.receive(call(), 1):
        pass


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_a_limit_below_one_is_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="admits nothing"):
        Admission(*limits)


def test_a_batch_cannot_pass_by_the_limit_that_single_inputs_meet() -> None:
    """Of a client as of all: one call of ten is refused where ten calls of one are."""
    refusals: list[str] = []
    admission, shop = Admission(100, most_a_client=9, refused=refusals.append), call("shop")
    with pytest.raises(Overloaded, match="0 of at most 9 inputs of the key shop"), admission.admit(shop, 10):
        pass
    with ExitStack() as held:
        for _ in range(9):
            held.enter_context(admission.admit(shop))
        with pytest.raises(Overloaded) as refusal:
            admission.check_room("shop")
        admission.check_room("another")
    assert 0.05 <= refusal.value.retry_after <= 5
    assert refusals == ["client_inputs"] * 2
    assert shop.inputs == 9


def test_a_client_at_its_limit_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.rpc.admission.MAX_MESSAGE_BYTES", 1)
    admission, greedy, modest = Admission(10, 10, most_a_client=6), call("greedy"), call("modest")
    with admission.receive(greedy, 6):
        with (
            pytest.raises(Overloaded, match=r"6 of at most 6 .* of the key greedy"),
            admission.receive(greedy, 1),
        ):
            pass
        with admission.receive(modest, 4):
            with pytest.raises(Overloaded, match="10 of at most 10"), admission.receive(modest, 1):
                pass
            assert admission.bytes == 10
    assert admission.bytes == 0


def test_a_client_has_room_for_one_message_of_any_size_that_is_allowed() -> None:
    admission = Admission(1_000, 256 << 20, most_a_client=1)
    with admission.receive(call("shop"), 64 << 20):
        pass


def test_permits_survive_many_threads() -> None:
    admission = Admission(50)

    def work(_: int) -> int:
        try:
            with admission.receive(call("a"), 1), admission.admit(call("a"), 7):
                assert admission.inputs <= 50
        except Overloaded:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(2_000)))
    assert (admission.inputs, admission.bytes) == (0, 0)
