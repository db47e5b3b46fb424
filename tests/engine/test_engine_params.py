"""What `SamplingParams` takes, and how it refuses the rest: by the field's name, never by a fault of its own."""

from __future__ import annotations

from typing import Any

import pytest

from kvist.errors import InvalidRequestError
from kvist.request import SamplingParams


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": [1]},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: float("nan")}},
        {"stop": 5},
        {"stop": b"x"},
        {"stop": ["a", None]},
        {"stop": [""]},
        {"stop_token_ids": 5},
        {"stop_token_ids": "5"},
        {"stop_token_ids": [1.5]},
        {"ignore_eos": "no"},
        {"skip_special_tokens": 0},
        {"include_stop_str_in_output": None},
        {"temperature": float("nan")},
        {"temperature": 10**400},
        {"temperature": "1"},
        {"top_p": 0.0},
        {"top_k": None},
        {"n": 2.0},
        {"n": True},
        {"seed": 1.5},
        {"logprobs": -1},
        {"prompt_logprobs": True},
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidRequestError, match=name) as refusal:
        SamplingParams(**fields)
    assert refusal.value.param == name


def test_none_means_none_of_them() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, seed=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})


def test_what_was_given_is_kept_even_if_the_caller_changes_it() -> None:
    bias, stops = {5: 1.0}, [7]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stops, stop="end", top_k=-1)  # type: ignore[arg-type]
    bias[5], stops[0] = 9.0, 9
    assert (params.logit_bias, params.stop_token_ids, params.stop, params.top_k) == ({5: 1.0}, (7,), ("end",), 0)
