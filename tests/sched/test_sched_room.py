"""Room that a request leaves to others when it comes back, block by block, and what it is told then."""

from __future__ import annotations

import pytest

from helpers.deciders import Sim, make_request
from kvist.sched.jobs import Job, Step


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
@pytest.mark.parametrize(("preemptions", "growth"), [(0, 0), (1, 1), (2, 3), (3, 7), (6, 63), (7, 63), (20, 63)])
def test_who_gave_way_leaves_twice_as_much_each_time_to_each_that_runs(
    windows: tuple[int | None, ...], preemptions: int, growth: int
) -> None:
    """Up to a bound. Each of the two requests has one block a group."""
    for missing in (0, 1):
        sim = Sim(*windows, num_blocks=(2 + growth) * len(windows) - missing)
        sim.add("runs", range(5), 3)
        sim.step()
        sim.add("back", range(50, 55), 1).num_preemptions = preemptions
        assert list(sim.rows(sim.step())) == (["runs"] if missing else ["runs", "back"])
        sim.run()


def test_why_less_was_found_is_told_with_the_first_rows_after_it_alone() -> None:
    job = Job(make_request("r", [1], wants_events=True), (0.0, 0))
    told = []
    job.held_up_since, job.why_less = 3.0, "late"
    for now in (5.0, 6.0, 8.0):
        step = Step(4, now)
        step.give(job, 1)
        told += [event.details for event in step.events]
        job.held_up_since = now
    assert told == [
        {"seconds": 2.0, "tokens_kept": 0, "reason": "late"},
        {"seconds": 1.0, "tokens_kept": 0},
        {"seconds": 2.0, "tokens_kept": 0},
    ]
    assert job.request.stall_time == 5.0
