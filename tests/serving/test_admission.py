"""Permits count inputs and bytes, are always given back, and a refusal tells when to return."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import Draining, Overloaded
from serving.rpc.access import Identity, identity
from serving.rpc.admission import Admission

WAYS: dict[str, Callable[[Admission, int], AbstractContextManager[None]]] = {
    "inputs": Admission.admit,
    "bytes": Admission.receive,
}


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
    with admission.admit(8), pytest.raises(Overloaded, match="8 of at most 10 inputs"), admission.admit(3):
        pass


def test_one_call_with_many_bytes_cannot_pass_by_the_limit() -> None:
    admission = Admission(10, 5_000)
    with (
        admission.receive(4_000),
        pytest.raises(Overloaded, match="4,000 of at most 5,000 bytes"),
        admission.receive(1_001),
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
    with admission.receive(1):
        admission.draining = True
        with admission.admit(1):
            pass
    with pytest.raises(Draining), admission.receive(1):
        pass


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_a_limit_below_one_is_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="admits nothing"):
        Admission(*limits)


@contextmanager
def called_by(name: str) -> Iterator[None]:
    token = identity.set(Identity(name, "write"))
    try:
        yield
    finally:
        identity.reset(token)


def test_a_batch_cannot_pass_by_the_limit_that_single_inputs_meet() -> None:
    """Of a client as of all: one call of ten is refused where ten calls of one are."""
    admission = Admission(100, most_a_client=9)
    with called_by("shop"):
        with pytest.raises(Overloaded, match="0 of at most 9 inputs of the key shop"), admission.admit(10):
            pass
        with ExitStack() as held:
            for _ in range(9):
                held.enter_context(admission.admit())
            with pytest.raises(Overloaded) as refusal, admission.admit():
                pass
    assert 0.05 <= refusal.value.retry_after <= 5


def test_a_refusal_tells_how_many_find_no_room_where_that_is_known() -> None:
    admission = Admission(256)
    with admission.admit(256):
        with pytest.raises(Overloaded) as refusal:
            admission.check_room()  # before it is known that another 256 would come
        told = "256 of at most 256 inputs are in flight, and there is no room for any more; try again later."
        assert str(refusal.value) == told
    with admission.admit(1), pytest.raises(Overloaded, match="no room for 256 more"), admission.admit(256):
        pass


@pytest.mark.parametrize("way", WAYS)
def test_a_client_at_its_limit_stops_no_other(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.rpc.admission.MAX_MESSAGE_BYTES", 1)
    admission = Admission(10, 10, most_a_client=6)
    with called_by("greedy"), WAYS[way](admission, 6):
        with pytest.raises(Overloaded, match=r"6 of at most 6 .* of the key greedy"), WAYS[way](admission, 1):
            pass
        with called_by("modest"), WAYS[way](admission, 4):
            with pytest.raises(Overloaded, match="10 of at most 10"), WAYS[way](admission, 1):
                pass
            assert getattr(admission, way) == 10
    assert getattr(admission, way) == 0
    with called_by("greedy"), WAYS[way](admission, 6):
        pass


def test_a_client_has_room_for_one_message_of_any_size_that_is_allowed() -> None:
    admission = Admission(1_000, 256 << 20, most_a_client=1)
    with called_by("shop"), admission.receive(64 << 20):
        pass


def test_clients_of_the_past_take_no_room() -> None:
    admission = Admission(10, most_a_client=5)
    for i in range(100):
        with called_by(f"k{i}"), admission.receive(1), admission.admit(1):
            pass
        with called_by(f"k{i}"), pytest.raises(Overloaded), admission.admit(6):
            pass
    assert not admission._inputs_of
    assert not admission._bytes_of
