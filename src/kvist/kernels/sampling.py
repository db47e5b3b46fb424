"""What crosses for sampling: the parameters of rows to draw from, and what comes back. Plain data; it computes nothing.

`Ops.sample` and `Ops.score` take and give these; `reference_sampling.py` defines what they mean. Nothing here knows a request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvist.kernels.ops import F32, I32

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

WEIGHT_BITS = 40
"""A token's weight is e^(scaled logit - largest) in whole units of 2^-40: sums of weights are exact, in any order."""
SHARE_BITS = 53
"""Random numbers and `top_p` are whole numbers of 2^-53."""

_FIELDS = [
    ("seed", "<u8"),
    ("choice", "<u8"),
    ("position", "<u8"),
    ("top_p", "<u8"),
    ("inverse_temperature", "<f4"),
    ("min_p_log", "<f4"),
    ("top_k", "<i4"),
    ("unused", "<i4"),
]
ROW = np.dtype(_FIELDS)
"""One row's parameters. All zero but for the first three means the most likely token (no inverse temperature: nothing else is
read). Otherwise `top_p` is in units of 2^-53 (2^53 for all), `min_p_log` the logarithm of min-p (-inf for none), `top_k` 0 for
no limit."""

WORDS_A_ROW = ROW.itemsize // 8
POSITION_WORD = _FIELDS.index(("position", "<u8"))
"""Where a row's position stands, which changes from draw to draw, in words of 8 bytes: those before it are such words too."""

DRAWN, NO_NUMBER, NONE_LEFT = 0, 1, 2
"""What came of a row: a token; the model's logits hold no finite number; bias and mask leave none."""


class Adjustment(NamedTuple):
    """What changes one row's logits before a token is drawn; each part is optional. Ids of one part are distinct.

    `mask` uint32 [ceil(vocabulary / 32)]: bit `token % 32` of word `token // 32` says that a token is allowed. `bias` float64 is
    added to the logits of `bias_ids` (-inf rules out). `counts` int32 says how often `seen` ids stand in the output (0: in the
    prompt only), for the penalties.
    """

    mask: U32 | None = None
    bias_ids: I32 | None = None
    bias: F64 | None = None
    seen: I32 | None = None
    counts: I32 | None = None
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


Drawn = tuple[list[int], list[int]]
"""A token id for each row, and for each an outcome, which says whether that is one."""


class Scores(NamedTuple):
    """Tokens in their rows' own distributions: `logits` of the tokens; `peaks`, the rows' largest; `totals`, the sums of all
    weights (0 where a row holds no finite number); `ranks` (1: the likeliest); and the likeliest tokens [S, most tops] with
    their logits, of which row s has as many as it asked for (and as the vocabulary has)."""

    logits: F32
    peaks: F32
    totals: U64
    ranks: I32
    top_ids: I32
    top_logits: F32

    @classmethod
    def empty(cls, tops: I32) -> Scores:
        size, width = len(tops), int(tops.max(initial=0))
        return cls(
            np.zeros(size, np.float32),
            np.zeros(size, np.float32),
            np.zeros(size, np.uint64),
            np.zeros(size, np.int32),
            np.zeros((size, width), np.int32),
            np.zeros((size, width), np.float32),
        )
