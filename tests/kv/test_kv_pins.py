"""Whatever is pinned: who is queued finishes, and who is refused leaves nothing behind."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.deciders import Sim, make_request
from kvist.errors import ContextLengthError, InvalidRequestError
from kvist.kv.hints import KVHints
from kvist.kv.manager import KVManager
from kvist.request import Request

SIZE = 4
PIN = KVHints(pin=True)


class PinsMachine(RuleBasedStateMachine):
    """Few blocks, prompts that begin alike, so that pins are of others' blocks, and choices that end before others."""

    windows: ClassVar[tuple[int | None, ...]] = (None,)
    num_blocks: ClassVar[int] = 8
    pin_budget: ClassVar[int] = 4

    def __init__(self) -> None:
        super().__init__()
        self.sim = Sim(*self.windows, num_blocks=self.num_blocks, block_size=SIZE, max_num_batched_tokens=9, max_num_seqs=4)
        assert isinstance(self.sim.manager, KVManager)
        self.manager = self.sim.manager
        self.manager.keeper.retention.pin_budget = self.pin_budget
        self.count = 0

    @property
    def open(self) -> list[Request]:
        return [request for request in self.sim.requests.values() if not request.finished]

    @precondition(lambda self: len(self.open) < 5)
    @rule(
        length=st.integers(1, 14),
        last=st.integers(0, 1),
        max_tokens=st.integers(1, 30),
        choices=st.integers(1, 3),
        scored=st.booleans(),
        kv=st.sampled_from([None, PIN, PIN, KVHints(pin=True, ttl=4.0)]),
        cut=st.booleans(),
    )
    def add(self, length: int, last: int, max_tokens: int, choices: int, scored: bool, kv: KVHints | None, cut: bool) -> None:
        self.count += 1
        prompt = [*range(length), last]
        name = f"r{self.count}"
        # Of a request that asks for all, what fits, as the engine does; or what others leave, as if it pinned nothing.
        pledged = self.manager.num_pledged_blocks(prompt, "") if kv and cut else self.manager.num_pledged_blocks()
        fits = self.sim.spec.max_request_tokens(self.num_blocks - pledged, len(prompt) + max_tokens) - len(prompt)
        more = {"prompt_logprobs": 0 if scored else None}
        try:
            self.sim.add(f"{name}#0", prompt, max(1, fits), kv=kv, **more)
        except (InvalidRequestError, ContextLengthError):
            assert f"{name}#0" not in self.manager.request_ids
            return
        for choice in range(1, choices):
            request = make_request(f"{name}#{choice}", prompt, max(1, fits), **more)  # type: ignore[arg-type]
            request.prompt_token_ids = self.sim.requests[f"{name}#0"].prompt_token_ids
            self.sim.scheduler.add(request)
            self.sim.requests[request.request_id] = request

    @rule(length=st.integers(SIZE, 14))
    def pin(self, length: int) -> None:
        self.claim([*range(length)])

    @precondition(lambda self: self.sim.requests)
    @rule(data=st.data())
    def pin_all_of(self, data: st.DataObject) -> None:
        request = self.sim.requests[data.draw(st.sampled_from(sorted(self.sim.requests)))]
        self.claim(request.token_ids(0, request.num_computed_tokens))

    def claim(self, token_ids: list[int]) -> None:
        root, hashes = self.manager.hashes_of(token_ids, "")
        blocks = self.manager.cached(hashes)
        in_force = all(self.manager.keeper.retention.is_pinned(block_id) for block_id in blocks)
        try:
            self.manager.pins.check_prefix(blocks)
        except InvalidRequestError:
            assert not in_force, "what is pinned already asks for nothing"
            return
        self.manager.keeper.claim(root, blocks, PIN)

    @rule(length=st.integers(SIZE, 14))
    def unpin(self, length: int) -> None:
        root, hashes = self.manager.hashes_of(range(length), "")
        self.manager.keeper.withdraw(root, self.manager.cached(hashes))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.sim.end(data.draw(st.sampled_from(sorted(request.request_id for request in self.open))))

    @precondition(lambda self: len(self.open) < 4)
    @rule(length=st.integers(1, 14), max_tokens=st.integers(2, 3), other=st.integers(SIZE, 14))
    def end_one_of_two_behind_the_prompt(self, length: int, max_tokens: int, other: int) -> None:
        """Then pin: the other choice may hold all that the pins leave."""
        self.add(length, 1, max_tokens, 2, False, None, False)
        name = f"r{self.count}#0"
        while name in self.sim.requests and not self.sim.requests[name].output_token_ids:
            assert not self.sim.step().empty
        if name in self.sim.requests and not self.sim.requests[name].finished:
            self.sim.end(name)
        self.pin(other)

    @precondition(lambda self: self.sim.scheduler.has_work)
    @rule(steps=st.integers(1, 6))
    def work(self, steps: int) -> None:
        for _ in range(steps):
            if self.sim.scheduler.has_work:
                assert not self.sim.step().empty, "the oldest request can go on"

    @invariant()
    def every_open_request_fits_beside_the_pins(self) -> None:
        taken = self.manager.pins.num_taken
        assert self.manager.num_pinned_blocks <= taken <= self.pin_budget
        for request in self.open:
            assert self.sim.spec.request_blocks(request.num_prompt_tokens + request.max_tokens) <= self.num_blocks - taken
        self.sim.scheduler.check_invariants()

    def teardown(self) -> None:
        self.sim.run()


