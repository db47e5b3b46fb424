"""A pretended KV arena and a pretended engine, for tests of the deciders without a model.

Each slot of the arena holds a fingerprint of (group, salt, all tokens up to its position), which is what real keys and values
depend on. A step first checks that every key it reads is the right one, as it was before the step, and then writes its own rows: so
the tests notice any block that is reused too early, shared before it was computed, or let go while a row still reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvist.kv.hints import KVHints
from kvist.kv.kinds import Sizes, make_kv_memory
from kvist.kv.manager import KVManager
from kvist.kv.memory import MemoryPlan
from kvist.kv.spec import KVGroup, KVSpec
from kvist.request import Request, SamplingParams
from kvist.sched.output import SchedulerOutput
from kvist.sched.policy import Policy
from kvist.sched.prefetch import Prefetcher
from kvist.sched.scheduler import Scheduler

PAGE = 96
"""Bytes of a pretended memory page: neither a multiple nor a part of the blocks of these tests."""


def make_spec(*windows: int | None, block_size: int = 16) -> KVSpec:
    groups = tuple(KVGroup((layer,), window) for layer, window in enumerate(windows or (None,)))
    return KVSpec(num_kv_heads=1, head_dim=8, kv_format="bf16", block_size=block_size, groups=groups)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    *,
    salt: str = "",
    prompt_logprobs: int | None = None,
    priority: int = 0,
    wants_events: bool = False,
    kv: KVHints | None = None,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    return Request(
        request_id, list(prompt), params, max_tokens, cache_salt=salt, priority=priority, wants_events=wants_events, kv=kv
    )


class Arena:
    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        self.spec = spec
        self.slots: list[list[int | None]] = [[None] * spec.block_size for _ in range(num_blocks)]
        self._chains: dict[int, tuple[Request, list[int]]] = {}

    def fingerprints(self, request: Request) -> list[int]:
        """One number per token so far; equal only for equal salts and equal beginnings."""
        _, chain = self._chains.setdefault(id(request), (request, [hash(request.cache_salt)]))
        for token_id in request.token_ids(len(chain) - 1, request.num_tokens):
            chain.append(hash((chain[-1], token_id)))
        return chain[1:]

    def read(self, request: Request, tables: Sequence[Sequence[int]], start: int, stop: int) -> None:
        """Assert that the keys before `start` which the rows [start, stop) read are this request's."""
        marks, size = self.fingerprints(request), self.spec.block_size
        for group, (table, layers) in enumerate(zip(tables, self.spec.groups, strict=True)):
            assert len(table) * size >= stop
            first = 0 if layers.window is None else max(0, start - layers.window + 1)
            for position in range(first, start):
                assert self.slots[table[position // size]][position % size] == hash((group, marks[position]))

    def write(self, request: Request, tables: Sequence[Sequence[int]], start: int, stop: int) -> set[tuple[int, int]]:
        marks, size = self.fingerprints(request), self.spec.block_size
        written = set()
        for group, table in enumerate(tables):
            for position in range(start, stop):
                slot = (table[position // size], position % size)
                self.slots[slot[0]][slot[1]] = hash((group, marks[position]))
                written.add(slot)
        assert len(written) == len(tables) * (stop - start), "rows of one request share a slot"
        return written

    def carry_out(self, plan: MemoryPlan) -> None:
        """Blocks that a released range touches hold nothing any more; copies come after that."""
        for start, stop in plan.releases:
            assert start % PAGE == stop % PAGE == 0
            for block_id in range(start // self.spec.block_bytes, -(-stop // self.spec.block_bytes)):
                self.slots[block_id] = [None] * self.spec.block_size
        for source, destination in plan.copies:
            self.slots[destination] = list(self.slots[source])

    def run(self, requests: dict[str, Request], output: SchedulerOutput) -> dict[str, int]:
        """Compute a step; the sampled tokens depend on nothing but the request's own tokens."""
        self.carry_out(output.memory)
        rows = [(requests[item.request_id], item, item.start + len(item.token_ids)) for item in output.scheduled]
        for request, item, stop in rows:
            assert item.start == request.num_computed_tokens
            assert item.token_ids == request.token_ids(item.start, stop)
            self.read(request, item.block_tables, item.start, stop)
        written: set[tuple[int, int]] = set()
        for request, item, stop in rows:
            own = self.write(request, item.block_tables, item.start, stop)
            assert not own & written, "two requests write to one slot"
            written |= own
        drawing = [requests[name] for _, item, _ in rows if item.samples for name in (item.request_id, *item.forks)]
        return {request.request_id: self.fingerprints(request)[-1] % 50 for request in drawing}


class Sim:
    """An engine without a model: ends requests at their budget, and keeps every step's output."""

    def __init__(
        self,
        *windows: int | None,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 4096,
        enable_prefix_caching: bool = True,
        use_cache: bool = True,
        watermark: float = 0.0,
        policy: Policy | None = None,
        allocator: str = "paged",
        prefetcher: Callable[[KVManager], Prefetcher] | None = None,
    ) -> None:
        self.spec = make_spec(*windows, block_size=block_size)
        self.manager, num_ids = make_kv_memory(
            allocator,
            self.spec,
            Sizes(num_blocks, max_model_len, max_num_seqs, PAGE),
            enable_prefix_caching=enable_prefix_caching and allocator != "contiguous",
            watermark=watermark,
            tiered=prefetcher is not None,
        )
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            use_cache=use_cache,
            policy=policy,
            prefetcher=None if prefetcher is None else prefetcher(self.manager),
        )
        self.arena = Arena(self.spec, num_ids)
        self.requests: dict[str, Request] = {}
        self.outputs: list[SchedulerOutput] = []
        self.now = 0.0

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **more: object) -> Request:
        request = make_request(request_id, prompt, max_tokens, **more)  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.requests[request_id] = request
        return request

    def add_choices(self, request_id: str, prompt: Sequence[int], count: int, max_tokens: int = 4, **more: object) -> list[Request]:
        """As many requests of one prompt, as the choices of a user's request are."""
        choices = [make_request(f"{request_id}#{choice}", prompt, max_tokens, **more) for choice in range(count)]  # type: ignore[arg-type]
        for choice in choices:
            choice.prompt_token_ids = choices[0].prompt_token_ids
            self.scheduler.add(choice)
            self.requests[choice.request_id] = choice
        return choices

    def step(self, between: Callable[[], None] | None = None) -> SchedulerOutput:
        """One step. `between` runs after `schedule` and before `update`."""
        self.now += 1.0
        output = self.scheduler.schedule(self.now)
        self.outputs.append(output)
        sampled = self.arena.run(self.requests, output)
        if between is not None:
            between()
        self.scheduler.update(output, sampled)
        for name in [name for item in output.scheduled for name in (item.request_id, *item.forks)]:
            request = self.requests[name]
            scored = request.max_tokens == 0 and request.num_computed_tokens == request.num_tokens
            if not request.finished and (scored or len(request.output_token_ids) == request.max_tokens > 0):
                self.scheduler.finish(name, "length")
        return output

    def end(self, request_id: str) -> None:
        assert self.scheduler.abort(request_id)

    def run(self, limit: int = 100_000, *, check: bool = True) -> None:
        """Until nothing is left; every step schedules something."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            assert not self.step().empty, "a step without rows while requests wait"
            if check:
                self.scheduler.check_invariants()
        raise AssertionError(f"still working after {limit} steps")

    def generate(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **more: object) -> Request:
        request = self.add(request_id, prompt, max_tokens, **more)
        self.run()
        return request

    def rows(self, output: SchedulerOutput) -> dict[str, tuple[int, int]]:
        """(first position, number of rows) of each scheduled request, in the order of the batch."""
        return {item.request_id: (item.start, len(item.token_ids)) for item in output.scheduled}
