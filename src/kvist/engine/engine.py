"""The core loop: requests in, one step at a time, deltas out. Single-threaded; whoever calls it owns the thread.

It joins deciders (scheduler, KV manager) and computers (runner, sampler) and decides only when a choice is over. It knows no HTTP,
no event loop and no files. Invariants:

* `n` choices of a request are `n` scheduler requests, named "{request id}#{choice}"; each gets exactly one last delta;
* a fault in a step ends the requests of that step with finish reason "error" and frees their blocks; the others go on. What is
  done for one request alone (sampling, scores, text) ends that one only;
* `snapshot()` is frozen and complete: nobody outside reads the deciders.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from kvist.config import EngineConfig, EngineOptions
from kvist.engine.admission import check_request
from kvist.engine.batch import BatchBuilder
from kvist.engine.drawing import Choice, Drawing
from kvist.engine.forms import Forms
from kvist.engine.loader import Loaded, load
from kvist.engine.output import ChoiceOutput
from kvist.engine.runner import Runner
from kvist.engine.sampler import Biases, Failure, Note, SamplingState, failure
from kvist.engine.snapshot import Counters, EngineSnapshot
from kvist.errors import InvalidRequestError
from kvist.kv.hints import KVHints
from kvist.kv.memory import NO_PLAN
from kvist.request import (
    STRUCTURED_OUTPUTS,
    FinishReason,
    OutputDelta,
    Request,
    SamplingParams,
    TokenLogprob,
    prompt_sources,
)
from kvist.sched.output import SchedulerOutput
from kvist.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from kvist.engine.kv_view import KVView
    from kvist.text.grammar import Grammar

FULLY_CHECKED_BLOCKS = 4096
"""A full check walks the pool; of a larger one only the count of free blocks is checked, so that the next request need not wait."""


class Engine:
    """`add_request`, then `step` while `has_work`. `clock` gives seconds that never go back."""

    def __init__(self, loaded: Loaded, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._loaded = loaded
        self.config: EngineConfig = loaded.config
        self.tokenizer = loaded.tokenizer
        self.chat_template = loaded.chat_template
        spec = loaded.config.spec
        self.runner = Runner(loaded.model, BatchBuilder(spec.block_size, len(spec.groups)))
        config = loaded.config
        self.manager = loaded.manager
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            use_cache=config.use_cache,
            prefetcher=None if loaded.tiers is None else loaded.tiers.prefetcher,
        )
        self._tiers = loaded.tiers
        self._eos = self.tokenizer.eos_token_ids | set(config.model.eos_token_ids)
        self.forms = Forms(self.tokenizer, config.model.vocab_size, self._eos, config.num_threads)
        self._clock = clock
        self._seeds = random.Random(config.seed)
        self._choices: dict[str, Choice] = {}
        self._drawing = Drawing(loaded.ops, self.forms, self._choices)
        self._biases: WeakValueDictionary[int, Biases] = WeakValueDictionary()
        """By the identity of the parameters, which requests for many prompts share, and which they keep alive."""
        self._requests: dict[str, set[str]] = {}
        self._pending: list[OutputDelta] = []
        self._counters = Counters()

    @classmethod
    def from_options(cls, options: EngineOptions, *, report: Callable[[str], None] | None = None) -> Engine:
        """Load the model (pulling and packing it when needed) and size the pool. `report` gets sentences for the user."""
        return cls(load(options, report=report))

    @cached_property
    def kv(self) -> KVView:
        """What people ask about KV memory; loaded with the first question."""
        from kvist.engine.kv_view import KVView

        return KVView(self.manager, self.config, self.scheduler.preemptions, self.scheduler.account)

    @property
    def has_work(self) -> bool:
        """A tier that fills blocks is work too: nobody else would take them back from it."""
        return bool(self._choices or self._pending or (self._tiers and self._tiers.num_restoring))

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        cache_salt: str = "",
        priority: int = 0,
        wants_events: bool = False,
        grammar: Grammar | None = None,
        kv: KVHints | None = None,
    ) -> None:
        """Queue a request; `grammar` is the form of its output where that has been compiled already. Raises InvalidRequestError or
        ContextLengthError; whatever it raises, nothing has changed then."""
        if request_id in self._requests or any(delta.request_id == request_id for delta in self._pending):
            raise InvalidRequestError(f"A request named {request_id!r} is already running; choose another id.", param="request_id")
        max_tokens = check_request(self.config, prompt_token_ids, params)
        # A pin whose time is up, perhaps long since, is in nobody's way.
        self.manager.advance(self._clock())
        if params.max_tokens is None:
            max_tokens = self._beside_pins(prompt_token_ids, max_tokens, cache_salt if kv and kv.pin else None)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        arrival = self._clock() if arrival_time is None else arrival_time
        grammar = grammar or self.forms.compile(params)
        prompt = list(prompt_token_ids)
        choices: dict[str, Choice] = {}
        biases = self._biases.setdefault(id(params), Biases(params))
        sampling: SamplingState | None = None
        for index in range(params.n):
            request = Request(
                request_id=f"{request_id}#{index}",
                prompt_token_ids=prompt,
                sampling_params=params,
                max_tokens=max_tokens,
                eos_token_ids=self._eos,
                seed=seed,
                choice=index,
                arrival_time=arrival,
                cache_salt=cache_salt,
                priority=priority,
                wants_events=wants_events,
                kv=kv if index == 0 else None,
            )
            output = ChoiceOutput.of(request_id, request, self.tokenizer)
            sampling = SamplingState.of(request, self.config.model.vocab_size, biases, sampling)
            constraint = self.forms.constrain(grammar, request)
            choices[request.request_id] = Choice(request, output, sampling, constraint)
        try:
            for choice in choices.values():
                self.scheduler.add(choice.request)
        except BaseException:
            for choice_id in choices:
                self.scheduler.abort(choice_id)
            raise
        self._choices |= choices
        self._requests[request_id] = set(choices)

    def _beside_pins(self, prompt_token_ids: list[int], max_tokens: int, pin_salt: str | None) -> int:
        """Of a budget that goes as far as it can, what fits beside what is pinned, and beside its own pin if it has a `pin_salt`;
        one token at least, to be refused if need be."""
        manager, num_prompt_tokens = self.manager, len(prompt_token_ids)
        pledged = manager.num_pledged_blocks() if pin_salt is None else manager.num_pledged_blocks(prompt_token_ids, pin_salt)
        if not pledged:
            return max_tokens
        config, total = self.config, num_prompt_tokens + max_tokens
        fits = config.spec.max_request_tokens(max(0, config.num_kv_blocks - pledged), total) - num_prompt_tokens
        return min(max_tokens, max(1, fits))

    def compile_form(self, params: SamplingParams) -> Grammar | None:
        """The form of a request's output, ready for `add_request`; any thread may call it. Raises InvalidRequestError."""
        return self.forms.compile(params)

    def render_chat(self, messages: list[dict[str, Any]], /, **template_options: Any) -> list[int]:
        """Token ids of a conversation by the model's own template, which writes its own special tokens; any thread may call it."""
        if self.chat_template is None:
            raise InvalidRequestError("This model has no chat template; use completions with a plain prompt.", param="messages")
        text = self.chat_template.render(messages, **template_options)
        return self.tokenizer.encode_chat(text)

    def ask_kv(self, question: str, **details: Any) -> Any:
        """What a method of `KVView`, by name, answers; between steps only. Raises InvalidRequestError."""
        from kvist.kv.walks import finish

        answer = self.begin_kv(question, **details)
        return finish(answer) if isinstance(answer, Generator) else answer

    def begin_kv(self, question: str, **details: Any) -> Any:
        """The same, or a generator that returns it in the end: steps may come between its pieces."""
        if self._tiers is not None:
            # An idle engine hears of it too.
            self._tiers.receive()
        return getattr(self.kv, question)(self._clock(), **details)

    def is_open(self, request_id: str) -> bool:
        """Whether any of a request's choices still runs."""
        return request_id in self._requests

    def abort(self, request_id: str, *, unread: bool = False) -> None:
        """End all choices of a request now. The next step returns their last deltas, unless they would be `unread`; until then the
        name is in use. Unknown ids are ignored."""
        for choice_id in sorted(self._requests.get(request_id, ())):
            self.scheduler.abort(choice_id)
            if not unread:
                self._pending.append(self._last_delta(self._choices[choice_id], "abort"))
            self._forget(choice_id)

    def step(self) -> list[OutputDelta]:
        """Compute one batch. The deltas come in the scheduler's order, those of aborted requests first."""
        deltas, self._pending = self._pending, []
        if self._tiers is not None:
            self._tiers.receive()
        if not self._choices:
            self._wait_for_tiers()
            return deltas
        counters, started = self._counters, self._clock()
        output = self.scheduler.schedule(started)
        counters.scheduler_seconds += self._clock() - started
        if output.events:
            deltas += [self._choices[event.request_id].output.tell(event) for event in output.events]
        if self._tiers is not None:
            self._tiers.send(output.restores)
        if not output.scheduled:
            self._loaded.arena.release(output.memory.releases)
            if self._wait_for_tiers():
                return deltas
            # No way to get here is known. The first in line is in it, and the others may go on without it.
            stuck = (self.scheduler.running or self.scheduler.waiting)[0].request_id
            return deltas + self._fail([stuck], "No KV memory was found for this request, though it was the only one to run.")
        try:
            if output.memory is not NO_PLAN:
                self._loaded.arena.release(output.memory.releases)
                self._loaded.arena.copy(output.memory.copies)
            batch, logits = self.runner.forward(output)
            drawn, notes = self._drawing.draw(output, logits)
            if output.scores_prompts:
                notes |= self._drawing.score_prompts(self.runner.prompt_logits(output, batch))
        except Exception as error:
            counters.failed_steps += 1
            counters.failed_in_a_row += 1
            deltas += self._fail([item.request_id for item in output.scheduled], failure(error))
        else:
            counters.failed_in_a_row = 0
            deltas += self._advance(output, drawn, notes)
        seconds = self._clock() - started
        counters.note_step(seconds, output)
        if self._tiers is not None:
            self._tiers.send()
            self._tiers.measured(output.num_batched_tokens, seconds)
        return deltas

    def _wait_for_tiers(self) -> bool:
        """Nothing can be computed: wait a moment for blocks that are on their way; False if there are none."""
        if self._tiers is None or not self._tiers.num_restoring:
            return False
        self._tiers.wait()
        return True

    def rest(self) -> float | None:
        """Without work, end what is to be kept no longer, and hear what the tier has written. Returns after how many seconds there
        is more of that; None: never."""
        now = self._clock()
        deadline = self.manager.advance(now)
        if self._tiers is not None:
            deadline = min(deadline, now + self._tiers.rest())
        return None if deadline == inf else deadline - now

    def drop_pending(self) -> None:
        """Forget the last deltas of aborted requests that nobody will read."""
        self._pending.clear()

    def close(self) -> None:
        """Give the KV memory back; the engine must not be used afterwards."""
        self.close_tiers()
        self._loaded.arena.close()

    def close_tiers(self) -> None:
        """Bring what was computed to the disk, and give its folder free. No step may follow. Twice is harmless."""
        if self._tiers is not None:
            self._tiers.close()

    def check_idle(self) -> None:
        """With no request open every block must be free again; deciders of small pools check all they know. Asserts. Memory that is
        to go back to the system goes."""
        assert not self._choices
        assert self.manager.num_free_blocks + self.manager.num_pinned_blocks == self.config.num_kv_blocks
        self._loaded.arena.release(self.manager.take_plan().releases)
        if self.config.num_kv_blocks <= FULLY_CHECKED_BLOCKS:
            self.scheduler.check_invariants()

    def snapshot(self) -> EngineSnapshot:
        stats, counters, account = self.scheduler.stats(), self._counters, self.scheduler.account()
        counters.count_steps()
        kv = stats.kv
        return EngineSnapshot(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            blocks_by_state={"free": kv.free, "cached": kv.cached, "live": kv.live},
            num_pinned_blocks=self.manager.num_pinned_blocks,
            prompt_tokens_by_source=prompt_sources(stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_disk_tokens),
            kv_bytes=account.bytes_by_kind,
            fragmentation={"internal": account.internal_fragmentation, "external": account.external_fragmentation},
            prefix_query_tokens=stats.num_queried_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=stats.num_preemptions,
            recomputed_tokens=stats.num_tokens_recomputed,
            steps=counters.steps,
            failed_steps=counters.failed_steps,
            failed_in_a_row=counters.failed_in_a_row,
            step_seconds=counters.step_seconds,
            last_step_seconds=counters.last_step_seconds,
            last_step_tokens=counters.last_step_tokens,
            scheduler_seconds=counters.scheduler_seconds,
            step_times=counters.step_times.snapshot(),
            batch_tokens=counters.batch_tokens.snapshot(),
            batch_requests=counters.batch_requests.snapshot(),
            profile=self.config.profile,
            preemption_records=self.scheduler.preemptions(),
            tier=None if self._tiers is None else self._tiers.snapshot(stats.num_swaps),
        )

    def _advance(self, output: SchedulerOutput, drawn: dict[str, int], notes: Mapping[str, Note]) -> list[OutputDelta]:
        started = self._clock()
        if notes:
            drawn = {name: token_id for name, token_id in drawn.items() if not isinstance(notes.get(name), Failure)}
        self.scheduler.update(output, drawn)
        now = self._clock()
        deltas: list[OutputDelta] = []
        self._counters.scheduler_seconds += now - started
        self._counters.generated_tokens += len(drawn)
        for item in output.scheduled:
            self._tell(item.request_id, drawn, notes, now, deltas)
            for choice_id in item.forks:
                self._tell(choice_id, drawn, notes, now, deltas)
        return deltas

    def _tell(
        self, choice_id: str, drawn: Mapping[str, int], notes: Mapping[str, Note], now: float, deltas: list[OutputDelta]
    ) -> None:
        """What the step meant for one choice, if it meant anything, goes to `deltas`."""
        choice = self._choices[choice_id]
        if choice_id in drawn:
            delta = self._push(choice, drawn[choice_id], notes.get(choice_id) if notes else None, now)
        elif isinstance(note := notes.get(choice_id), Failure):
            delta = _refuse(choice, note.reason)
        elif choice.request.max_tokens or choice.request.num_computed_tokens < choice.request.num_tokens:
            return
        else:
            delta = self._last_delta(choice, "length")
        deltas.append(delta)
        if delta.finish_reason is not None:
            self._finish(choice_id, delta.finish_reason, delta.stop_reason)

    def _push(self, choice: Choice, token_id: int, note: Note | None, now: float) -> OutputDelta:
        try:
            assert note is None or isinstance(note, TokenLogprob)
            complete = choice.constraint is not None and choice.constraint.accept(token_id)
            return choice.output.push(token_id, note, now, complete=complete)
        except Exception as error:
            return _refuse(choice, failure(error))

    def _last_delta(self, choice: Choice, reason: FinishReason) -> OutputDelta:
        try:
            return choice.output.finish(reason)
        except Exception as error:
            return choice.output.finish("error", failure(error))

    def _fail(self, choice_ids: list[str], why: str) -> list[OutputDelta]:
        deltas = []
        for choice_id in choice_ids:
            deltas.append(self._choices[choice_id].output.finish("error", why))
            self._finish(choice_id, "error", None)
        return deltas

    def _finish(self, choice_id: str, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.scheduler.finish(choice_id, reason, stop_reason)
        self._forget(choice_id)

    def _forget(self, choice_id: str) -> None:
        user_id = self._choices.pop(choice_id).output.user_request_id
        siblings = self._requests[user_id]
        siblings.discard(choice_id)
        if not siblings:
            del self._requests[user_id]


def _refuse(choice: Choice, error: str) -> OutputDelta:
    """The last delta of a choice that cannot go on; one that asked for what cannot be done hears of that."""
    if choice.constraint is not None and choice.constraint.error is not None:
        return choice.output.finish("error", choice.constraint.error, stop_reason=STRUCTURED_OUTPUTS)
    return choice.output.finish("error", error)