class WindowedPinsMachine(PinsMachine):
    windows: ClassVar[tuple[int | None, ...]] = (None, 6)
    num_blocks: ClassVar[int] = 14
    pin_budget: ClassVar[int] = 8


class AllWindowedPinsMachine(PinsMachine):
    windows: ClassVar[tuple[int | None, ...]] = (9, 5)
    num_blocks: ClassVar[int] = 12
    pin_budget: ClassVar[int] = 6


TestPins = PinsMachine.TestCase
TestWindowedPins = WindowedPinsMachine.TestCase
TestAllWindowedPins = AllWindowedPinsMachine.TestCase
for case in (TestPins, TestWindowedPins, TestAllWindowedPins):
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def pinned_sim(*windows: int | None, num_blocks: int, pin_budget: int) -> tuple[Sim, KVManager]:
    sim = Sim(*windows, num_blocks=num_blocks, block_size=SIZE)
    assert isinstance(sim.manager, KVManager)
    sim.manager.keeper.retention.pin_budget = pin_budget
    return sim, sim.manager


def test_who_pins_the_blocks_of_another_finishes_beside_them() -> None:
    """Its last whole block is the second of its content, so it holds five where its pin holds one more."""
    sim, manager = pinned_sim(num_blocks=8, pin_budget=4)
    sim.add("first", range(8), 16)
    sim.step()
    with pytest.raises(ContextLengthError, match=r"needs 7 blocks .* there are 6"):
        sim.add("pins", range(8), 17, kv=PIN)
    second = sim.add("pins", range(8), 16, kv=PIN)
    sim.run()
    assert (len(second.output_token_ids), manager.num_pinned_blocks) == (16, 2)


def test_who_pins_what_its_windows_let_go_of_finishes_beside_it() -> None:
    sim, manager = pinned_sim(None, 6, num_blocks=14, pin_budget=8)
    with pytest.raises(ContextLengthError, match="its own prompt too"):
        sim.add("pins", range(16), 13, kv=PIN)
    assert manager.num_pledged_blocks() == 0
    # The windowed group holds three blocks at most: six blocks in all for 3 * SIZE tokens.
    request = sim.add("pins", range(8), 16, kv=PIN)
    sim.run()
    assert (len(request.output_token_ids), manager.num_pinned_blocks) == (16, 4)


def test_the_last_holder_of_a_block_that_is_not_full_goes_on_in_it() -> None:
    """Another choice ends right behind the prompt, and the last spare block is pinned: there is none to copy to."""
    sim, manager = pinned_sim(num_blocks=4, pin_budget=1)
    sim.generate("other", range(50, 54), 1)
    choices = sim.add_choices("r", range(10), 2, 2)
    sim.step()
    sim.end("r#0")
    root, hashes = manager.hashes_of(range(50, 54), "")
    blocks = manager.cached(hashes)
    manager.pins.check_prefix(blocks)
    manager.keeper.claim(root, blocks, PIN)
    assert manager.num_free_blocks == 0
    sim.run()
    assert len(choices[1].output_token_ids) == 2


def test_a_pin_in_force_can_be_repeated_where_no_other_fits() -> None:
    sim, manager = pinned_sim(num_blocks=8, pin_budget=4)
    sim.add("pins", range(8), 16, kv=PIN)
    sim.step()
    sim.add("fills", range(8), 16, kv=PIN)
    with pytest.raises(InvalidRequestError, match="asks for 1 blocks, which would leave too few for a request that is open"):
        sim.add("more", range(12), 1, kv=PIN)
    _, hashes = manager.hashes_of(range(8), "")
    manager.pins.check_prefix(manager.cached(hashes))
    sim.run()


def test_what_fails_while_a_request_is_added_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    for place in ("kvist.kv.trails.Trails.open", "kvist.sched.scheduler.Job"):
        sim, manager = pinned_sim(num_blocks=8, pin_budget=4)
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            with pytest.raises(MemoryError):
                sim.add("pins", range(8), 4, kv=PIN)
        assert (manager.num_pledged_blocks(), manager.request_ids) == (0, frozenset())
        sim.scheduler.check_invariants()
        assert len(sim.generate("pins", range(8), 4, kv=PIN).output_token_ids) == 4
