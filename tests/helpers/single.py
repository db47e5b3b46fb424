"""Runs a model with hand-made block tables: no scheduler, no pool, every row's logits.

    tiny = TinyModel(layers=2)
    bench = Bench(config_of(tiny), *pack_weights(tiny.weights()), ops, kv_format="bf16")
    sequence = bench.sequence()
    logits = bench.run(sequence, [3, 4, 5])              # [3, vocab], and again with more tokens to go on
    logits = bench.step([(one, [7]), (other, [8, 9])])   # a mixed batch: one array per sequence

Blocks come from `order` (default: ascending). Memory that nobody has written holds NaNs, also blocks that a windowed group lets go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvist.config import ModelConfig
from kvist.kernels.ops import F32, ForwardBatch, GroupTables, Ops, PackedLinear
from kvist.kernels.packing import pack_dense, pack_w4, pack_w8
from kvist.kv.spec import KVSpec, group_layers
from kvist.models import build_model
from kvist.store import Arena

from .tiny_models import TinyModel

NAMES = {
    "model.embed_tokens": "embed", "lm_head": "head", "model.norm": "final_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm", "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
    "self_attn.o_proj": "o", "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm", "mlp.gate_proj": "gate",
    "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip


def config_of(tiny: TinyModel, **changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": tiny.arch,
        "vocab_size": tiny.size,
        "hidden_size": tiny.hidden,
        "num_layers": tiny.layers,
        "num_heads": tiny.heads,
        "num_kv_heads": tiny.kv_heads,
        "head_dim": tiny.head,
        "intermediate_size": tiny.intermediate,
        "max_position_embeddings": tiny.context,
        "rms_norm_eps": tiny.eps,
        "qk_norm": tiny.arch == "qwen3",
        "tie_word_embeddings": tiny.tied,
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


def canonical(name: str) -> str:
    """`model.layers.0.mlp.up_proj` to `layers.0.up`."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"layers.{layer}.{NAMES[rest]}"


def pack(matrix: F32, weight_format: str, bias: F32 | None = None) -> PackedLinear:
    """Round a matrix [n, k] to a weight format, plainly."""
    n, k = matrix.shape
    groups = matrix.reshape(n, -1, 32) if k % 32 == 0 else np.zeros((n, 1, 1))
    if weight_format == "w8a8":
        scale = (np.abs(groups).max(-1) / 127).astype(np.float16)
        q = np.rint(groups / np.maximum(scale.astype(np.float32), 1e-12)[..., None]).clip(-127, 127).astype(np.int8)
        return pack_w8(q.reshape(n, k), scale, bias)
    if weight_format == "w4a8":
        minimum = groups.min(-1).astype(np.float16)
        scale = ((groups.max(-1) - minimum) / 15).astype(np.float16)
        q = np.rint((groups - minimum[..., None]) / np.maximum(scale.astype(np.float32), 1e-12)[..., None])
        return pack_w4(q.clip(0, 15).astype(np.uint8).reshape(n, k), scale, minimum, bias)
    return pack_dense(matrix, weight_format, bias)


def pack_weights(weights: Mapping[str, F32], weight_format: str = "f32") -> tuple[dict[str, PackedLinear], dict[str, F32]]:
    """Float32 weights by Hugging Face name -> (linears, vectors) by canonical name."""
    linears, vectors = {}, {}
    for full, array in weights.items():
        stem, _, kind = full.rpartition(".")
        if kind == "bias":
            continue
        if array.ndim == 1:
            vectors[canonical(stem)] = array
        else:
            linears[canonical(stem)] = pack(array, weight_format, weights.get(f"{stem}.bias"))
    return linears, vectors


@dataclass
class TestSequence:
    """One sequence's tokens so far, and its physical blocks: tables[group][logical block]."""

    __test__ = False
    length: int = 0
    tables: list[list[int]] = field(default_factory=list)


