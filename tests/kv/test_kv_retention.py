"""Pins, priorities and their time: exact outcomes at the manager, and why a prompt is missed."""

from __future__ import annotations

import pytest

from helpers.deciders import make_request, make_spec
from kvist.errors import ContextLengthError, InvalidRequestError
from kvist.kv.block import BlockHash
from kvist.kv.eviction import POLICIES
from kvist.kv.hints import KVHints
from kvist.kv.manager import KVManager
from kvist.kv.retention import MIN_DEADLINES, Retention
from kvist.kv.walks import finish, flush
from kvist.request import PrefixMiss, Request

SIZE = 4
EVERY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))


class Drive:
    """One request after the other, through a manager with blocks of four tokens."""

    def __init__(self, num_blocks: int, policy: str = "lru", pin_budget: float = 0.5, **more: object) -> None:
        spec = make_spec(block_size=SIZE)
        self.manager = KVManager(
            spec,
            num_blocks,
            watermark=0.0,
            eviction_policy=policy,
            pin_budget=pin_budget,
            **more,  # type: ignore[arg-type]
        )
        self.count = 0
        self.miss: PrefixMiss | None = None

    def open(self, prompt: list[int], *, salt: str = "", answer: tuple[int, ...] = (), **hints: object) -> Request:
        self.count += 1
        request = make_request(f"r{self.count}", prompt, len(answer), salt=salt)
        request.kv = KVHints(**hints) if hints else None  # type: ignore[arg-type]
        self.manager.add(request)
        return request

    def serve(self, prompt: list[int], **more: object) -> int:
        """Tokens found."""
        request = self.open(prompt, **more)  # type: ignore[arg-type]
        manager = self.manager
        match = manager.match(request)
        self.miss = manager.explain_miss(request, match)
        manager.attach(request, match)
        request.num_computed_tokens = match.num_tokens
        assert manager.allocate(request, request.num_tokens - match.num_tokens)
        manager.take_plan()
        manager.complete_plan()
        request.num_computed_tokens = request.num_tokens
        manager.commit(request)
        for token in more.get("answer", ()):  # type: ignore[attr-defined]
            request.output_token_ids.append(token)
            assert manager.allocate(request, 1)
            request.num_computed_tokens += 1
            manager.commit(request)
        manager.free(request)
        manager.check_invariants()
        return match.num_tokens


def prompt(name: int, blocks: int = 3) -> list[int]:
    return [name] * (SIZE * blocks + 1)


@EVERY_POLICY
def test_pinned_blocks_outlive_any_stream_and_give_way_when_unpinned(policy: str) -> None:
    drive = Drive(12, policy)
    drive.serve(prompt(1), pin=True)
    assert drive.manager.num_pinned_blocks == 3
    for name in range(2, 30):
        assert drive.serve(prompt(name)) == 0
    assert drive.serve(prompt(1)) == 12
    root, hashes = drive.manager.hashes_of(prompt(1), "")
    assert drive.manager.keeper.withdraw(root, drive.manager.cached(hashes)) == 3
    assert drive.manager.num_free_blocks == 12
    for name in range(40, 90):
        drive.serve(prompt(name))
    assert drive.serve(prompt(1)) == 0


@EVERY_POLICY
def test_a_pin_and_a_priority_lapse_with_their_time(policy: str) -> None:
    drive = Drive(12, policy)
    drive.manager.advance(100.0)
    drive.serve(prompt(1), pin=True, ttl=60.0)
    drive.serve(prompt(2), priority=90, ttl=30.0)
    drive.manager.advance(129.0)
    for name in range(3, 9):
        drive.serve(prompt(name, 2))
    assert (drive.serve(prompt(1)), drive.serve(prompt(2))) == (12, 12)
    drive.manager.advance(160.0)
    assert (drive.manager.num_pinned_blocks, drive.manager.num_free_blocks) == (0, 12)
    drive.manager.check_invariants()
    for name in range(50, 120):
        drive.serve(prompt(name))
    assert drive.serve(prompt(1)) == 0
    assert drive.miss is not None
    assert (drive.miss.reason, drive.miss.position) == ("expired", 0)


