"""The comparison's turns, arithmetic and failures, on engines that compute nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from helpers.fake_peers import contender, log_of, pids_of
from kvist.bench.compare import Comparison, Failure, compare, figure, summarize
from kvist.bench.session import Contender, Session, SessionError, own_python
from kvist.bench.workloads import FRESH_WORKS, WORKS, Work, choose_works
from kvist.errors import UsageError

ALL = {work.name: work for work in (*WORKS, *FRESH_WORKS)}
SMALL = Work("small", "output", 2, 8, 4)
DEEP = Work("deep", "decode", 1, 20, 10)


def silent(_: str) -> None:
    """No report."""


def run(contenders: list[Contender], works: list[Work], rounds: int = 1, timeout: float = 60.0) -> Comparison:
    return compare(contenders, works, rounds, vocab_size=1000, report=silent, timeout=timeout)


def test_each_work_goes_round_all_engines_with_the_same_ids_and_the_others_stand_still(tmp_path: Path) -> None:
    told: list[str] = []
    names = ["kvist", "b", "c"]
    compare([contender(tmp_path, name) for name in names], [SMALL, DEEP], 2, vocab_size=1000, report=told.append)
    log = log_of(tmp_path)
    runs = [entry for entry in log if entry["event"] == "run"]
    warm, measured = [e for e in runs if e["shape"] == [1, 16, 4]], [e for e in runs if e["shape"] != [1, 16, 4]]
    assert [entry["name"] for entry in warm] == names
    assert [entry["name"] for entry in measured] == names * 4
    assert [entry["shape"] for entry in measured] == ([[2, 8, 4]] * 3 + [[1, 20, 11]] * 3) * 2
    ids = [entry["first"] for entry in measured]
    assert all(ids[turn] == ids[turn + 1] == ids[turn + 2] for turn in (0, 3, 6, 9))
    assert len({tuple(one) for one in ids}) == 4
    assert all(set(entry["others"]) <= {"T"} for entry in runs)
    assert [len(entry["others"]) for entry in measured] == [0, 1, 2] + [2] * 9
    assert {(e["context"], e["max_seqs"], e["cold"]) for e in log if e["event"] == "load"} == {(31, 2, False)}
    assert told[0] == "round 1 of 2: small, kvist: 8.0 tokens/s"
    assert len(told) == 12


def test_figures_are_those_of_the_works(tmp_path: Path) -> None:
    result = run([contender(tmp_path, "kvist", total=2.0), contender(tmp_path, "b", total=4.0)], [SMALL, DEEP], 2)
    assert result.values == {
        ("small", "kvist"): [4.0, 4.0],
        ("small", "b"): [2.0, 2.0],
        ("deep", "kvist"): [10.0, 10.0],
        ("deep", "b"): [5.0, 5.0],
    }
    assert result.facts == {"kvist": {"version": "1.0"}, "b": {"version": "1.0"}}
    assert not result.failures
    assert figure(ALL["prefill_512"], {"total": 2.0, "after_first": None}) == 256.0


def test_medians_ratios_and_the_best_peer() -> None:
    works = (ALL["decode_1"], ALL["start"], ALL["out_8"])
    contenders = tuple(Contender(name, (), Path(), {}) for name in ("kvist", "b", "c"))
    values = {
        ("decode_1", "kvist"): [100.0, 300.0, 200.0],
        ("decode_1", "b"): [80.0, 10.0, 90.0],
        ("decode_1", "c"): [50.0, 100.0, 500.0],
        ("start", "kvist"): [200.0],
        ("start", "b"): [50.0],
        ("start", "c"): [800.0],
        ("out_8", "b"): [7.0],
    }
    decode, start, out = summarize(Comparison(works, contenders, values))
    assert decode["medians"] == {"kvist": 200.0, "b": 80.0, "c": 100.0}
    assert (decode["best_peer"], decode["ratio_to_best"], decode["ratios"]) == ("c", 2.0, {"c": 2.0, "b": 2.5})
    assert (start["best_peer"], start["ratio_to_best"], start["ratios"]) == ("b", 0.25, {"b": 0.25, "c": 4.0})
    assert (start["unit"], start["lower_is_better"]) == ("ms", True)
    assert (out["best_peer"], out["ratio_to_best"], out["ratios"]) == ("b", None, {})


def test_a_start_takes_a_new_process_each_time_and_one_before_that_does_not_count(tmp_path: Path) -> None:
    start, memory = FRESH_WORKS
    result = run([contender(tmp_path, "kvist"), contender(tmp_path, "b")], [start, memory], 2)
    assert {key: len(values) for key, values in result.values.items()} == {
        ("start", "kvist"): 2, ("start", "b"): 2, ("memory_2048", "kvist"): 2, ("memory_2048", "b"): 2,
    }  # fmt: skip
    loads = [(entry["name"], entry["context"], entry["cold"]) for entry in log_of(tmp_path) if entry["event"] == "load"]
    one = [("kvist", 17, True), ("b", 17, True)]
    assert loads == one + [*one, ("kvist", 2048, True), ("b", 2048, True)] * 2
    assert all(3 < value < 500 for value in result.values["memory_2048", "b"])
    assert all(value > 1 for value in result.values["start", "b"])
    gone(pids_of(tmp_path))


def running(pid: int) -> bool:
    """Whether the process is more than an entry that nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int]) -> None:
    assert pids
    end = time.monotonic() + 10.0
    while any(running(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("fail", "reason"),
    [("load", "ValueError: no such weights"), ("load-exit", "its process ended with status 1: out of memory")],
)
def test_an_engine_that_does_not_start_is_named_once_and_the_others_run(tmp_path: Path, fail: str, reason: str) -> None:
    result = run([contender(tmp_path, "kvist"), contender(tmp_path, "b", fail=fail), contender(tmp_path, "c")], [SMALL, DEEP], 2)
    assert result.failures == [Failure("b", None, reason)]
    assert {name for _, name in result.values} == {"kvist", "c"}
    assert {len(values) for values in result.values.values()} == {2}


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        ("error", "RuntimeError: cannot do this one"),
        ("exit", "its process ended with status 3: last words"),
        ("killed", "its process was ended by SIGKILL: a library's greeting"),
        ("hang", "it took more than 3 seconds"),
        ("short", "a request made 1 of 4 tokens"),
    ],
)
def test_a_work_that_fails_is_named_once_and_the_next_one_has_a_new_process(tmp_path: Path, fail: str, reason: str) -> None:
    engines = [contender(tmp_path, "kvist"), contender(tmp_path, "b", fail=fail, fail_on=8, child=True)]
    result = run(engines, [SMALL, DEEP], 2, timeout=3.0 if fail == "hang" else 60.0)
    assert result.failures == [Failure("b", "small", reason)]
    assert {key: len(values) for key, values in result.values.items()} == {
        ("small", "kvist"): 2, ("deep", "kvist"): 2, ("deep", "b"): 2,
    }  # fmt: skip
    assert [entry["name"] for entry in log_of(tmp_path) if entry["event"] == "load"] == ["kvist", "b", "b"]
    gone(pids_of(tmp_path))


