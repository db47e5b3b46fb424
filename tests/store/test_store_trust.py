"""When writing is paused and when it goes on, by a clock that the test turns."""

from __future__ import annotations

import errno
import os

import pytest

from kvist.store.trust import MAX_FAILURES, PAUSE_SECONDS, Kind, Trust

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Case:
    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self.trust = Trust("It", lambda: self.now, self.told.append)

    def fail(self, kind: Kind, times: int) -> None:
        for _ in range(times):
            self.trust.failed(kind, FULL)


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_writing_is_paused_by_so_many_failures_in_a_row(kind: Kind) -> None:
    case = Case()
    case.fail(kind, MAX_FAILURES - 1)
    case.trust.worked(kind)
    case.fail(kind, MAX_FAILURES - 1)
    assert not case.trust.is_paused
    assert case.told == []
    case.fail(kind, 1)
    assert case.trust.is_paused
    assert case.told == ["It keeps no new blocks: No space left on device. It is tried again every 60 seconds."]


def test_a_pause_ends_by_time_and_the_next_failure_begins_another_of_which_nothing_is_told() -> None:
    case = Case()
    case.fail("write", MAX_FAILURES)
    case.now = PAUSE_SECONDS - 1
    assert case.trust.is_paused
    case.now = PAUSE_SECONDS
    assert not case.trust.is_paused
    case.fail("write", 1)
    assert case.trust.is_paused
    assert len(case.told) == 1


def test_writes_that_work_do_not_make_up_for_fsyncs_that_fail() -> None:
    case = Case()
    for _ in range(MAX_FAILURES):
        case.trust.worked("write")
        case.fail("sync", 1)
    assert case.trust.is_paused
    case.now = PAUSE_SECONDS
    case.trust.worked("write")
    assert len(case.told) == 1, "whether it can be trusted again is not known yet"
    case.fail("sync", 1)
    assert case.trust.is_paused


def test_what_works_again_is_told_once_and_is_trusted_as_before() -> None:
    case = Case()
    case.fail("write", MAX_FAILURES)
    case.now = PAUSE_SECONDS
    case.trust.worked("write")
    case.trust.worked("write")
    assert case.told[1:] == ["It keeps new blocks again."]
    case.fail("write", MAX_FAILURES - 1)
    assert not case.trust.is_paused
    case.fail("write", 1)
    assert case.told[2:] == case.told[:1]