class Bench:
    """A model bound to a small arena that is full of NaNs."""

    def __init__(
        self,
        config: ModelConfig,
        linears: Mapping[str, PackedLinear],
        vectors: Mapping[str, F32],
        ops: Ops,
        *,
        kv_format: str = "f32",
        block_size: int = 16,
        num_blocks: int = 128,
        max_model_len: int = 1024,
        order: Sequence[int] | None = None,
    ) -> None:
        self.spec = KVSpec(config.num_kv_heads, config.head_dim, kv_format, block_size, group_layers(config.windows))
        self.arena = Arena(num_blocks, self.spec.block_bytes)
        self.arena.blocks[...] = 0xFF
        self.model = build_model(config, linears, vectors, ops, self.arena.blocks, self.spec, max_model_len=max_model_len)
        self.free = list(order if order is not None else range(num_blocks))[::-1]

    def sequence(self) -> TestSequence:
        return TestSequence(tables=[[] for _ in self.spec.groups])

    def release(self, sequence: TestSequence) -> None:
        """Forget a sequence; its blocks are NaNs again."""
        for table in sequence.tables:
            self.arena.blocks[table] = 0xFF
            self.free.extend(table)
        sequence.length, sequence.tables = 0, [[] for _ in self.spec.groups]

    def let_go(self, sequence: TestSequence) -> int:
        """As the manager does: free the blocks that no later row of a windowed group sees; their table entries become 0,
        whatever is there. Returns how many went."""
        count = 0
        for group, table in zip(self.spec.groups, sequence.tables, strict=True):
            unseen = 0 if group.window is None else max(0, sequence.length - group.window + 1) // self.spec.block_size
            for index in range(min(unseen, len(table))):
                if table[index] != 0:
                    self.arena.blocks[table[index]] = 0xFF
                    self.free.insert(0, table[index])
                    table[index], count = 0, count + 1
        return count

    def batch(self, work: Sequence[tuple[TestSequence, Sequence[int]]]) -> ForwardBatch:
        """Give each sequence room for its new tokens, and lay out the batch."""
        size, rows = self.spec.block_size, [len(tokens) for _, tokens in work]
        positions = [np.arange(sequence.length, sequence.length + len(tokens)) for sequence, tokens in work]
        for sequence, tokens in work:
            sequence.length += len(tokens)
            for table in sequence.tables:
                while len(table) * self.spec.block_size < sequence.length:
                    table.append(self.free.pop())
        width = max(len(table) for sequence, _ in work for table in sequence.tables)
        groups = []
        for g in range(len(self.spec.groups)):
            table = np.zeros((len(work), width), np.int32)
            for s, (sequence, _) in enumerate(work):
                table[s, : len(sequence.tables[g])] = sequence.tables[g]
            slots = [table[s, p // size].astype(np.int64) * size + p % size for s, p in enumerate(positions)]
            groups.append(GroupTables(table, np.concatenate(slots)))
        return ForwardBatch(
            token_ids=np.concatenate([np.asarray(tokens, np.int32) for _, tokens in work]),
            positions=np.concatenate(positions).astype(np.int32),
            query_start_loc=np.cumsum([0, *rows]).astype(np.int32),
            seq_lens=np.array([sequence.length for sequence, _ in work], np.int32),
            groups=tuple(groups),
            logit_rows=np.arange(sum(rows), dtype=np.int32),
        )

    def step(self, work: Sequence[tuple[TestSequence, Sequence[int]]]) -> list[F32]:
        """One forward pass; the logits [rows, vocab] of each sequence."""
        batch = self.batch(work)
        logits = self.model.forward(batch).copy()
        return np.split(logits, batch.query_start_loc[1:-1])

    def run(self, sequence: TestSequence, tokens: Sequence[int], chunks: Iterable[int] | int | None = None) -> F32:
        """All logits [len(tokens), vocab] of one sequence that goes on by `tokens`, in chunks of that size or those sizes."""
        if chunks is None or isinstance(chunks, int):
            chunks = [chunks or len(tokens)] * len(tokens)
        results, start = [], 0
        for size in chunks:
            if start < len(tokens):
                results += self.step([(sequence, tokens[start : start + size])])
                start += size
        assert start >= len(tokens), "the chunks are too few for the tokens"
        return np.concatenate(results)
