"""The owner's thread: alone, bounded, and every caller gets what is his."""

import threading

import pytest

from serving.errors import Overloaded, Unavailable
from serving.gallery.index.owner import Owner


def test_each_caller_gets_his_own_result_or_exception_of_one_thread() -> None:
    owner = Owner("it", most_waiting=3)
    used: set[int] = set()
    found: dict[int, object] = {}

    def job(number: int) -> int:
        used.add(threading.get_ident())
        if number % 3 == 0:
            raise ValueError(number)
        return number

    def call(number: int) -> None:
        try:
            found[number] = owner.call(lambda: job(number))
        except ValueError as error:
            found[number] = error.args[0]

    callers = [threading.Thread(target=call, args=(number,)) for number in range(30)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == {number: number for number in range(30)}
    assert len(used) == 1
    owner.close()


def test_full_queue_refuses_and_closing_finishes_what_waits() -> None:
    owner = Owner("it", most_waiting=1, timeout=0.01)
    begun, go = threading.Event(), threading.Event()
    found: list[str] = []

    def slow() -> str:
        begun.set()
        assert go.wait(10)
        return "done"

    caller = threading.Thread(target=lambda: found.append(owner.call(slow)))
    caller.start()
    assert begun.wait(10)
    with pytest.raises(Overloaded, match="too many"):
        owner.call(lambda: None)
    go.set()
    caller.join()
    owner.leave(lambda: found.append("left"))
    owner.close()
    assert found == ["done", "left"]
    owner.leave(lambda: found.append("lost"))
    with pytest.raises(Unavailable, match="closed"):
        owner.call(lambda: None)
    assert found == ["done", "left"]
