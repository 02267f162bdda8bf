"""The simulator of servers beside what theory can solve, and its committed rows and figure."""

import csv
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import simpy

from benchmarks import simulation
from benchmarks.simulating import scenarios
from benchmarks.simulating.fleet import Balancer, Outcomes, Shards, send
from benchmarks.simulating.replica import Machine, Replica
from benchmarks.simulating.times import (
    NONE,
    Parts,
    Time,
    constant,
    exponential,
    lognormal,
    measured_parts,
    search_parts,
)

ROOT = Path(__file__).resolve().parents[2]
SERVICE = 0.01
SEEDS = range(6)
SECONDS = 60.0


def means(make: Callable[[simpy.Environment, Random], Any], rate: float) -> list[float]:
    """The mean time of calls in each of several runs, of which the first tenth is left out."""
    found = []
    for seed in SEEDS:
        clock, random = simpy.Environment(), Random(seed)
        ends = send(clock, make(clock, random), random, rate=rate, seconds=SECONDS).ends
        assert {end for _, _, end in ends} == {"OK"}
        found.append(statistics.fmean(took for came, took, _ in ends if came > SECONDS / 10))
    return found


def agrees(found: list[float], theory: float) -> None:
    """The mean of the runs is that of theory within its 99 % interval, and that is within 20 % of it."""
    half = 4.03 * statistics.stdev(found) / math.sqrt(len(found))  # of Student's t with 5 degrees of freedom
    assert abs(statistics.fmean(found) - theory) < half < 0.2 * theory, (found, theory)


def server(
    law: Callable[[float], Time], instances: int = 1, cores: int | None = None
) -> Callable[..., Replica]:
    def make(clock: simpy.Environment, random: Random) -> Replica:
        parts = Parts(encode=[law(SERVICE)])
        return Replica(clock, Machine(clock, cores), parts, random, instances=instances, permits=10**6)

    return make


def test_one_server_without_memory_is_as_theory_has_it() -> None:
    load = 0.6
    agrees(means(server(exponential), load / SERVICE), SERVICE / (1 - load))  # M/M/1


def test_one_server_of_constant_times_is_as_theory_has_it() -> None:
    load = 0.7
    wait = load * SERVICE / (2 * (1 - load))  # M/D/1 by Pollaczek and Khinchin
    agrees(means(server(constant), load / SERVICE), SERVICE + wait)


def test_measured_times_are_as_theory_has_them() -> None:
    deviation, load = 0.8, 0.6
    second = SERVICE**2 * math.exp(deviation**2)  # moment of the lognormal law: M/G/1
    wait = load / SERVICE * second / (2 * (1 - load))
    agrees(means(server(lambda mean: lognormal(mean, deviation)), load / SERVICE), SERVICE + wait)


def test_several_threads_of_one_server_are_as_theory_has_them() -> None:
    count, load = 3, 0.8
    offered = load * count
    last = offered**count / math.factorial(count) / (1 - load)
    waits = last / (sum(offered**n / math.factorial(n) for n in range(count)) + last)  # Erlang's C: M/M/c
    theory = SERVICE + waits * SERVICE / (count * (1 - load))
    agrees(means(server(exponential, instances=count), load * count / SERVICE), theory)


def test_threads_that_share_a_core_take_turns() -> None:
    load = 0.6  # processor sharing: the mean is that of M/M/1 whatever the law
    agrees(means(server(constant, instances=40, cores=1), load / SERVICE), SERVICE / (1 - load))


def test_what_answers_calls_goes_before_the_models() -> None:
    clock = simpy.Environment()
    machine, ends = Machine(clock, 1), []

    def work(seconds: float, urgent: bool) -> Any:
        yield from machine.work(seconds, urgent=urgent)
        ends.append((urgent, clock.now))

    clock.process(work(1.0, False))
    clock.process(work(0.1, True))
    clock.run()
    assert [urgent for urgent, _ in ends] == [True, False]
    assert [at for _, at in ends] == pytest.approx([0.103, 1.1])  # it waits for a slice


def test_a_batch_is_the_share_of_the_threads_that_are_free() -> None:
    clock, sizes = simpy.Environment(), list[int]()

    def encode(size: int) -> Time:
        return Time(1.0, lambda random: sizes.append(size) or 1.0)  # type: ignore[func-returns-value]

    parts = Parts(encode=[encode(size) for size in range(1, 5)])
    replica = Replica(clock, Machine(clock, None), parts, Random(0), instances=2, permits=11)
    ends: list[str] = []

    def call() -> Any:
        ends.append((yield from replica.answer(math.inf)))

    for _ in range(12):
        clock.process(call())
    clock.run()
    assert sizes == [4, 4, 3]  # 11 wait for two threads, 4 are the most; then 3 for the one that is free
    assert (ends.count("OK"), ends.count("refused")) == (11, 1)


def test_calls_that_would_come_too_late_are_refused_and_those_that_did_are_not_run() -> None:
    clock, random = simpy.Environment(), Random(0)
    replica = server(constant)(clock, random)
    outcomes = send(clock, replica, random, rate=3 / SERVICE, seconds=5, patience=0.1)
    assert 0.9 < outcomes.count("OK") / (5 / SERVICE) <= 1.03  # it loses nothing by the overload
    assert outcomes.count("refused") > outcomes.count("OK")
    assert all(took <= 0.1 for _, took, end in outcomes.ends if end == "OK")


