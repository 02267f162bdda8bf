"""What would come too late behind other calls is refused at once, and nothing else is."""

import pytest

from serving.engine import queue_time
from serving.engine.queue_time import MARGIN, QueueTime
from serving.errors import Overloaded


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(queue_time, "time", clock)
    return clock


def measured(clock: Clock, rate: float) -> QueueTime:
    """A queue that has been busy for a second, an image after the other at this rate."""
    queue = QueueTime()
    with queue.place(1, None):
        for _ in range(round(rate)):
            with queue.place(1, None) as place:
                clock.now += 1 / rate
                place.embedded()
    return queue


def test_the_images_a_second_are_those_of_busy_times(clock: Clock) -> None:
    queue = measured(clock, 100)
    assert queue.seconds(50) == pytest.approx(0.5, rel=0.05)
    clock.now += 1_000  # with nothing to do
    with queue.place(1, None) as place:
        clock.now += 0.01
        place.embedded()
    assert queue.seconds(50) == pytest.approx(0.5, rel=0.05)


def test_an_image_that_would_come_too_late_behind_others_is_refused_at_once(clock: Clock) -> None:
    queue = measured(clock, 100)
    places = [queue.place(1, None) for _ in range(49)]
    for place in places:
        place.__enter__()
    late = clock.now + MARGIN * 0.5
    with pytest.raises(Overloaded, match="49 images wait") as refused, queue.place(1, late - 0.1):
        pass
    assert refused.value.retry_after == pytest.approx(MARGIN * 0.5, rel=0.1)
    with queue.place(1, late + 0.1):
        assert queue.images == 50
    with queue.place(1, None):
        pass
    for place in places:
        place.__exit__(None, None, None)
    assert (queue.images, queue.calls) == (0, 0)


def test_a_call_alone_is_never_refused_however_little_time_it_has(clock: Clock) -> None:
    queue = measured(clock, 100)
    with queue.place(256, clock.now + 0.001):
        pass


def test_one_image_waits_for_one_of_a_call_with_many(clock: Clock) -> None:
    queue = measured(clock, 100)
    with queue.place(256, None), queue.place(1, clock.now + 0.1):
        assert queue.images == 257


def test_nobody_is_refused_before_anything_is_known(clock: Clock) -> None:
    queue = QueueTime()
    with queue.place(256, None), queue.place(256, clock.now + 0.001):
        pass


def test_images_of_large_calls_count_when_they_are_embedded_not_at_the_end_of_their_call(
    clock: Clock,
) -> None:
    queue = QueueTime()
    with queue.place(256, None) as one, queue.place(256, None) as other:
        for _ in range(100):
            for place in (one, other):
                clock.now += 0.005
                place.embedded()
        assert queue.images == 312
        assert queue.seconds(1) == pytest.approx(3 / 200, rel=0.05)  # its own, and one of each
        assert queue.seconds(256) == pytest.approx((312 + 256) / 200, rel=0.05)
    assert (queue.images, queue.calls) == (0, 0)


def test_an_image_that_nobody_got_tells_nothing_of_how_fast_images_are_embedded(clock: Clock) -> None:
    queue = measured(clock, 100)
    for _ in range(1_000):
        with queue.place(1, None):
            clock.now += 0.001
    assert queue.seconds(50) == pytest.approx(0.5, rel=0.1)
