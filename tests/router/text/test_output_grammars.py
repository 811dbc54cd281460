"""Grammars of output formats: what they allow are valid calls, compiled as workers do."""

import contextlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.engine.executor.grammar.compiler import GrammarCompiler
from baton.engine.executor.grammar.judge import GrammarLimits
from baton.engine.executor.grammar.state import CompiledGrammar
from baton.engine.executor.grammar.vocabulary import mask_words
from baton.errors import InvalidArgumentError
from baton.sampling import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from baton_router.call.output_format import (
    Choice,
    OutputFormat,
    ParsingOptions,
    Tool,
)
from baton_router.text.output_parsing.formats.catalog import output_format, tool_format_names
from tests.support.model_outputs import (
    SPECIAL_TOKENS,
    WRITTEN,
    calls_of,
    parse,
    plain_tokenizer,
    special_tokenizer,
    text_of,
)

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", 'x"y']},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
                "ok": {"type": "boolean"},
                "code": {"type": "string", "pattern": "^[a-z]{2}$"},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        strict=True,
    ),
    Tool(
        "get",
        {
            "type": "object",
            "properties": {"n": {"$ref": "#/$defs/n"}},
            "required": ["n"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        },
    ),
)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
WEATHER = ("get_weather", {"city": "Rome", "days": 3})
LOOSE = (Tool("get", {"type": "object", "properties": {"n": {"type": "integer"}}}), Tool("any"))
every_format = pytest.mark.parametrize("name", tool_format_names())
every_choice = pytest.mark.parametrize("choice", [Choice.AUTO, Choice.REQUIRED, Choice.NAMED])