def test_what_nobody_waits_for_is_not_run() -> None:
    clock, random = simpy.Environment(), Random(0)
    replica = server(constant)(clock, random)
    ends: list[str] = []

    def call(at: float) -> Any:
        yield clock.timeout(at)
        ends.append((yield from replica.answer(at + 5.5 * SERVICE)))

    for _ in range(20):  # at once, when it is not known yet how long one takes
        clock.process(call(0.0))
    clock.process(call(7 * SERVICE))
    clock.run()
    assert (ends.count("OK"), ends.count("late")) == (6, 15)  # the sixth is run, but too late for it
    assert clock.now == pytest.approx(8 * SERVICE)


def three(clock: simpy.Environment, random: Random) -> Balancer:
    replicas = [server(constant)(clock, random) for _ in range(3)]
    return Balancer(clock, replicas, random, front=Machine(clock, None), handling=NONE, waiting=NONE)


def test_the_one_of_two_is_asked_that_has_fewer_calls_in_flight() -> None:
    clock, random = simpy.Environment(), Random(0)
    balancer = three(clock, random)
    full = balancer.replicas[0]
    full.in_flight = 10**6  # which are all its permits
    outcomes = send(clock, balancer, random, rate=150, seconds=20)
    assert outcomes.count("refused") / len(outcomes.ends) < 1 / 9 + 0.03  # both that are drawn are this one


@pytest.mark.parametrize("silent", [False, True])
def test_the_loss_of_one_of_three_breaks_no_call_that_can_be_made_again(silent: bool) -> None:
    clock, random = simpy.Environment(), Random(0)
    balancer = three(clock, random)
    clock.process(balancer.lose(balancer.replicas[0], 2.0, silent=silent))
    outcomes = send(clock, balancer, random, rate=150, seconds=8, patience=1.0)
    lost = len(outcomes.ends) - outcomes.count("OK")
    late = [came for came, _, end in outcomes.ends if end == "late"]
    assert lost == len(late)
    if silent:
        assert late
        assert all(1.9 < came < 2 + 4.1 for came in late)  # until two health checks have had no answer
    else:
        assert not late
    assert outcomes.percentile(99, since=6.2) < 10 * SERVICE


def test_a_call_to_all_parts_waits_for_the_slowest() -> None:
    def make(clock: simpy.Environment, random: Random) -> Shards:
        return Shards(clock, [server(exponential, instances=10)(clock, random) for _ in range(4)])

    agrees(means(make, 20), SERVICE * sum(1 / n for n in range(1, 5)))  # of 4 exponential times


def test_times_are_read_from_the_runs(tmp_path: Path) -> None:
    (tmp_path / "parts.csv").write_text(
        "part,batch,mean_ms,spread_ms\ndecode,1,2,0\nencode,1,4,4\nencode,2,6,0\ngallery,1,1,0\n"
        "handling,1,0.5,0\nproxy,1,0.3,0\nclient,1,0.2,0\nwaiting,1,0,0\n"
    )
    parts = measured_parts(tmp_path / "parts.csv")
    assert [each.mean for each in parts.encode] == [0.004, 0.006]
    assert parts.front(Random(0)) == pytest.approx(0.0005)
    drawn = [parts.encode[0](random) for random in [Random(0)] for _ in range(20_000)]
    assert (statistics.fmean(drawn), statistics.stdev(drawn)) == pytest.approx((0.004, 0.004), rel=0.05)
    assert scenarios.capacity(parts) == pytest.approx(scenarios.CORES / 0.0065)
    (tmp_path / "sizes.csv").write_text(
        "items,contestant,queries_per_second_1,p50_ms_1,p99_ms_1\n"
        "100,crossbatch auto,1000,1,2\n10000,crossbatch auto,100,1,2\n1000,crossbatch exact,1,1,1\n"
    )
    assert search_parts(tmp_path / "sizes.csv", 1000, handling=NONE).encode[0].mean == pytest.approx(10**-2.5)
    with pytest.raises(ValueError, match="more than 20,000"):
        search_parts(tmp_path / "sizes.csv", 20_000, handling=NONE)


def test_some_rows_are_what_the_simulation_gives() -> None:
    parts = measured_parts(simulation.RESULTS / "parts.csv")
    (again,) = scenarios.replicas(parts, (1,), (0.5,))
    rows = csv.DictReader((simulation.RESULTS / "simulation.csv").read_text(encoding="utf-8").splitlines())
    (row,) = [
        row for row in rows if (row["scenario"], row["replicas"], row["load"]) == ("replicas", "1", "0.5")
    ]
    for name, value in again.items():
        assert row[name] == (f"{value:.6g}" if isinstance(value, float) else str(value))


def test_the_figure_is_of_the_committed_rows(tmp_path: Path) -> None:
    simulation.main(["--draw", "--out", str(tmp_path / "simulation.svg")])
    committed = ROOT / "docs/figures/simulation.svg"
    assert (tmp_path / "simulation.svg").read_bytes() == committed.read_bytes()


def test_a_while_has_its_own_percentiles() -> None:
    outcomes = Outcomes([(at, at / 10, "OK") for at in range(10)] + [(5.0, 9.0, "late")])
    assert outcomes.percentile(99) == 0.9
    assert outcomes.percentile(50, since=2, until=5) == 0.3
