"""Engines over tiny random models, made in memory: no files, no cache folder, a few milliseconds a step.

    engine = tiny_engine(isa="numpy", num_kv_blocks=32)
    run(engine, {"a": [5, 6, 7]}, SamplingParams(max_tokens=4))["a"].token_ids

`trace_logits(engine)` records the logits that each token was drawn from, so that two runs can be compared bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from helpers.tiny_models import BOS, CHAT_TEMPLATE, EOS, SPECIALS, TinyModel, tokenizer_json
from kvist.config import EngineOptions, ModelConfig
from kvist.engine.engine import Engine
from kvist.engine.kernels import select_ops
from kvist.engine.loader import Loaded, assemble
from kvist.engine.runner import Runner
from kvist.kernels import cpu
from kvist.request import OutputDelta, SamplingParams, TokenLogprob
from kvist.text.chat_template import ChatTemplate
from kvist.text.tokenizer import TokenizerInfo, load_tokenizer
from kvist.weights.quantize import encode_dense

ISAS = ("numpy", *cpu.available())
_NAMES = {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "o"} | {
    f"mlp.{part}_proj": part for part in ("gate", "up", "down")
}


@dataclass(frozen=True)
class TinyPacked:
    config: ModelConfig
    linears: Mapping[str, Any]
    vectors: Mapping[str, Any]
    key: str


@lru_cache
def tiny_packed(weights: str = "w4a8", windows: tuple[int | None, ...] = (), **fields: Any) -> TinyPacked:
    """A llama whose layers are `weights`; the embedding (and head) are w8a8 beside quantized layers, as in the real model."""
    tiny = TinyModel(**{"layers": len(windows) or 2, "context": 512, **fields})
    embedding = "w8a8" if weights in ("w4a8", "w8a8") else weights
    linears, vectors = {}, {}
    for name, array in tiny.weights().items():
        if name == "model.embed_tokens.weight":
            linears["embed"] = encode_dense(array, embedding)
        elif name == "model.norm.weight":
            vectors["final_norm"] = array
        else:
            _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
            if rest in _NAMES:
                linears[f"layers.{layer}.{_NAMES[rest]}"] = encode_dense(array, weights)
            else:
                vectors[f"layers.{layer}.{'attn_norm' if rest == 'input_layernorm' else 'mlp_norm'}"] = array
    config = ModelConfig(
        "llama", tiny.size, tiny.hidden, tiny.layers, tiny.heads, tiny.kv_heads, tiny.head, tiny.intermediate, tiny.context,
        layer_windows=windows, tie_word_embeddings=True, bos_token_id=BOS, eos_token_ids=(EOS,), name="tiny",
    )  # fmt: skip
    return TinyPacked(config, linears, vectors, f"tiny-{weights}-{windows}-{fields}")


def tiny_loaded(
    isa: str = "numpy", num_threads: int = 1, *, weights: str = "w4a8", windows: Sequence[int | None] = (), add_bos: bool = False,
    model: Mapping[str, Any] | None = None, **options: Any,
) -> Loaded:  # fmt: skip
    packed = tiny_packed(weights, tuple(windows), **(model or {}))
    size = packed.config.vocab_size
    names = {"bos_token": SPECIALS[BOS], "eos_token": SPECIALS[EOS]}
    info = TokenizerInfo(size, "byte_level", BOS, (EOS,), add_bos=add_bos, special_tokens=names)
    tokenizer = load_tokenizer(tokenizer_json(TinyModel()).encode(), info)
    ops = select_ops(isa, num_threads, warn=lambda message: None)  # type: ignore[arg-type]
    defaults = {"num_kv_blocks": 64 * len(set(windows) or {0}), "max_num_batched_tokens": 64, "max_num_seqs": 64}
    resolved = EngineOptions(model="tiny", isa=isa, num_threads=num_threads, **{**defaults, **options})  # type: ignore[arg-type]
    return assemble(resolved, packed, ops, tokenizer, ChatTemplate(CHAT_TEMPLATE, info))


def tiny_engine(isa: str = "numpy", num_threads: int = 1, **keywords: Any) -> Engine:
    return Engine(tiny_loaded(isa, num_threads, **keywords))


def settle(engine: Engine) -> None:
    """Until all that was copied out is on the disk, or was lost."""
    tiers = engine._tiers
    assert tiers is not None
    deadline = time.monotonic() + 20
    while any(tiers._decider._storing) and time.monotonic() < deadline:
        tiers.wait()
        tiers.receive()
    assert not any(tiers._decider._storing)


@dataclass
class Collected:
    """All that one choice gave."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: OutputDelta | None = None
    first: OutputDelta | None = None

    def add(self, delta: OutputDelta) -> None:
        assert self.last is None, "nothing comes after the last delta"
        self.first = self.first or delta
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.last = delta
            assert delta.usage is not None

    @property
    def finish_reason(self) -> str:
        assert self.last is not None
        return str(self.last.finish_reason)

    @property
    def stop_reason(self) -> Any:
        assert self.last is not None
        return self.last.stop_reason

    @property
    def usage(self) -> Any:
        assert self.last is not None
        return self.last.usage


def drain(engine: Engine, into: dict[str, Collected] | None = None) -> dict[str, Collected]:
    """Step until nothing is left; outputs by request id ("id" for choice 0, "id#i" for others)."""
    outputs = {} if into is None else into
    while engine.has_work:
        for delta in engine.step():
            name = delta.request_id if delta.index == 0 else f"{delta.request_id}#{delta.index}"
            outputs.setdefault(name, Collected()).add(delta)
    engine.check_idle()
    return outputs


def run(engine: Engine, prompts: Mapping[str, list[int]], params: SamplingParams) -> dict[str, Collected]:
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    return drain(engine)


def run_one(engine: Engine, prompt: list[int], params: SamplingParams) -> Collected:
    return run(engine, {"one": prompt}, params)["one"]


@dataclass
class Trace:
    """Bits of the logits by (choice id, position of the row), and the shape of each step."""

    rows: dict[tuple[str, int], bytes] = field(default_factory=dict)
    steps: list[list[int]] = field(default_factory=list)
    """Per step, the number of rows of each request."""

    def of(self, request_id: str, choice: int = 0) -> list[bytes]:
        """Logits of one choice in the order of positions."""
        return [self.rows[key] for key in sorted(self.rows) if key[0] == f"{request_id}#{choice}"]

    @property
    def forwarded(self) -> int:
        return sum(map(sum, self.steps))

    @property
    def mixed_steps(self) -> int:
        """Steps with rows of more than one request."""
        return sum(len(step) > 1 for step in self.steps)


@dataclass
class TracingRunner:
    inner: Runner
    trace: Trace

    def forward(self, output: Any) -> Any:
        self.trace.steps.append([len(item.token_ids) for item in output.scheduled])
        batch, logits = self.inner.forward(output)
        items = [item for item in output.scheduled if item.samples]
        drawn = [
            ((name, item.start + len(item.token_ids) - 1), row)
            for item, row in zip(items, logits, strict=True)
            for name in (item.request_id, *item.forks)
        ]
        for key, row in drawn:
            bits = np.ascontiguousarray(row).tobytes()
            assert self.trace.rows.setdefault(key, bits) == bits, "one row, computed again, has other bits"
        return batch, logits

    def prompt_logits(self, output: Any, batch: Any) -> Any:
        return self.inner.prompt_logits(output, batch)


def trace_logits(engine: Engine) -> Trace:
    runner = TracingRunner(engine.runner, Trace())
    engine.runner = runner  # type: ignore[assignment]
    return runner.trace
