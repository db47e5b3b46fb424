"""Fields of the chat and completions requests that ask for nothing here, and those that are refused by name.

Knows names and neutral values, those of OpenAI's API and of vLLM's additions to it. A field that a request model has is that
model's own; a name that stands nowhere is refused as unknown.
"""

from __future__ import annotations

from typing import Any

HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Fields that describe the caller and change no answer; accepted and not used."""

OPENAI: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of OpenAI's that kvist does not offer, or on the other route only, with the values that ask for nothing."""

VLLM: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0, 1),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "request_id": (),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""The same of vLLM's extra fields."""

NEUTRAL = OPENAI | VLLM

INSTEAD = {
    "prompt_logprobs": "use echo with logprobs in /v1/completions",
    "request_id": "send it as the header X-Request-Id",
}
"""What to do instead of a field that is refused, where there is something."""
