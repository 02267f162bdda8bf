"""The batcher: each item one outcome, its own; bounded, in order, and never computed for nobody."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from itertools import zip_longest
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.batcher import Batcher, Computed
from serving.errors import BadImage, DeadlineExceeded, Draining, Overloaded, Unavailable

T = TypeVar("T")


class Recorder:
    """Doubles numbers; remembers the batches; fails on a batch that holds a number in `poison`."""

    def __init__(self, poison: frozenset[int] = frozenset()) -> None:
        self.batches: list[list[int]] = []
        self.poison = poison
        self.gate = threading.Event()
        self.gate.set()
        self.busy = threading.Event()

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.busy.set()
        assert self.gate.wait(10)
        if self.poison & {item % 100 for item in items}:
            raise BadImage(f"batch {items}")
        return [2 * item for item in items]

    @property
    def seen(self) -> list[int]:
        return [item for batch in self.batches for item in batch]


def run(main: Callable[[], Awaitable[T]]) -> T:
    return asyncio.run(asyncio.wait_for(_as_coroutine(main), 20))


async def _as_coroutine(main: Callable[[], Awaitable[T]]) -> T:
    return await main()


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(
        st.tuples(
            st.integers(0, 30),
            st.sampled_from(["wait", "cancel", "expired"]),
            st.sampled_from(["a", "b", "c"]),
        ),
        max_size=40,
    ),
    max_batch=st.integers(1, 7),
    max_wait=st.sampled_from([0.0, 0.002]),
    poison=st.frozensets(st.integers(0, 30), max_size=3),
    breaks=st.frozensets(st.integers(0, 40)),
    expecting=st.booleans(),
)
def test_each_item_has_exactly_one_outcome_its_own(
    data: list[tuple[int, str, str]],
    max_batch: int,
    max_wait: float,
    poison: frozenset[int],
    breaks: frozenset[int],
    expecting: bool,
) -> None:
    compute = Recorder(poison)

    async def main() -> list[Computed[int] | BaseException]:
        batcher = Batcher(compute, max_batch=max_batch, max_wait=max_wait, capacity=100)
        await batcher.start()
        futures = []
        with batcher.expecting() if expecting else nullcontext():
            for position, (item, fate, flow) in enumerate(data):
                deadline = time.monotonic() - 1 if fate == "expired" else None
                future = batcher.submit(100 * position + item, deadline, flow=flow)
                if fate == "cancel":
                    future.cancel()
                futures.append(future)
                if position in breaks:
                    await asyncio.sleep(0)
            outcomes = await asyncio.gather(*futures, return_exceptions=True)
        await batcher.stop()
        assert len(batcher) == 0
        return outcomes

    outcomes = run(main)
    assert len(outcomes) == len(data)
    assert all(1 <= len(batch) <= max_batch for batch in compute.batches)
    wanted = [(100 * i + item, flow) for i, (item, fate, flow) in enumerate(data) if fate == "wait"]
    assert sorted(compute.seen) == [number for number, _ in wanted]  # nothing for nobody
    for each in "abc":  # in order within a flow
        numbers = [number for number, flow in wanted if flow == each]
        assert [number for number in compute.seen if number in numbers] == numbers
    batch_of = {number: batch for batch in compute.batches for number in batch}
    for position, ((item, fate, _), outcome) in enumerate(zip(data, outcomes, strict=True)):
        number = 100 * position + item
        match fate:
            case "cancel":
                assert isinstance(outcome, asyncio.CancelledError)
            case "expired":
                assert isinstance(outcome, DeadlineExceeded)
            case _ if poison & {each % 100 for each in batch_of[number]}:
                assert isinstance(outcome, BadImage)
            case _:
                assert isinstance(outcome, Computed)
                assert outcome.result == 2 * number


@settings(max_examples=40, deadline=None)
@given(
    crowds=st.lists(st.integers(1, 40), max_size=6),
    ahead=st.integers(0, 3),
    max_batch=st.integers(1, 9),
)
def test_a_single_item_waits_for_one_round_of_the_others_at_most(
    crowds: list[int], ahead: int, max_batch: int
) -> None:
    """However many items each of the others has, and wherever their turns stand."""
    compute = Recorder()

    async def main() -> None:
        batcher = Batcher(compute, max_batch=max_batch, max_wait=0.0, capacity=1000)
        await batcher.start()
        compute.gate.clear()
        futures = [batcher.submit(0, flow="first")]
        await asyncio.to_thread(compute.busy.wait, 5)
        for flow, count in enumerate(crowds):
            futures += [batcher.submit(1 + flow, flow=flow) for _ in range(count)]
        for _ in range(ahead):  # some rounds go by
            compute.busy.clear()
            compute.gate.set()
            await asyncio.sleep(0)
            compute.gate.clear()
        before = len(compute.batches)
        futures.append(batcher.submit(-1, flow="single"))
        compute.gate.set()
        await asyncio.gather(*futures)
        await batcher.stop()
        position = next(i for i, batch in enumerate(compute.batches) if -1 in batch)
        # One of each other flow may go first; and batches that had begun.
        assert position - before <= len(crowds) // max_batch + 1

    run(main)


@settings(max_examples=40, deadline=None)
@given(flows=st.lists(st.sampled_from("abcd"), max_size=30), max_batch=st.integers(1, 9))
def test_flows_take_turns_in_the_order_in_which_they_came(flows: list[str], max_batch: int) -> None:
    compute = Recorder()

    async def main() -> None:
        batcher = Batcher(compute, max_batch=max_batch, max_wait=0.0, capacity=100)
        await batcher.start()
        compute.gate.clear()
        futures = [batcher.submit(-1, flow="first")]
        await asyncio.to_thread(compute.busy.wait, 5)
        futures += [batcher.submit(i, flow=flow) for i, flow in enumerate(flows)]
        compute.gate.set()
        await asyncio.gather(*futures)
        await batcher.stop()

    run(main)
    queues = [[i for i, flow in enumerate(flows) if flow == each] for each in dict.fromkeys(flows)]
    rounds = zip_longest(*queues)
    assert compute.seen == [-1, *(i for each in rounds for i in each if i is not None)]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 30), max_batch=st.integers(1, 8))
def test_stop_drains(count: int, max_batch: int) -> None:
    compute = Recorder()

    async def main() -> list[int]:
        batcher = Batcher(compute, max_batch=max_batch, max_wait=10.0, capacity=100)
        await batcher.start()
        futures = [batcher.submit(item) for item in range(count)]
        await batcher.stop()
        assert all(future.done() for future in futures)
        with pytest.raises(Draining):
            batcher.submit(0)
        return [future.result().result for future in futures]

    assert run(main) == [2 * item for item in range(count)]


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(1), KeyboardInterrupt()])
def test_a_worker_outlives_whatever_a_batch_ends_with(error: BaseException) -> None:
    def compute(items: list[int]) -> list[int]:
        if items == [0]:
            raise error
        return items

    async def main() -> None:
        batcher = Batcher(compute, max_batch=1, max_wait=0.0, capacity=10)
        await batcher.start()
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await batcher.submit(0)
        assert (await batcher.submit(1)).result == 1
        await batcher.stop()

    run(main)


def test_a_worker_goes_on_with_what_waits_though_the_event_loop_is_held_up() -> None:
    compute = Recorder()

    async def main() -> None:
        batcher = Batcher(compute, max_batch=2, max_wait=0.0, capacity=10)
        await batcher.start()
        compute.gate.clear()
        futures = [batcher.submit(0)]
        await asyncio.to_thread(compute.busy.wait, 5)
        futures += [batcher.submit(number) for number in range(1, 6)]
        compute.gate.set()
        until = time.monotonic() + 5
        while len(compute.seen) < 6 and time.monotonic() < until:
            time.sleep(0.001)  # noqa: ASYNC251 - this is what holds it up
        assert compute.seen == list(range(6))
        assert [answer.result for answer in await asyncio.gather(*futures)] == [2 * n for n in range(6)]
        await batcher.stop()

    run(main)


def test_a_failing_batch_fails_its_members_only_and_the_next_one_is_computed() -> None:
    compute = Recorder(frozenset([1]))

    async def main() -> list[Computed[int] | BaseException]:
        batcher = Batcher(compute, max_batch=2, max_wait=0.0, capacity=10)
        await batcher.start()
        outcomes = await asyncio.gather(*map(batcher.submit, range(6)), return_exceptions=True)
        await batcher.stop()
        return outcomes

    first, second, *rest = run(main)
    assert isinstance(first, BadImage)
    assert isinstance(second, BadImage)
    assert first is not second  # or each waiter would add its traceback to the other's
    assert [each.result for each in rest if isinstance(each, Computed)] == [4, 6, 8, 10]


@pytest.mark.parametrize("results", [[], [1, 2, 3], None])
def test_a_wrong_number_of_results_fails_the_batch(results: list[int] | None) -> None:
    async def main() -> BaseException:
        batcher: Batcher[int, int] = Batcher(lambda _: results, max_batch=2, max_wait=0.0, capacity=10)  # type: ignore[arg-type, return-value]
        await batcher.start()
        (outcome,) = await asyncio.gather(batcher.submit(1), return_exceptions=True)
        await batcher.stop()
        assert isinstance(outcome, BaseException)
        return outcome

    assert isinstance(run(main), RuntimeError | TypeError)


def test_while_one_batch_is_computed_the_next_gathers_and_then_starts_at_once() -> None:
    compute = Recorder()

    async def main() -> None:
        batcher = Batcher(compute, max_batch=8, max_wait=0.0, capacity=100)
        await batcher.start()
        compute.gate.clear()
        first = batcher.submit(0)
        await asyncio.to_thread(compute.busy.wait, 5)
        rest = [batcher.submit(item) for item in range(1, 12)]
        compute.gate.set()
        await asyncio.gather(first, *rest)
        await batcher.stop()

    run(main)
    assert compute.batches == [[0], list(range(1, 9)), [9, 10, 11]]


def test_a_lone_item_does_not_wait() -> None:
    async def main() -> Computed[int]:
        batcher = Batcher(Recorder(), max_batch=8, max_wait=10.0, capacity=10)
        await batcher.start()
        with batcher.expecting():  # the item itself
            await asyncio.sleep(0)
        answer = await batcher.submit(1)
        await batcher.stop()
        return answer

    assert run(main).waited < 1


def test_an_item_waits_for_one_that_is_on_its_way_and_no_longer_than_max_wait() -> None:
    async def main() -> Computed[int]:
        batcher = Batcher(Recorder(), max_batch=8, max_wait=0.05, capacity=10)
        await batcher.start()
        with batcher.expecting():
            answer = await batcher.submit(1)
        await batcher.stop()
        return answer

    assert 0.045 <= run(main).waited < 1


@pytest.mark.parametrize("comes", [True, False])
def test_a_batch_starts_when_what_was_on_its_way_has_come_or_will_not_come(comes: bool) -> None:
    compute = Recorder()

    async def main() -> Computed[int]:
        batcher = Batcher(compute, max_batch=8, max_wait=10.0, capacity=10)
        await batcher.start()
        with batcher.expecting():
            first = batcher.submit(1)
            await asyncio.sleep(0.02)
            assert compute.batches == []
        if comes:
            await batcher.submit(2)
        answer = await first
        await batcher.stop()
        return answer

    assert run(main).waited < 2
    assert compute.batches == [[1, 2] if comes else [1]]


def test_a_full_batch_does_not_wait() -> None:
    compute = Recorder()

    async def main() -> list[Computed[int]]:
        batcher = Batcher(compute, max_batch=3, max_wait=30.0, capacity=10)
        await batcher.start()
        with batcher.expecting():
            answers = await asyncio.gather(*map(batcher.submit, range(3)))
        await batcher.stop()
        return answers

    assert all(answer.waited < 5 for answer in run(main))
    assert compute.batches == [[0, 1, 2]]


def test_a_full_queue_refuses_and_cancelled_items_make_room() -> None:
    compute = Recorder()

    async def main() -> None:
        batcher = Batcher(compute, max_batch=1, max_wait=0.0, capacity=2)
        await batcher.start()
        compute.gate.clear()
        running = batcher.submit(0)
        await asyncio.to_thread(compute.busy.wait, 5)
        waiting = [batcher.submit(1), batcher.submit(2)]
        with pytest.raises(Overloaded, match="2 items wait"):
            batcher.submit(3)
        waiting[0].cancel()
        late = batcher.submit(4)
        compute.gate.set()
        await asyncio.gather(running, waiting[1], late)
        await batcher.stop()

    run(main)
    assert compute.seen == [0, 2, 4]


def test_an_item_that_expires_in_the_queue_is_not_computed() -> None:
    compute = Recorder()

    async def main() -> None:
        batcher = Batcher(compute, max_batch=4, max_wait=0.0, capacity=10)
        await batcher.start()
        compute.gate.clear()
        running = batcher.submit(0)
        await asyncio.to_thread(compute.busy.wait, 5)
        late, alive = batcher.submit(1, time.monotonic() + 0.01), batcher.submit(2, time.monotonic() + 10)
        await asyncio.sleep(0.03)
        compute.gate.set()
        with pytest.raises(DeadlineExceeded, match="before the model ran"):
            await late
        await asyncio.gather(running, alive)
        await batcher.stop()

    run(main)
    assert compute.seen == [0, 2]


@pytest.mark.parametrize("way", ["fails", "is cancelled"])
def test_when_the_batcher_itself_ends_nobody_waits_for_ever(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    compute = Recorder()

    async def main() -> None:
        told: list[bool] = []
        batcher = Batcher(compute, max_batch=1, max_wait=0.0, capacity=10, failed=lambda: told.append(True))
        await batcher.start()
        compute.gate.clear()
        computed, waiting = batcher.submit(0), batcher.submit(1)
        await asyncio.to_thread(compute.busy.wait, 5)
        if way == "fails":
            batcher._take = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        else:
            assert batcher._loop_task is not None
            batcher._loop_task.cancel()
            await asyncio.wait([batcher._loop_task])
        compute.gate.set()
        outcomes = await asyncio.gather(computed, waiting, return_exceptions=True)
        assert isinstance(outcomes[1], Unavailable)
        assert isinstance(outcomes[0], Computed if way == "fails" else Unavailable)
        with pytest.raises(Unavailable, match="its log tells why"):
            batcher.submit(2)
        assert told == [True]
        await batcher.stop()
        assert told == [True]

    run(main)
    assert [record.levelname for record in caplog.records if "the batcher has failed" in record.message] == [
        "CRITICAL"
    ]


def test_a_batcher_that_is_stopped_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        told: list[bool] = []
        batcher = Batcher(Recorder(), max_batch=1, max_wait=0.0, capacity=1, failed=lambda: told.append(True))
        await batcher.start()
        await batcher.stop()
        assert told == []

    run(main)
    assert caplog.records == []


def test_limits_that_make_no_sense_are_refused() -> None:
    for limits in ({"max_batch": 0}, {"capacity": 0}, {"max_wait": -1.0}):
        with pytest.raises(ValueError, match="cannot batch"):
            Batcher(list, **({"max_batch": 1, "max_wait": 0.0, "capacity": 1} | limits))
