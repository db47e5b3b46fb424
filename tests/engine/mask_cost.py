"""What forms cost of a step: `python tests/engine/mask_cost.py [model]` decodes 32 requests with a JSON schema, then without one,
in turn, and prints the share of the steps spent on filling masks and advancing matchers. Not a test."""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

from kvist.config import EngineOptions
from kvist.engine.engine import Engine
from kvist.request import SamplingParams

ROWS, TOKENS, ROUNDS = 32, 48, 3
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 40, "maxLength": 400},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 8}, "minItems": 8},
        "year": {"type": "integer"},
    },
    "required": ["tags", "title", "year"],
    "additionalProperties": False,
}


class Timed:
    """Adds up the time that calls of a function take."""

    def __init__(self, call: Any) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return self.call(*arguments)
        finally:
            self.seconds += time.perf_counter() - started


def measure(engine: Engine, form: dict[str, Any] | None) -> tuple[float, float]:
    """Seconds of all decode steps, and of those what the masks took."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=TOKENS, ignore_eos=True, structured_outputs=form)
    for i in range(ROWS):
        engine.add_request(f"r{i}", [5 + i, *range(100, 131)], params)
    fill = Timed(engine.forms.masks.fill)
    engine.forms.masks.fill = fill  # type: ignore[method-assign]
    accepts = []
    for choice in engine._choices.values():
        if choice.constraint is not None:
            accepts.append(Timed(choice.constraint.accept))
            choice.constraint.accept = accepts[-1]  # type: ignore[method-assign]
    while engine.scheduler.waiting or any(not choice.request.output_token_ids for choice in engine._choices.values()):
        engine.step()
    before = fill.seconds + sum(accept.seconds for accept in accepts)
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    spent = time.perf_counter() - started
    engine.forms.masks.fill = fill.call  # type: ignore[method-assign]
    return spent, fill.seconds + sum(accept.seconds for accept in accepts) - before


def main() -> None:
    engine = Engine.from_options(EngineOptions(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2:135m"))
    rounds = [(measure(engine, {"json": SCHEMA}), measure(engine, None)) for _ in range(ROUNDS + 1)][1:]
    shares = [masks / spent for (spent, masks), _ in rounds]
    ratios = [shaped / free for (shaped, _), (free, _) in rounds]
    each = ", ".join(f"{share:.1%}" for share in shares)
    print(f"masks and matchers: {median(shares):.1%} of the decode steps of {ROWS} requests ({each})")
    print(f"decode time with the form against without: {median(ratios):.3f} ({', '.join(f'{r:.3f}' for r in ratios)})")


if __name__ == "__main__":
    main()
