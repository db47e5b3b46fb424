"""The embedded model's tokenizer and template, from its GGUF file. The reference ids are transformers', for the same vocabulary."""

from __future__ import annotations

import threading

import pytest

from kvist.text.build import build_tokenizer
from kvist.text.chat_template import ChatTemplate
from kvist.text.detokenizer import IncrementalDetokenizer
from kvist.text.tokenizer import Tokenizer, load_tokenizer
from kvist.weights.hub import resolve_model
from kvist.weights.source import TokenizerSource, open_model

pytestmark = pytest.mark.model

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
IDS = [
    ("Hello world", [19556, 905]),
    ("  def f(x):\n\treturn x**2\n\n\n", [216, 753, 275, 24, 104, 727, 198, 197, 5406, 1792, 828, 34, 16506]),
    ("😀🧪漢字é", [10813, 242, 218, 10813, 117, 120, 177, 137, 112, 36518, 2756]),
    ("1234567890", [33, 34, 35, 36, 37, 38, 39, 40, 41, 32]),
    ("It's WE'RE", [1589, 506, 26587, 23, 3256]),
    ("\n\n  \n", [1116, 32057]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("<|im_start|><|im_start|>", [1, 1]),
    ("", []),
    (
        "Ünïcödé 日本語 한국어",
        [
            142,
            246,
            94,
            25972,
            83,
            7466,
            84,
            2756,
            17097,
            241,
            115,
            40993,
            179,
            120,
            248,
            216,
            33085,
            246,
            181,
            130,
            251,
            183,
            240,
            129,
        ],
    ),
]


@pytest.fixture(scope="module")
def source() -> TokenizerSource:
    return open_model(resolve_model("smollm2:135m")).tokenizer


@pytest.fixture(scope="module")
def tokenizer(source: TokenizerSource) -> Tokenizer:
    return load_tokenizer(*build_tokenizer(source))


def test_info(tokenizer: Tokenizer) -> None:
    info = tokenizer.info
    assert (info.vocab_size, info.style, info.add_bos) == (49152, "byte_level", False)
    assert (info.bos_token_id, info.eos_token_ids) == (1, (0, 2))
    assert info.special_tokens["bos_token"] == "<|im_start|>"
    assert tokenizer.special_token_ids == set(range(17))


@pytest.mark.parametrize(("text", "ids"), IDS)
def test_ids(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(detokenizer.push([i]) for i in ids) == text


def test_chat(tokenizer: Tokenizer, source: TokenizerSource) -> None:
    template = ChatTemplate(source.chat_template, tokenizer.info)
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text == SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode_chat(text)
    assert ids[-12:] == [2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]
    assert ids.count(1) == 3
    system = {"role": "system", "content": ""}
    assert template.render([system], add_generation_prompt=False) == "<|im_start|>system\n<|im_end|>\n"


def test_tool_history_is_legal(tokenizer: Tokenizer, source: TokenizerSource) -> None:
    template = ChatTemplate(source.chat_template, tokenizer.info)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    written = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert template.render(messages, add_generation_prompt=False).endswith(f"<|im_start|>assistant\n{written}<|im_end|>\n")


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    stop, turns = threading.Event(), 0

    def count() -> None:
        nonlocal turns
        while not stop.wait(0.001):
            turns += 1

    other = threading.Thread(target=count)
    other.start()
    ids = tokenizer.encode("word " * 100_000)
    stop.set()
    other.join()
    assert len(ids) == 100_001
    assert turns > 10
