"""What a call reads and computes, in exact numbers."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.machines import ISAS, make_ops
from helpers.single import Bench, config_of, pack, pack_weights
from helpers.tiny_models import TinyModel
from kvist.kernels.cost import Cost, cost_of
from kvist.kernels.ops import ForwardBatch, GroupTables
from kvist.kernels.program import Array, Attend, Embed, GatedMlp, LinearAdd, NormLinear, RopeWrite, Take

f32 = np.float32


def batch(*sequences: tuple[int, int], wanted: int = 1) -> ForwardBatch:
    """Sequences as (length, rows at its end)."""
    rows = sum(count for _, count in sequences)
    ids, table = np.zeros(rows, np.int32), GroupTables(np.zeros((len(sequences), 1), np.int32), np.zeros(rows, np.int64))
    starts = np.cumsum([0, *(count for _, count in sequences)]).astype(np.int32)
    lengths = np.array([length for length, _ in sequences], np.int32)
    return ForwardBatch(ids, ids, starts, lengths, (table,), np.zeros(wanted, np.int32))


@pytest.mark.parametrize("isa", ISAS)
def test_products(isa: str) -> None:
    ops = make_ops(isa)
    eight, four = (ops.bind_linear(pack(np.ones((48, 64), f32), name)) for name in ("w8a8", "w4a8"))
    gate_up = ops.bind_linear(*(pack(np.ones((32, 64), f32), "f16") for _ in "ab"))
    down = ops.bind_linear(pack(np.ones((64, 32), f32), "bf16"))
    x, y, taken, norm = Array(64), Array(48), Array(64, taken=True), np.ones(64, f32)
    step = batch((5, 2), (9, 1), wanted=2)
    groups = 48 * 64 // 32
    assert cost_of(NormLinear(x, norm, 0.0, eight, y), step) == Cost(
        "norm_linear 48 x 64", ("w8a8",), 48 * 64 + 2 * groups, 2 * 3 * 48 * 64
    )
    assert cost_of(NormLinear(taken, norm, 0.0, eight, y), step).operations == 2 * 2 * 48 * 64
    assert cost_of(NormLinear(taken, norm, 0.0, eight, y), batch((5, 2), wanted=0)).num_bytes == 0
    assert cost_of(LinearAdd(x, four, y), step) == Cost("linear_add 48 x 64", ("w4a8",), 48 * 64 // 2 + 4 * groups, 2 * 3 * 48 * 64)
    assert cost_of(GatedMlp(x, norm, 0.0, gate_up, down), step) == Cost(
        "gated_mlp 32 x 64", ("f16", "bf16"), 2 * 3 * 32 * 64, 2 * 3 * 3 * 32 * 64
    )
    assert cost_of(Embed(eight, x), step).num_bytes == 3 * (64 + 2 * 2)
    assert cost_of(Take(x, taken), step) == Cost("take", (), 2 * 64 * 4, 0)


@pytest.mark.parametrize("isa", ISAS)
def test_attention_reads_each_key_once_a_sequence_and_multiplies_it_for_each_row(isa: str) -> None:
    tiny = TinyModel(layers=2, heads=4, kv_heads=2, hidden=64)
    config = config_of(tiny, layer_windows=(None, 8))
    bench = Bench(config, *pack_weights(tiny.weights()), make_ops(isa), kv_format="bf16")
    full, windowed = (call for call in bench.model.program.calls if isinstance(call, Attend))
    write = next(call for call in bench.model.program.calls if isinstance(call, RopeWrite))
    step, token = batch((20, 1), (10, 3)), 2 * 2 * 16 * 2
    assert cost_of(full, step) == Cost("attend", ("bf16",), (20 + 10) * token, 4 * 64 * (20 + 8 + 9 + 10))
    assert cost_of(windowed, step) == Cost("attend window 8", ("bf16",), (8 + 10) * token, 4 * 64 * (8 + 8 + 8 + 8))
    assert cost_of(write, step).num_bytes == 4 * token
