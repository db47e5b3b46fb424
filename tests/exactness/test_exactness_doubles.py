"""Law L1 where a content is computed twice: the later block takes the place of the first one, and others go on behind it.

The reference is that of `test_exactness_tiny.py`: each request alone, cold. Each test asserts that blocks took others' places.
"""

from __future__ import annotations

import pytest
from test_exactness_tiny import MODELS, SAMPLED, alone, assert_as_alone, everywhere, prompt, run_all

from helpers.tiny_engine import tiny_engine, trace_logits
from kvist.config import EVICTION_POLICIES


@everywhere
@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_a_prompt_of_whole_blocks_is_asked_again_and_goes_on_differently(isa, model, policy):
    """All is found but the last token, so the last block is copied and filled once more, and the next turn stands behind that."""
    tokens = prompt(48, 1)
    engine = tiny_engine(isa, num_kv_blocks=100, eviction_policy=policy, **MODELS[model])
    trace, replaced = trace_logits(engine), dict[int, None]()
    assert_as_alone(isa, model, trace, {"r": tokens}, run_all(engine, {"r": tokens}))
    with engine.manager.index.watch(replaced):
        trace.rows.clear()
        again = run_all(engine, {"r": tokens}, SAMPLED)["r"]
    assert (trace.of("r"), again.text, again.token_ids) == alone(isa, model, tokens, "sampled")
    assert again.usage.num_cached_tokens == 47
    assert replaced
    turn = (*tokens, *again.token_ids, 5, 6)
    trace.rows.clear()
    outputs = run_all(engine, {"r": turn})
    assert_as_alone(isa, model, trace, {"r": turn}, outputs)
    assert outputs["r"].usage.num_cached_tokens == 57
    engine.check_idle()


@everywhere
def test_two_compute_one_block_at_once(isa, model):
    """The same prompt and the same answer: each fills the block between them in its own copy."""
    tokens = prompt(40, 2)
    engine = tiny_engine(isa, num_kv_blocks=100, **MODELS[model])
    trace, replaced = trace_logits(engine), dict[int, None]()
    with engine.manager.index.watch(replaced):
        outputs = run_all(engine, {"a": tokens, "b": tokens})
        engine.check_idle()
    assert_as_alone(isa, model, trace, {"a": tokens, "b": tokens}, outputs)
    assert replaced
    trace.rows.clear()
    turn = (*tokens, *outputs["b"].token_ids, 5, 6)
    outputs = run_all(engine, {"r": turn})
    assert_as_alone(isa, model, trace, {"r": turn}, outputs)
    assert outputs["r"].usage.num_cached_tokens >= 48
    engine.check_idle()