@EVERY_POLICY
def test_a_claim_that_lapsed_is_told_of_the_block_that_took_the_place_of_the_claimed_one(policy: str) -> None:
    """A prompt of whole blocks is found but for its last token, so who repeats it computes a second block of that content."""
    drive = Drive(8, policy)
    drive.serve([1] * SIZE, priority=80, ttl=5.0)
    drive.manager.advance(6.0)
    first = drive.manager.find([1] * (SIZE + 1), "").block_ids[0][0]
    assert drive.serve([1] * SIZE) == SIZE - 1
    assert drive.manager.find([1] * (SIZE + 1), "").block_ids[0][0] != first
    for name in range(2, 40):
        drive.serve(prompt(name))
    assert drive.serve([1] * (SIZE + 1)) == 0
    assert drive.miss is not None
    assert drive.miss.reason == "expired"


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize("rest", [0, 1])
def test_a_claim_covers_every_whole_block_of_the_prompt(prompt_logprobs: int | None, rest: int) -> None:
    """Also the one that ends with it, and those of a prompt for which nothing is looked up."""
    manager = KVManager(make_spec(block_size=SIZE), 12, watermark=0.0)
    request = make_request("a", [1] * (3 * SIZE + rest), prompt_logprobs=prompt_logprobs, kv=KVHints(priority=80))
    manager.add(request)
    manager.attach(request, manager.match(request))
    assert manager.allocate(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.commit(request)
    assert manager.keeper.retention.raised_blocks() == [0, 1, 2]


@EVERY_POLICY
def test_lower_priorities_are_evicted_first(policy: str) -> None:
    drive = Drive(12, policy)
    drive.serve(prompt(2), priority=80)
    drive.serve(prompt(3))
    drive.serve(prompt(1), priority=10)
    drive.serve(prompt(4))
    assert [drive.manager.match(drive.open(prompt(name))).num_tokens for name in (1, 2, 3, 4)] == [8, 12, 12, 12]
    drive.serve(prompt(5))
    assert [drive.manager.match(drive.open(prompt(name))).num_tokens for name in (1, 2)] == [0, 12]


def test_of_two_claims_the_stronger_holds_and_the_weaker_stays_after_it() -> None:
    drive = Drive(12)
    drive.serve(prompt(1), priority=70)
    drive.serve(prompt(1), pin=True, ttl=10.0)
    retention = drive.manager.keeper.retention
    assert (drive.manager.num_pinned_blocks, retention.priority(0), retention.deadline(0)) == (3, 70, None)
    drive.manager.advance(10.0)
    assert (drive.manager.num_pinned_blocks, retention.priority(0)) == (0, 70)
    drive.manager.check_invariants()


def test_a_wish_that_is_repeated_is_kept_once() -> None:
    """Every turn of a conversation asks for the same again; neither the books of a block nor those of deadlines grow with it."""
    drive = Drive(12)
    retention = drive.manager.keeper.retention
    for turn in range(200):
        drive.manager.advance(float(turn))
        drive.serve(prompt(1), pin=True, ttl=1000.0)
        drive.serve(prompt(1, 2), pin=True, ttl=50.0 - turn / 100)
        drive.serve([1, 1], pin=True, ttl=1000.0)
    assert [len(standing.claims) for standing in retention.by_block.values()] == [1, 1, 1]
    assert len(retention.deadlines) <= MIN_DEADLINES
    assert retention.deadline(0) == 1199.0
    drive.serve(prompt(1), priority=70, ttl=10.0)
    drive.serve(prompt(1, 2), pin=True, priority=60)
    assert [len(standing.claims) for standing in retention.by_block.values()] == [3, 3, 2], "none of these does what another does"
    drive.manager.advance(1199.0)
    assert (drive.manager.num_pinned_blocks, retention.deadline(0), retention.priority(0)) == (2, None, 60)
    drive.manager.check_invariants()


def test_the_budget_is_enforced_when_a_request_is_queued() -> None:
    drive = Drive(12, pin_budget=0.5)
    first = drive.open(prompt(1, 4), pin=True)
    assert drive.manager.pins.num_taken == 4
    with pytest.raises(InvalidRequestError, match="3 blocks, and of the 6 that may be pinned 2 are left") as refused:
        drive.open(prompt(2), pin=True)
    assert refused.value.param == "kv.pin"
    drive.manager.free(first)
    assert drive.manager.pins.num_taken == 0
    drive.serve(prompt(2), pin=True)
    with pytest.raises(InvalidRequestError, match="prefix caching is off"):
        Drive(12, enable_prefix_caching=False).open(prompt(1), priority=60)


def test_what_is_pinned_or_promised_already_is_charged_once() -> None:
    drive = Drive(13, pin_budget=0.5)
    taken = drive.manager.pins
    drive.serve(prompt(1, 4), pin=True)
    same, twin = drive.open(prompt(1, 4), pin=True), drive.open(prompt(1, 4), pin=True)
    assert taken.num_taken == 4
    longer = drive.open(prompt(1, 5), pin=True)
    assert (taken.num_taken, drive.manager.num_pinned_blocks) == (5, 4)
    with pytest.raises(InvalidRequestError, match="2 blocks, and of the 6 that may be pinned 1 are left"):
        drive.open(prompt(2, 2), pin=True)
    root, hashes = drive.manager.hashes_of(prompt(1, 4), "")
    blocks = drive.manager.cached(hashes)
    taken.check_prefix(blocks)
    assert drive.manager.keeper.withdraw(root, blocks) == 4
    assert (taken.num_taken, drive.manager.num_pinned_blocks) == (5, 0), "the open requests still count on them"
    taken.check_prefix(blocks)
    drive.manager.keeper.claim(root, blocks, KVHints(pin=True))
    assert (taken.num_taken, drive.manager.num_pinned_blocks) == (5, 4)
    for request, left in ((longer, 4), (same, 4), (twin, 4)):
        drive.manager.free(request)
        assert taken.num_taken == left
    assert drive.serve(prompt(1, 6), pin=True) == 16
    assert (taken.num_taken, drive.manager.num_pinned_blocks) == (6, 6)
    drive.manager.check_invariants()


def test_of_a_pin_in_several_groups_what_is_pinned_already_is_charged_once() -> None:
    manager = KVManager(make_spec(None, None, block_size=SIZE), 24, watermark=0.0, pin_budget=0.5)
    for number in range(3):
        request = make_request(str(number), prompt(1, 5), 1)
        request.kv = KVHints(pin=True)
        manager.add(request)
        match = manager.match(request)
        manager.attach(request, match)
        request.num_computed_tokens = match.num_tokens
        assert manager.allocate(request, request.num_tokens - match.num_tokens)
        request.num_computed_tokens = request.num_tokens
        manager.commit(request)
        manager.free(request)
        assert (manager.pins.num_taken, manager.num_pinned_blocks) == (10, 10)


def test_raised_priorities_share_a_budget_and_the_oldest_give_way() -> None:
    drive = Drive(12, priority_budget=0.5)
    retention, log = drive.manager.keeper.retention, drive.manager.keeper.events
    drive.serve(prompt(1), priority=100)
    drive.serve(prompt(2), priority=60)
    assert retention.num_raised == 6
    drive.serve(prompt(3), priority=40)
    assert retention.num_raised == 6, "a lower priority takes nothing from anybody"
    drive.serve(prompt(1), priority=100)
    drive.serve(prompt(4), priority=70)
    told = [(event.kind, event.reason, len(event.block_hashes)) for event in log.since(0, 100) if event.kind == "withdrawn"]
    assert told == [("withdrawn", "priority_budget", 3)], "of the second prompt: the first was asked for again"
    assert sorted(retention.priority(block) for block in retention.raised_blocks()) == [70] * 3 + [100] * 3
    drive.serve(prompt(5, 8), priority=80)
    raised = retention.raised_blocks()
    _, hashes = drive.manager.hashes_of(prompt(5, 8), "")
    assert sorted(drive.manager.cached(hashes[:6])) == raised, "of what is larger than all of it, the beginning"
    assert retention.num_raised == 6
    drive.manager.check_invariants()


def test_no_priority_holds_the_cache_against_those_who_ask_for_nothing() -> None:
    drive = Drive(12, priority_budget=0.5)
    for name in range(1, 20):
        drive.serve(prompt(name), priority=100)
        drive.serve(prompt(99, 2))
    assert drive.serve(prompt(99, 2)) == 8
    assert drive.serve(prompt(19)) == 12
    assert [event.kind for event in drive.manager.keeper.events.since(0, 500)].count("withdrawn") > 10


def test_pins_and_open_requests_never_stand_in_each_others_way() -> None:
    drive = Drive(12, pin_budget=0.9)
    drive.serve(prompt(1, 5), pin=True)
    with pytest.raises(ContextLengthError, match="beside what is pinned there are 7"):
        drive.open(prompt(2, 7))
    big = drive.open(prompt(2, 6))
    with pytest.raises(InvalidRequestError, match="too few for a request that is open"):
        drive.open(prompt(3, 1), pin=True)
    drive.manager.free(big)
    drive.serve(prompt(3, 1), pin=True)
    assert drive.manager.num_pinned_blocks == 6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ttl": 5}, "give one of them too"),
        ({"pin": True, "ttl": 0}, "kv.ttl must be a number"),
        ({"pin": True, "ttl": float("nan")}, "kv.ttl must be a number"),
        ({"priority": 101}, "kv.priority must be a whole number"),
        ({"pin": "yes"}, "kv.pin is true or false"),
    ],
)
def test_hints_are_checked(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        KVHints(**fields)  # type: ignore[arg-type]


def test_why_a_prompt_is_missed() -> None:
    drive = Drive(8)
    drive.manager.advance(5.0)
    assert drive.serve(prompt(1)) == 0
    assert drive.miss == PrefixMiss("never_seen", 0)
    assert drive.serve(prompt(1)) == 12
    assert drive.miss == PrefixMiss("last_token", 12)
    assert drive.serve([*[1] * 8, 7, 7, 7, 7, 7]) == 8
    assert drive.miss == PrefixMiss("never_seen", 8)
    drive.manager.advance(25.0)
    drive.serve(prompt(5, 7))
    drive.manager.advance(65.0)
    assert drive.serve(prompt(1)) < 12
    assert drive.miss is not None
    assert (drive.miss.reason, drive.miss.evicted_ago) == ("evicted", 40.0)
    assert drive.serve(prompt(1), salt="other") == 0
    assert drive.miss == PrefixMiss("never_seen", 0)


def test_what_was_evicted_block_by_block_is_remembered_for_longer_than_the_pool_lasts() -> None:
    num_blocks = 1000
    drive = Drive(num_blocks)
    manager = drive.manager
    drive.serve(prompt(1, 10))
    for name in range(2, 7 * num_blocks):
        request = drive.open([name] * (SIZE + 1))
        manager.attach(request, manager.match(request))
        assert manager.allocate(request, SIZE + 1)
        request.num_computed_tokens = SIZE + 1
        manager.commit(request)
        manager.free(request)
    assert drive.serve(prompt(1, 10)) == 0
    assert drive.miss is not None
    assert drive.miss.reason == "evicted"


def test_a_rewritten_history_is_told_from_a_new_question() -> None:
    drive = Drive(40)
    turn = [1] * 10
    drive.serve(turn, answer=(5, 6, 7, 8, 9, 9, 9, 9, 9))
    assert drive.serve([*turn, 5, 6, 7, 8, 9, 9, 9, 9, 9, 2, 2, 2, 2, 2, 2]) == 19
    assert drive.miss == PrefixMiss("never_seen", 19)
    assert drive.serve([*turn, 5, 6, 0, 0, 9, 9, 9, 9, 9, 2, 2, 2, 2, 2]) == 12
    assert drive.miss == PrefixMiss("rewritten", 12)
    assert drive.serve([*turn[:5], *[3] * 12]) == 5
    assert drive.miss == PrefixMiss("never_seen", 5)


def test_events_are_numbered_bounded_and_each_tenants_own() -> None:
    drive = Drive(8)
    drive.serve(prompt(1), salt="a")
    drive.serve(prompt(2), salt="b")
    drive.serve(prompt(3, 5), salt="a")
    log = drive.manager.keeper.events
    found = log.since(0, 100)
    assert [event.number for event in found] == list(range(log.next_number))
    assert [event.kind for event in found] == ["stored", "stored", "removed", "removed", "stored"]
    owner, (other, _) = drive.manager.hashes_of((), "b")[0], drive.manager.hashes_of((), "a")
    assert [(event.reason, len(event.of(other)), len(event.of(owner))) for event in found[2:4]] == [
        ("evicted", 3, 0),
        ("evicted", 0, 1),
    ]
    assert found[0].of(owner) == []
    assert found[1].of(owner) == list(found[1].block_hashes)
    assert [event.number for event in log.since(2, 1)] == [2]
    assert log.since(99, 5) == []


def test_flush_forgets_what_nobody_holds_of_one_owner() -> None:
    drive = Drive(20)
    drive.serve(prompt(1), salt="a", pin=True)
    drive.serve(prompt(2), salt="a")
    drive.serve(prompt(3), salt="b")
    root, _ = drive.manager.hashes_of((), "a")
    assert finish(flush(drive.manager.index, drive.manager.keeper, root)) == 3
    drive.manager.check_invariants()
    assert drive.serve(prompt(1), salt="a") == 12
    assert drive.serve(prompt(2), salt="a") == 0
    assert drive.serve(prompt(3), salt="b") == 12
    assert finish(flush(drive.manager.index, drive.manager.keeper, None)) == 6


def test_an_event_has_the_time_at_which_its_blocks_were_computed() -> None:
    """However late somebody asks."""
    drive = Drive(12)
    request = drive.open(prompt(1))
    drive.manager.advance(5.0)
    assert drive.manager.allocate(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    drive.manager.commit(request)
    drive.manager.advance(60.0)
    (event,) = drive.manager.keeper.events.since(0, 9)
    assert (event.kind, event.time, len(event.block_hashes)) == ("stored", 5.0, 3)


def test_claims_that_are_repeated_at_once_keep_their_order() -> None:
    """Who gives way first is the same in every process."""
    owner, retention = BlockHash(bytes(32)), Retention(0, 40)
    for end in range(2, 40):
        retention.claim(owner, [0, 1, end], 60, False, float(end))
    retention.claim(owner, [0, 1], 60, False, 1.0)
    assert [claim.deadline for claim in retention._raising] == [float(end) for end in range(2, 40)]
    retention.check_invariants()