class Model:
    """Tokenizer of a model, the compiler of its workers, and random outputs."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        tokenizer.save(str(folder / "tokenizer.json"))
        self.tokenizer = tokenizer
        self.size = tokenizer.get_vocab_size()
        # As that of gpt-oss, whose calls end an output.
        call = tokenizer.token_to_id("<|call|>")
        self.ends = frozenset({0, 2} | ({call} if call is not None else set()))
        # A busy machine takes longer to compile.
        limits = GrammarLimits(time_s=60.0)
        self.compiler = GrammarCompiler(folder, self.size, self.ends, limits=limits)
        marks = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
        self._is_mark = self._flags(mark for mark in marks if mark is not None)
        self._is_end = self._flags(self.ends)
        # Random tokens hardly ever spell a mark that is no token.
        self._spelled = [
            tokenizer.encode(mark, add_special_tokens=False).ids
            for mark in ("</think>", "</parameter>\n", *SPECIAL_TOKENS)
            if tokenizer.token_to_id(mark) is None
        ]

    def _flags(self, token_ids: Iterable[int]) -> np.ndarray:
        flags = np.zeros(32 * mask_words(self.size), bool)
        flags[list(token_ids)] = True
        return flags

    def format(self, tools: str | None, reasoning: str | None = "think") -> OutputFormat:
        return output_format(tools, "harmony" if tools == "harmony" else reasoning, self.tokenizer)

    def compile(self, text: str) -> CompiledGrammar:
        return self.compiler.compile(Grammar(GrammarKind.EBNF, text))

    def write(self, text: str, seed: int, most_tokens: int = 250) -> tuple[list[int], bool]:
        """Returns the tokens of a random output of which marks are a large part, and whether it has
        ended."""
        draws = random.Random(seed)
        state = self.compile(text).start()
        token_ids: list[int] = []
        spelling: list[int] = []
        while len(token_ids) < most_tokens:
            row = np.zeros(mask_words(self.size), np.int32)
            state.fill_mask(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits)
            others = allowed[~self._is_end[allowed]]
            if not len(others) or (len(others) < len(allowed) and draws.random() < 0.3):
                assert len(others) < len(allowed), state.failure
                return token_ids, True
            marks = others[self._is_mark[others]]
            if not spelling and self._spelled and draws.random() < 0.3:
                spelling = list(draws.choice(self._spelled))
            if spelling and spelling[0] in others:
                token_ids.append(spelling.pop(0))
            else:
                spelling = []
                choices = marks if len(marks) and draws.random() < 0.3 else others
                token_ids.append(int(draws.choice(choices)))
            assert state.accept(token_ids[-1]), state.failure
        return token_ids, False

    def allows(self, text: str, output: str) -> bool:
        """Whether the grammar allows the output, up to the end."""
        try:
            token_ids = self.tokenizer.encode(output, add_special_tokens=False).ids
            state = self.compile(text).start([i for i in token_ids if i not in self.ends])
        except InvalidArgumentError as error:
            if "does not allow it" not in str(error):
                raise
            return False
        return state.accept(0)

    def text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


@pytest.fixture(scope="module", params=["plain", "special"])
def model(request, tmp_path_factory) -> Iterator[Model]:
    """A model without special tokens of formats, and one with those of all."""
    tokenizer = plain_tokenizer() if request.param == "plain" else special_tokenizer()
    made = Model(tmp_path_factory.mktemp("tokenizer"), tokenizer)
    with contextlib.closing(made.compiler):
        yield made


@pytest.fixture(scope="module")
def special(tmp_path_factory) -> Iterator[Model]:
    made = Model(tmp_path_factory.mktemp("tokenizer"), special_tokenizer())
    with contextlib.closing(made.compiler):
        yield made


def grammar_of(made: OutputFormat, options: ParsingOptions, inner: str | None = None) -> str:
    text = made.grammar(options, inner)
    assert text is not None
    return text


def check(made: OutputFormat, options: ParsingOptions, output: str) -> None:
    """Checks that all calls of an output follow their schemas."""
    pieces = [output[at : at + 3] for at in range(0, len(output), 3)]
    parts = parse(made.parser(options), pieces)
    calls = calls_of(parts)
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
    if options.choice is not Choice.AUTO:
        assert calls
    if options.choice is Choice.NAMED:
        assert [name for name, _ in calls] == [options.tool_name]
    if options.one_tool_call:
        assert len(calls) <= 1


@every_format
@every_choice
def test_random_outputs_of_a_grammar_are_valid_calls(model, name, choice):
    made, num_ended = model.format(name), 0
    for seed in range(3):
        options = ParsingOptions(
            tools=TOOLS,
            choice=choice,
            tool_name="get_weather",
            one_tool_call=seed % 2 == 0,
            splits_reasoning=True,
            is_reasoning_open=seed == 2,
        )
        token_ids, has_ended = model.write(grammar_of(made, options), seed)
        num_ended += has_ended
        if has_ended:
            check(made, options, model.text(token_ids))
        else:
            parse(made.parser(options), [model.text(token_ids)])
    assert num_ended


@every_format
@every_choice
def test_reasoning_ends_at_its_budget(special, name, choice):
    made = special.format(name)
    for seed in range(3):
        options = ParsingOptions(
            tools=TOOLS,
            choice=choice,
            tool_name="get",
            splits_reasoning=True,
            max_reasoning_tokens=5 * seed,
            is_reasoning_open=True,
        )
        token_ids, has_ended = special.write(grammar_of(made, options), seed)
        if has_ended:
            check(made, options, special.text(token_ids))
        end = special.tokenizer.token_to_id("<|end|>" if name == "harmony" else "</think>")
        assert token_ids.index(end) <= 5 * seed


# No prompt closes the reasoning of harmony.
@pytest.mark.parametrize("name", [name for name in tool_format_names() if name != "harmony"])
def test_grammar_allows_no_reasoning_after_a_closed_one(model, name):
    way = next(way for way, written in WRITTEN.items() if written.format_name == name)
    options = ParsingOptions(tools=TOOLS, choice=Choice.REQUIRED, is_reasoning_over=True)
    text = grammar_of(model.format(name), options)
    assert not model.allows(text, f"<think>\nHm.\n</think>\n\n{WRITTEN[way].write([WEATHER], '')}")
    model.write(text, 0)  # it allows anything at all


def test_budget_is_refused_where_no_token_ends_reasoning(tmp_path):
    made = output_format(None, "granite", special_tokenizer())
    with pytest.raises(InvalidArgumentError, match="max_reasoning_tokens: is 9, but the mark"):
        made.grammar(ParsingOptions(max_reasoning_tokens=9))


@pytest.mark.parametrize(
    "way", [key for key in WRITTEN if key not in {"mistral-ids", "harmony-role", "pythonic"}]
)
def test_grammar_allows_what_models_write(model, way):
    is_special = model.tokenizer.token_to_id("[ARGS]") is not None
    if way == ("mistral" if is_special else "mistral-arguments"):
        pytest.skip("the tokenizer decides about the form of Mistral's calls")
    written = WRITTEN[way]
    made = model.format(written.format_name)
    calls = [("get", {"n": 42}), ("get", {"n": 7})]
    if way == "harmony":
        calls = calls[:1]
    if not is_special and way == "pythonic-marks":
        pytest.skip("without the tokens, the marks are not asked for")
    text = written.write(calls, "")
    required = ParsingOptions(tools=TOOLS, choice=Choice.REQUIRED)
    auto = ParsingOptions(tools=TOOLS)
    for options in (required, auto):
        assert model.allows(grammar_of(made, options), text)
    one = ParsingOptions(tools=TOOLS, choice=Choice.REQUIRED, one_tool_call=True)
    assert model.allows(grammar_of(made, one), text) == (len(calls) == 1)
    if written.takes_text:
        before = written.write(calls, "Let me see.")
        assert model.allows(grammar_of(made, auto), before)
        assert model.allows(grammar_of(made, required), before) == (way == "harmony")
    if way != "harmony":
        thought = f"<think>\nHm.\n</think>\n\n{text}"
        assert model.allows(grammar_of(made, required), thought)
        assert model.allows(grammar_of(made, auto), thought)


@pytest.mark.parametrize("call", [
    ("get", {"n": 142}), ("get", {"n": "x"}), ("get", {}), ("get", {"n": 4, "m": 4}),
    ("unknown", {"n": 4}), ("get_weather", {"n": 4}),
])  # fmt: skip
@pytest.mark.parametrize("way", WRITTEN)
def test_grammar_forbids_calls_that_break_their_schema(special, way, call):
    written = WRITTEN[way]
    made = special.format(written.format_name)
    text = written.write([call], "")
    for choice in (Choice.AUTO, Choice.REQUIRED):
        options = ParsingOptions(tools=TOOLS, choice=choice)
        assert not special.allows(grammar_of(made, options), text)


@every_format
def test_grammar_allows_text_alone_only_where_calls_are_optional(model, name):
    made = model.format(name)
    text = "<|channel|>final<|message|>Hello!" if name == "harmony" else "Hello!"
    assert model.allows(grammar_of(made, ParsingOptions(tools=TOOLS)), text)
    required = ParsingOptions(tools=TOOLS, choice=Choice.REQUIRED)
    assert not model.allows(grammar_of(made, required), text)


@every_format
def test_format_needs_no_grammar_where_nothing_is_forced(model, name):
    made = model.format(name)
    assert made.grammar(ParsingOptions(tools=LOOSE)) is None
    assert made.grammar(ParsingOptions()) is None
    assert made.grammar(ParsingOptions(tools=TOOLS, choice=Choice.NONE)) is None
    assert made.grammar(ParsingOptions(tools=LOOSE, one_tool_call=True)) is not None


@every_format
def test_grammar_holds_tools_without_strict_to_their_schemas(special, name):
    made = special.format(name)
    options = ParsingOptions(tools=LOOSE, choice=Choice.REQUIRED, splits_reasoning=True)
    for seed in range(3):
        token_ids, has_ended = special.write(grammar_of(made, options), seed)
        parts = parse(made.parser(options), [special.text(token_ids)])
        if has_ended:
            for tool, arguments in calls_of(parts):
                assert isinstance(arguments, dict)
                if tool == "get" and "n" in arguments:
                    assert isinstance(arguments["n"], int | float)


@every_format
def test_inner_schema_binds_the_text_after_reasoning(special, name):
    made = special.format(name)
    inner = json.dumps({"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]})
    options = ParsingOptions(splits_reasoning=True, is_reasoning_open=True, max_reasoning_tokens=5)
    text = grammar_of(made, options, inner)
    close = "</think>\n\n"
    if name == "harmony":
        close = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert special.allows(text, f'Hm.{close}{{"x": 1}}')
    assert not special.allows(text, f'Hm.{close}{{"x": 2}}')
    assert not special.allows(text, '{"x": 1}')
    with_tools = ParsingOptions(tools=LOOSE)
    calls = WRITTEN[name].write([("get", {"n": 4})], "")
    if name != "mistral":
        assert special.allows(grammar_of(made, with_tools, inner), calls)
    assert not special.allows(grammar_of(made, with_tools, inner), "Hello!")


def test_grammar_of_pythonic_calls_names_arguments_in_ascii(special):
    # U+0788 U+07A8: a letter and its vowel, which is no letter for Python's patterns.
    made = special.format("pythonic")
    text = grammar_of(made, ParsingOptions(tools=LOOSE, choice=Choice.REQUIRED))
    assert special.allows(text, "<|python_start|>[any(aA_1=1)]<|python_end|>")
    assert not special.allows(text, "<|python_start|>[any(a\u0788\u07a8=1)]<|python_end|>")


def test_inner_schema_binds_text_of_a_model_without_formats(special):
    made = special.format(None, None)
    text = grammar_of(made, ParsingOptions(), '{"const": "x"}')
    assert special.allows(text, '"x"')
    assert not special.allows(text, "x")


@pytest.mark.symptom(
    "club-3090#45",
    there="`propertyNames` in the schemas of Claude Code is refused",
    here="Leaves it out of the grammar of a tool that is not strict.",
)
@every_format
def test_grammar_takes_schemas_with_keywords_it_cannot_follow(special, name):
    parameters = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "not": {"const": 3}},
            "not": {"type": "string", "format": "unheard-of"},
            "l": {"type": "array", "uniqueItems": True, "items": {"contains": {}, "if": {}}},
        },
        "dependentRequired": {"n": ["l"]},
        "propertyNames": {"type": "string"},
    }
    made = special.format(name)
    loose = ParsingOptions(tools=[Tool("get", parameters)], choice=Choice.REQUIRED)
    special.compile(grammar_of(made, loose))
    strict = ParsingOptions(tools=[Tool("get", parameters, strict=True)])
    with pytest.raises(InvalidArgumentError, match="Unimplemented keys"):
        special.compile(grammar_of(made, strict))
    known = {"type": "object", "properties": {"a": {"type": "string", "format": "unheard-of"}}}
    special.compile(grammar_of(made, ParsingOptions(tools=[Tool("get", known, strict=True)])))


# What clients send in schemas of tools, and which part of it no grammar can follow.
NULLS = {"type": "object", "properties": None, "required": None, "additionalProperties": None}
LOOK_AHEAD = {"type": "string", "pattern": "^(?!x)[a-z]+$"}
OVERLAP = {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}
UNFOLLOWED: dict[str, tuple[object, str]] = {
    "a pattern with look-around": (LOOK_AHEAD, ".pattern"),
    "one in a definition": ({"$ref": "#/$defs/mail"}, "$defs.mail.pattern"),
    "overlapping alternatives": (OVERLAP, ".oneOf"),
    "an unknown type": ({"type": ["string", "any"]}, ".type"),
    "an unknown reference": ({"$ref": "#/$defs/none"}, ".$ref"),
    "a length that is text": ({"items": {"type": "string", "maxLength": "9"}}, ".items.maxLength"),
    "a null": ({"type": "string", "maxLength": None}, ".maxLength"),
    "an unfollowed keyword": ({"not": {"type": "string"}}, ".not"),
}


def tool_with(parameter: object, *, strict: bool = False) -> Tool:
    """A tool that takes this parameter and one that any grammar can follow."""
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "p": parameter},
        "required": ["n"],
        "additionalProperties": False,
        "$defs": {"mail": LOOK_AHEAD},
    }
    return Tool("odd", parameters, strict=strict)


@pytest.mark.symptom(
    "opencode#15540",
    there="`required: null` in a tool's schema is refused",
    here="Takes it as absent, also where calls are forced.",
)
@every_format
def test_unfollowed_schema_leaves_the_others_their_grammar(special, name):
    tools = [*TOOLS, Tool("empty", NULLS), *(tool_with(p) for p, _ in UNFOLLOWED.values())]
    tools[3:] = [replace(tool, name=f"odd_{at}") for at, tool in enumerate(tools[3:])]
    made = special.format(name)
    text = grammar_of(made, ParsingOptions(tools=tools, choice=Choice.REQUIRED))
    special.compile(text)
    if name == "hermes":
        call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
        assert special.allows(text, call.format("odd_0", '{"n": 3, "p": "a"}'))
        assert not special.allows(text, call.format("odd_0", '{"n": "3"}'))
        assert not special.allows(text, call.format("odd_1", '{"n": 3, "q": "a"}'))
        assert not special.allows(text, call.format("get_weather", '{"city": "Oslo"}'))


@every_format
@pytest.mark.parametrize("case", UNFOLLOWED)
def test_unfollowed_schema_of_a_strict_tool_is_named(special, name, case):
    parameter, path = UNFOLLOWED[case]
    tools = [*TOOLS, tool_with(parameter, strict=True)]
    with pytest.raises(InvalidArgumentError, match="in the strict tool 'odd'") as caught:
        special.compile(grammar_of(special.format(name), ParsingOptions(tools=tools)))
    field = caught.value.field
    assert field.startswith("sampling.grammar[odd]." + ("" if "$defs" in path else "properties.p"))
    assert field.endswith(path)


def test_many_faults_cost_the_tools_behind_them_nothing(special):
    faulty = {"type": "object", "properties": {f"p{i}": LOOK_AHEAD for i in range(100)}}
    tools = [*(Tool(f"odd_{at}", faulty) for at in range(8)), *TOOLS]
    made = special.format("hermes")
    text = grammar_of(made, ParsingOptions(tools=tools, choice=Choice.REQUIRED))
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    assert special.allows(text, call.format("get_weather", '{"city": "Rome", "days": 3}'))
    assert not special.allows(text, call.format("get_weather", '{"city": "Oslo"}'))


@every_format
def test_grammar_of_too_many_tools_is_refused(special, name):
    text = {"type": "string", "enum": ["x" * 100] * 10}
    tools = [Tool(f"tool_{i}", {"type": "object", "properties": {"a": text}}) for i in range(100)]
    options = ParsingOptions(tools=tools, choice=Choice.REQUIRED)
    with pytest.raises(InvalidArgumentError, match=f"tools: .* at most {MAX_GRAMMAR_BYTES}"):
        special.format(name).grammar(options)


def test_forced_calls_of_an_unknown_format_are_refused(special):
    options = ParsingOptions(tools=TOOLS, choice=Choice.REQUIRED)
    with pytest.raises(InvalidArgumentError, match="tools: the model's format of tool calls is"):
        special.format(None).grammar(options)


@pytest.mark.parametrize("name", ["pythonic", "qwen3-coder"])
def test_parameters_with_alternatives_at_top_are_refused(special, name):
    tool = Tool("get", {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, strict=True)
    with pytest.raises(InvalidArgumentError, match="'get' has 'anyOf' at its top"):
        special.format(name).grammar(ParsingOptions(tools=[tool]))
    loose = ParsingOptions(tools=[replace(tool, strict=False)], choice=Choice.REQUIRED)
    special.compile(grammar_of(special.format(name), loose))


def test_marks_that_are_spelled_out_do_not_begin_a_call(special):
    made = special.format("hermes")
    text = grammar_of(made, ParsingOptions(tools=TOOLS))
    state = special.compile(text).start()
    for character in "<tool_call":
        assert state.accept(special.tokenizer.token_to_id(character)), character
    assert not state.accept(special.tokenizer.token_to_id(">"))
    assert state.accept(special.tokenizer.token_to_id("s"))


def test_text_of_reasoning_alone_stays_free(special):
    made = special.format("hermes")
    options = ParsingOptions(max_reasoning_tokens=3, splits_reasoning=True)
    text = grammar_of(made, options)
    assert special.allows(text, "<think>a b</think>Any text at all.")
    assert special.allows(text, "Any text at all.")
    assert not special.allows(text, "<think>a b c d e f g</think>Any text.")
    assert text_of(parse(made.parser(options), ["<think>a</think>b"])) == "b"