def test_decoding_cannot_be_told_without_the_time_of_the_first_token(tmp_path: Path) -> None:
    result = run([contender(tmp_path, "kvist"), contender(tmp_path, "b", fail="untimed")], [SMALL, DEEP])
    assert result.failures == [Failure("b", "deep", "it did not tell when the first token came")]
    assert result.values["small", "b"] == [8.0]


def test_an_interrupt_leaves_what_was_measured_and_no_process(tmp_path: Path) -> None:
    told: list[str] = []

    def report(message: str) -> None:
        told.append(message)
        if len(told) == 5:
            raise KeyboardInterrupt

    result = compare([contender(tmp_path, "kvist"), contender(tmp_path, "b")], [SMALL], 9, vocab_size=1000, report=report)
    assert result.interrupted
    assert {name: len(values) for (_, name), values in result.values.items()} == {"kvist": 3, "b": 2}
    gone(pids_of(tmp_path))


def test_a_program_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    missing = Contender("b", ("/nowhere/python",), tmp_path / "driver.py", {})
    with pytest.raises(SessionError, match=r"/nowhere/python cannot be run: No such file"):
        Session.start(missing, context=1, max_seqs=1, cold=False, timeout=5.0)


def test_what_is_no_json_is_a_reason(tmp_path: Path) -> None:
    babbler = tmp_path / "babble.py"
    babbler.write_text("print('hello')\n", encoding="utf-8")
    with pytest.raises(SessionError, match="which is no JSON"):
        Session.start(Contender("b", (*own_python(), str(babbler)), babbler, {}), context=1, max_seqs=1, cold=False, timeout=30.0)


def test_the_works_of_a_comparison_include_those_of_a_fresh_process() -> None:
    assert [work.name for work in choose_works("start, out_8", (*WORKS, *FRESH_WORKS))] == ["start", "out_8"]
    with pytest.raises(UsageError, match="'start' is no work"):
        choose_works("start")
    assert ALL["memory_2048"].num_tokens == 2048
