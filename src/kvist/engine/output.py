"""From token ids to what the user sees: text, stop decisions, log probabilities, usage; one `ChoiceOutput` per choice.

It knows no scheduler and no arrays: the engine tells it each token and carries out the finish it decides. Invariants:

* the joined texts of a choice's deltas never hold part of a stop string (unless it was asked for), half a character, or the text
  of the EOS or stop token that ended it; the ids of all generated tokens are in the deltas, that one included;
* exactly one delta has a finish reason, and it is the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvist.request import FinishReason, OutputDelta, Request, RequestEvent, RequestUsage, TokenLogprob
from kvist.text.detokenizer import IncrementalDetokenizer
from kvist.text.stop import StopChecker
from kvist.text.tokenizer import Tokenizer


@dataclass(slots=True)
class ChoiceOutput:
    """The growing output of one choice. `user_request_id` is shared by the `n` choices of a request."""

    user_request_id: str
    request: Request
    detokenizer: IncrementalDetokenizer
    stop_checker: StopChecker
    prompt_logprobs: list[TokenLogprob | None] | None
    ends: frozenset[int]
    """Tokens that end the output."""
    first_token_time: float | None = None
    _first_delta: bool = field(default=True)

    @classmethod
    def of(cls, user_request_id: str, request: Request, tokenizer: Tokenizer) -> ChoiceOutput:
        params = request.sampling_params
        return cls(
            user_request_id,
            request,
            IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens),
            StopChecker(params.stop, params.include_stop_str_in_output),
            [None] * request.num_prompt_tokens if request.wants_prompt_logprobs else None,
            frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else request.eos_token_ids),
        )

    def push(self, token_id: int, logprob: TokenLogprob | None, now: float, *, complete: bool = False) -> OutputDelta:
        """The delta of a token that was just appended to the request's output; it may be the last one, and is when the form asked
        of the output is `complete`."""
        if self.first_token_time is None:
            self.first_token_time = now
        text, reason, stop_reason = self._advance(token_id, complete)
        if reason is None and logprob is None and not self._first_delta:
            # As its own constructor would, at a third of the cost: nearly all are such.
            fields = (self.user_request_id, self.request.choice, text, (token_id,), None, None, None, None, None, None, ())
            return tuple.__new__(OutputDelta, fields)
        return self._delta(text, (token_id,), (logprob,) if logprob else None, reason, stop_reason)

    def tell(self, event: RequestEvent) -> OutputDelta:
        """A delta that brings no token, only what has happened."""
        return OutputDelta(self.user_request_id, self.request.choice, "", (), events=(event,))

    def finish(self, reason: FinishReason, error: str | None = None, *, stop_reason: str | None = None) -> OutputDelta:
        """The last delta of a choice that ends without a new token: aborted, failed, or asked for none."""
        text = "" if reason == "error" else self._flush()[0]
        return self._delta(text, (), None, reason, stop_reason, error)

    def _advance(self, token_id: int, complete: bool) -> tuple[str, FinishReason | None, int | str | None]:
        request, params = self.request, self.request.sampling_params
        num_output = len(request.output_token_ids)
        may_stop = num_output >= params.min_tokens
        if may_stop and token_id in self.ends:
            is_eos = token_id in request.eos_token_ids and not params.ignore_eos
            return self._flush_before_stop("stop", None if is_eos else token_id)
        text = self.detokenizer.push_token(token_id)
        if may_stop and params.stop:
            text, matched = self.stop_checker.push(text)
            if matched is not None:
                return text, "stop", matched
        if complete or num_output >= request.max_tokens:
            rest, matched = self._flush()
            return text + rest, "stop" if complete or matched else "length", matched
        return text, None, None

    def _flush_before_stop(self, reason: FinishReason, stop_reason: int | None) -> tuple[str, FinishReason, int | str | None]:
        text, matched = self._flush()
        return text, reason, stop_reason if matched is None else matched

    def _flush(self) -> tuple[str, str | None]:
        """What is held back, and the stop string that was complete in it. An unfinished character is dropped."""
        text, _ = self.stop_checker.push(self.detokenizer.finish())
        return text + self.stop_checker.finish(), self.stop_checker.matched

    def _delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        reason: FinishReason | None,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> OutputDelta:
        prompt_logprobs = tuple(self.prompt_logprobs) if self._first_delta and self.prompt_logprobs is not None else None
        self._first_delta = False
        usage = self.usage() if reason is not None else None
        index = self.request.choice
        return OutputDelta(
            self.user_request_id, index, text, token_ids, logprobs, prompt_logprobs, reason, stop_reason, usage, error
        )

    def usage(self) -> RequestUsage:
        request = self.request
        scheduled, first = request.first_scheduled_time, self.first_token_time
        return RequestUsage(
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_disk_tokens=request.num_disk_tokens,
            num_output_tokens=len(request.output_token_ids),
            num_preemptions=request.num_preemptions,
            queue_time=0.0 if scheduled is None else scheduled - request.arrival_time,
            time_to_first_token=0.0 if first is None else first - request.arrival_time,
            stall_time=request.stall_time,
            prefix_miss=request.prefix_miss,
        )
