"""Forms of outputs, compiled: what they accept token by token, how mistakes are named, and what is kept."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from text_vocabularies import byte_level, make, sentencepiece

from kvist.errors import InvalidRequestError
from kvist.request import StructuredOutputsParams
from kvist.text import grammar as module
from kvist.text.grammar import GrammarCompiler
from kvist.text.tokenizer import Tokenizer

TOKENIZERS = {"byte_level": (make(byte_level()), 1), "sentencepiece": (make(sentencepiece(add_space_prefix=True)), 2)}


@pytest.fixture(params=TOKENIZERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def compiler(kind: str = "byte_level") -> GrammarCompiler:
    tokenizer, eos = TOKENIZERS[kind]
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [eos])


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte: the way of spelling that every vocabulary has."""
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_token_ids}
    return [ids[bytes([byte])] for byte in text.encode()]


def accepted(kind: str, form: dict[str, Any], text: str) -> bool:
    """Whether the whole text is accepted and may end there."""
    matcher = compiler(kind).compile(StructuredOutputsParams.of(form)).new_matcher()
    ids = byte_ids(TOKENIZERS[kind][0], text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json": {"enum": ["😀🧪漢字é"]}}, ['"😀🧪漢字é"'], ['"😀"', "x"]),
        ({"json": '{"type": "integer"}'}, ["-12", "0"], ["1.5", "01", ""]),
        ({"json": True}, ["3.5", '[{"a": null}]', "true"], ["nope", "[1"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": "c"}]}', '{\n  "a": 1\n}'], ["[]", '"a"', "{" + " " * 21 + "}"]),
        ({"json_object": True, "disable_any_whitespace": True}, ['{"a":[1,2]}'], ['{"a": 1}']),
        ({"json_object": True, "whitespace_pattern": " ?"}, ['{"a": 1}'], ['{"a":  1}', '{\n"a":1}']),
        ({"regex": r"[0-9]{3}-(x|yy)"}, ["123-x", "000-yy"], ["12-x", "123-y", "123-xy"]),
        ({"choice": ["", "ab", 'a"b\\\n😀']}, ["", "ab", 'a"b\\\n😀'], ["a", "abc"]),
        ({"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]+/'}, ["a1", "a12"], ["a", "b1"]),
        ({"grammar": 'root ::= "yes" | "no" word\nword ::= [a-z]+'}, ["yes", "nope"], ["no", "YES"]),
        ({"choice": [f"value {n}" for n in range(3000)]}, ["value 0", "value 2999"], ["value 3000", "value"]),
        ({"choice": ["<s>", "</s> and <|im_end|>"]}, ["<s>", "</s> and <|im_end|>"], ["<"]),
    ],
)
def test_a_form_accepts_what_has_it_and_nothing_else(kind: str, form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert all(accepted(kind, form, text) for text in good)
    assert not any(accepted(kind, form, text) for text in bad)


@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        ({"json": {"type": "nope"}}, "json", "Invalid type: nope"),
        ({"json": {"not": {}}}, "json", 'Unimplemented keys: ["not"]'),
        ({"json": False}, "json", "JSON schema"),
        ({"json": {"minItems": 3, "maxItems": 1, "type": "array"}}, "json", "minItems"),
        ({"json": {"$ref": "http://localhost/x"}}, "json", "does not fetch"),
        ({"json": {"type": "string", "pattern": "("}}, "json", "unclosed group"),
        ({"json": {}, "whitespace_pattern": "("}, "json", "unclosed group"),
        ({"json": {"anyOf": [{"enum": ["a", 2**53 + 1]}, {"maximum": 2**63 - 1}]}}, "json", "9007199254740993"),
        ({"json": "{"}, "json", "not that of a JSON schema"),
        ({"json": 3}, "json", "not 3"),
        ({"json": {"maximum": float("nan")}}, "json", "cannot be written as JSON"),
        ({"regex": "("}, "regex", "unclosed group"),
        ({"regex": "a(?=b)"}, "regex", "look-around"),
        ({"regex": "a" * (module.MAX_CHARACTERS + 1)}, "regex", "are the most"),
        ({"regex": 3}, "regex", "takes a string"),
        ({"grammar": "("}, "grammar", "expecting rule"),
        ({"grammar": "start: missing"}, "grammar", "missing"),
        ({"grammar": "start: start"}, "grammar", "no text has this form"),
        ({"grammar": "root ::= ("}, "grammar", "GBNF"),
        ({"grammar": "{"}, "grammar", "begins as JSON does"),
        ({"grammar": "{" + "[" * 100_000}, "grammar", "begins as JSON does"),
        ({"grammar": '{"grammars": []}'}, "grammar", "without a list of grammars"),
        ({"grammar": '{"grammars": [3]}'}, "grammar", "without a list of grammars"),
        ({"grammar": '{"grammars": [{"lark_grammar": 3}]}'}, "grammar", "is no text"),
        ({"grammar": '{"grammars": [{"name": "a"}]}'}, "grammar", "grammar"),
        ({"grammar": "start: %json " + "[" * 100_000}, "grammar", "recursion limit"),
        ({"choice": []}, "choice", "at least one"),
        ({"choice": "ab"}, "choice", "takes a list"),
        ({"json_object": 1}, "json_object", "True or False"),
        ({"structural_tag": "x"}, "structural_tag", "not offered"),
    ],
)
def test_mistakes_are_named_with_the_grammars_own_message(form: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler().compile(StructuredOutputsParams.of(form))
    assert caught.value.param == f"structured_outputs.{param}"
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "none of them"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"regex": "a", "whitespace_pattern": " "}, "JSON only"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "exclude each other"),
    ],
)
def test_exactly_one_form_and_only_what_it_takes(form: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        StructuredOutputsParams.of(form)


def test_what_is_compiled_is_kept_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    one = compiler()
    forms = [StructuredOutputsParams(regex=f"a{{{n}}}") for n in range(1, 5)]
    first = one.compile(forms[0])
    assert one.compile(StructuredOutputsParams(regex="a{1}")) is first
    for form in forms[1:3]:
        one.compile(form)
    assert one.compile(forms[0]) is first, "used last"
    one.compile(forms[3])
    assert one.num_kept == 3
    assert one.compile(forms[0]) is first
    second = one.compile(forms[1])
    assert one.compile(forms[1]) is second, "gone, and compiled again"


def test_matchers_of_one_form_are_apart() -> None:
    grammar = compiler().compile(StructuredOutputsParams(regex="ab"))
    one, other = grammar.new_matcher(), grammar.new_matcher()
    assert one.consume_token(byte_ids(TOKENIZERS["byte_level"][0], "a")[0])
    assert one.compute_bitmask() != other.compute_bitmask()
    assert other.compute_bitmask() == grammar.new_matcher().compute_bitmask()


def test_several_threads_may_compile_at_once() -> None:
    one = compiler()
    seen: list[object] = []

    def work(n: int) -> None:
        for m in range(5):
            seen.append(one.compile(StructuredOutputsParams(choice=[f"{n} {m}"])))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == one.num_kept == 20


def test_ends_that_the_vocabulary_does_not_have_are_left_out() -> None:
    tokenizer = TOKENIZERS["byte_level"][0]
    form = StructuredOutputsParams(regex="a*")
    mask = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1, 99999]).compile(form).new_matcher().compute_bitmask()
    assert [token for token in range(tokenizer.vocab_size) if mask[token // 8] >> token % 8 & 1] == [1, *byte_ids(tokenizer, "a")]
    with pytest.raises(InvalidRequestError, match="no token that ends a text"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size, [99999]).compile(form)


def test_a_tokenizer_that_means_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make(byte_level())
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token_id: b"q")
    with pytest.raises(InvalidRequestError, match="tokenizer cannot be used"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size, [1]).prepare()


def test_a_schema_that_would_compile_for_minutes_is_refused() -> None:
    names = [f"k{i}" for i in range(module.MAX_OPTIONAL + 1)]
    schema = {"properties": {name: {} for name in names}, "required": names[1:]}
    assert module.num_optional({"$defs": {"a": [schema, {"properties": {"b": schema}}]}}) == 3
    with pytest.raises(InvalidRequestError, match=f"{len(names)} properties that are not required") as caught:
        compiler().compile(StructuredOutputsParams(json={"anyOf": [{"properties": schema["properties"], "required": [[]]}]}))
    assert caught.value.param == "structured_outputs.json"


def test_a_chain_of_definitions_as_long_as_a_grammar_may_be_ends_no_process() -> None:
    """The parser of grammars calls itself along it: on a common stack some thousand are enough to end the server."""
    rules = [f"{name}{i}: {name}{i + 1}" for name in ("A", "b") for i in range(12_000)]
    lark = "\n".join(["start: A0 b0", *rules, 'A12000: "x"', 'b12000: "y"'])
    assert module.MAX_CHARACTERS / 2 < len(lark) < module.MAX_CHARACTERS
    assert accepted("byte_level", {"grammar": lark}, "xy")
    chain = {f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}], "minItems": 1} for i in range(2000)}
    schema = {"$defs": {**chain, "a2000": {"type": "null"}}, "$ref": "#/$defs/a0"}
    matcher = compiler().compile(StructuredOutputsParams(json=schema)).new_matcher()
    assert matcher.try_consume_tokens(byte_ids(TOKENIZERS["byte_level"][0], "[" * 100)) == 100
