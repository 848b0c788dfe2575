"""What the client says of itself is right, and costs the same after three days as after a minute."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc

import pytest

from fenno.load import stats
from fenno.load.client import ClientState, Delay, Delays, pause

LOCUST = """
import locust, locust.stats
from locust.env import Environment
from fenno.load.sender.conductor import forget
runner = Environment(user_classes=[locust.User], events=locust.events).create_local_runner()
runner.state = "running"
stats = runner.stats
for second in range(200):
    locust.stats.time.time = lambda: 1e9 + second
    for error in (None, ValueError("x")):
        locust.events.request.fire(request_type="POST", name="a", response_time=5, response_length=1, exception=error, context={})
    locust.stats.update_stats_history(runner)
kept = [len(stats.history), *(len(each) for entry in (stats.total, stats.entries["a", "POST"])
                              for each in (entry.num_reqs_per_sec, entry.num_fail_per_sec))]
forget(stats)
print(kept, len(stats.history), len(stats.total.num_reqs_per_sec), len(stats.total.response_times_cache), stats.total.num_requests)
"""


@pytest.mark.scenario
def test_locusts_statistics_keep_nothing_of_every_second() -> None:
    said = subprocess.run([sys.executable, "-c", LOCUST], capture_output=True, text=True, check=True).stdout
    kept, left = said.split("]")
    assert kept == "[200, 200, 200, 200, 200", "without it they would, of all five"
    assert [int(number) for number in left.split()][:2] == [0, 0]
    assert int(left.split()[2]) <= 20, "locust itself forgets these"
    assert int(left.split()[3]) == 400, "totals stay"


@pytest.mark.parametrize("count", [1, 2, 19, 20, 1000])
def test_delays_that_are_counted_have_the_percentiles_of_delays_that_are_kept(count: int) -> None:
    rng = random.Random(count)
    kept = sorted(rng.lognormvariate(-8, 2) for _ in range(count))  # from microseconds to seconds
    delays = Delays()
    for seconds in kept:
        delays.add(seconds)
    told = delays.told()
    for p, value in ((50, told.p50), (95, told.p95), (99, told.p99)):
        exact = stats.percentile(kept, p) * 1e3
        assert value == pytest.approx(exact, abs=0.0006 if exact < 2 else 0, rel=1e-3)
    assert told.max == pytest.approx(kept[-1] * 1e3, abs=0.0006)


def test_without_a_delay_there_is_none() -> None:
    delays = Delays()
    assert delays.told() == Delay()
    delays.add(-0.001)
    assert delays.told() == Delay()


def test_delays_of_up_to_an_hour_take_no_more_memory_for_being_many() -> None:
    rng, delays = random.Random(7), Delays()
    delays.add(3600.0)
    tracemalloc.start()
    for _ in range(20_000):
        delays.add(rng.lognormvariate(-8, 2))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100_000
    assert delays.told().max == 3_600_000


def test_a_run_of_three_days_leaves_a_few_megabytes_of_states() -> None:
    delay, many = Delay(p50=123.456, p95=234.567, p99=345.678, max=3_600_000.0), 10_000_000
    times = {"traffic": 1e6 + 1 / 3, "start": 2e6 + 1 / 3, "lag": delay, "lateness": delay}
    counts = {"sent": many, "done": many, "counted_sent": many, "counted_done": many, "in_flight": 9_999, "in_flight_mean": 1e4 / 3}
    versions = {"python": "3.11.7", "locust": "2.47.0", "gevent": "26.9.0"}
    full = ClientState(**times, **counts, phase="running", cpu=1 / 3, versions=versions)  # type: ignore[arg-type]
    at, states = 0.0, 0
    while at < 72 * 3600:
        at, states = at + pause(at), states + 1
    assert states * len(full.dump()) < 5e6
    assert pause(0) == pause(60) == 0.5
