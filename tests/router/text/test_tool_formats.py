"""Parsers of tool calls: what was written comes back, wherever the output is cut."""

import functools
import itertools
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from baton.errors import InvalidArgumentError
from baton_router.call.output_format import (
    Choice,
    OutputFormat,
    ParsingOptions,
    Tool,
)
from baton_router.call.parts import Text, ToolCallArguments, ToolCallStart, joined
from baton_router.text.output_parsing.formats.catalog import (
    FormatNames,
    detect,
    output_format,
    takes_tools,
    tool_format_names,
)
from tests.support.model_outputs import (
    SPECIAL_TOKENS,
    WRITTEN,
    Written,
    calls_of,
    parse,
    plain_tokenizer,
    special_tokenizer,
    text_of,
)

TOKENIZER = special_tokenizer()
# Two whose names begin alike, and one whose parameters have any type.
TOOLS = (
    Tool("get", {"type": "object", "properties": {"city": {"type": "string"}}}),
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}}),
    Tool("any.tool-1"),
)
AUTO = ParsingOptions(tools=TOOLS)
REQUIRED = ParsingOptions(tools=TOOLS, choice=Choice.REQUIRED)
NASTY: list[Any] = [
    ("get_weather", {"city": 'Rome "</tool_call>" }]) \\ \n[TOOL_CALLS] é 🎉 \u2028'}),
    ("get", {}),
    ("any.tool-1", {"a": {"b": [1, -2.5e3, True, None, {"c": "}"}]}, "d": "<|call|>", "e": ""}),
]
every_way = pytest.mark.parametrize("way", WRITTEN.values(), ids=WRITTEN)
every_choice = pytest.mark.parametrize("options", [AUTO, REQUIRED], ids=["auto", "required"])
every_format = pytest.mark.parametrize("name", tool_format_names())


@functools.cache
def format_of(name: str) -> OutputFormat:
    return output_format(name, None, TOKENIZER)


def parts_of(way: Written, text: str, *cuts: int, options: ParsingOptions = AUTO):
    parser = format_of(way.format_name).parser(options)
    places = [0, *sorted(cuts), len(text)]
    return parse(parser, [text[a:b] for a, b in itertools.pairwise(places)])


def sample(way: Written) -> tuple[list[Any], str]:
    """Calls that are hard to parse, and what a model writes for them."""
    calls = NASTY
    if not way.keeps_strings:
        calls = [("get_weather", {"city": 'Rome "</tool_call>" }]) é'}), *NASTY[1:]]
    return calls, way.write(calls, "Sure [1] <b>." if way.takes_text else "")


@every_way
@every_choice
def test_parser_returns_calls_when_cut_at_every_place(way, options):
    calls, text = sample(way)
    for cut in range(len(text) + 1):
        parts = parts_of(way, text, cut, options=options)
        assert calls_of(parts) == calls, text[:cut]
        assert text_of(parts) == ("Sure [1] <b>." if way.takes_text else "")


@every_way
def test_parser_returns_calls_character_by_character(way):
    calls, text = sample(way)
    for options in (AUTO, REQUIRED):
        assert calls_of(parts_of(way, text, *range(len(text)), options=options)) == calls


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.sampled_from(["</tool_call>", '"}', "<|call|>", "[ARGS]", "\\", "; {", "```", "'\""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab\"'}é", max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
written_calls = st.lists(
    st.tuples(
        st.sampled_from([tool.name for tool in TOOLS]),
        st.dictionaries(st.sampled_from(["a", "b_1", "city2"]), values, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
# Ends without whitespace, which separates text from calls.
texts = st.text("ab <[{tool_\n|é", max_size=12).map(lambda text: f"x{text}.")


@every_way
@settings(max_examples=25, deadline=None)
@given(calls=written_calls, text=texts, cuts=st.lists(st.integers(0, 2000), max_size=9))
def test_parser_returns_any_calls_in_any_pieces(way, calls, text, cuts):
    if not way.keeps_strings:
        calls = [(name, {"a": [json.dumps(arguments)]}) for name, arguments in calls]
        calls = [call for call in calls if "</parameter>" not in json.dumps(call)]
    text = text if way.takes_text else ""
    written = way.write(calls, text)
    cuts = [cut % (len(written) + 1) for cut in cuts]
    for options in (AUTO, REQUIRED):
        parts = parts_of(way, written, *cuts, options=options)
        assert calls_of(parts) == calls
        assert text_of(parts) == text


@every_way
@every_choice
def test_parser_returns_cut_call_in_part_or_not_at_all(way, options):
    calls, text = sample(way)
    for end in range(len(text)):
        parts = parts_of(way, text[:end], end // 2, options=options)
        starts = [part.name for part in parts if isinstance(part, ToolCallStart)]
        assert starts == [name for name, _ in calls][: len(starts)]
        assert is_text_without_marks(text_of(parts), way), text[:end]


def is_text_without_marks(shown: str, way: Written) -> bool:
    """Whether this is the text before the calls, or its beginning; what may begin a mark, but is
    none yet, may follow."""
    text = "Sure [1] <b>." if way.takes_text else ""
    begun = shown.removeprefix(text).strip()
    return text.startswith(shown) or any(
        token.startswith(begun) and token != begun for token in SPECIAL_TOKENS
    )


@pytest.mark.symptom(
    "vllm#50604, vllm#30439",
    there="the arguments of a call stream in one burst at its end",
    here="Streams them as the model writes them, in every format.",
)
@every_way
@every_choice
def test_parser_streams_arguments_as_they_are_written(way, options):
    text = way.write([("get_weather", {"city": "a" * 50, "days": list(range(50))})], "")
    parser = format_of(way.format_name).parser(options)
    middle = text.index("a" * 50) + 25
    parts = [part for character in text[:middle] for part in parser.push(character)]
    assert parts[0] == ToolCallStart(0, "get_weather")
    pieces = [part.json for part in parts if isinstance(part, ToolCallArguments)]
    assert len(pieces) > 20
    assert "".join(pieces) == '{"city": "' + "a" * 25


@every_way
def test_parser_returns_calls_of_unknown_tools(way):
    text = way.write([("unknown", {"city": "Rome"}), ("get", {})], "")
    for cut in range(len(text) + 1):
        parts = parts_of(way, text, cut)
        assert calls_of(parts) == [("unknown", {"city": "Rome"}), ("get", {})]
        assert text_of(parts) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "get"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "arguments": ""}</tool_call>'),
        ("qwen3-coder", "<tool_call>\n<function=get>\n</function>\n</tool_call>"),
        ("json", '{"name": "get"}'),
        ("json", '[{"name": "get"}]'),
        ("llama3-json", '{"name": "get", "type": "function"}'),
        ("llama3-json", '<|python_tag|>{"name": "get"}'),
        ("mistral", '[TOOL_CALLS] [{"name": "get"}]'),
        ("mistral", "[TOOL_CALLS]get[ARGS]{}"),
        ("pythonic", "[get()]"),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>get<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("harmony", "<|channel|>commentary to=functions.get<|message|><|call|>"),
    ],
)  # fmt: skip
def test_parser_returns_calls_without_arguments(name, text):
    for cut in range(len(text) + 1):
        parts = parts_of(Written(name, lambda *_: ""), text, cut)
        assert calls_of(parts) == [("get", {})]
        assert text_of(parts) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": ["get"], "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("json", '{"name": "Rome"}'),
        ("json", '{"name": "get", "answer": 42}'),
        ("llama3-json", '{"answer": 42}'),
        ("mistral", "[TOOL_CALLS]get[ARGS]5"),
        ("mistral", "[TOOL_CALLS]a b[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]" + "x" * 1000),
        ("pythonic", "[link](https://example.org)"),
        ("pythonic", "[get(1)]"),
        ("pythonic", "[main()]"),
        ("harmony", "<|channel|>" + "x" * 1000),
    ],
)
def test_parser_returns_what_is_no_call_as_text(name, text):
    for cuts in ((), range(0, len(text), 7)):
        parts = parts_of(Written(name, lambda *_: ""), text, *cuts)
        assert text_of(parts) == text
        assert calls_of(parts) == []


DEEP = '{"a":' * 5000


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "get", "arguments": [1]}</tool_call>', "[1]"),
        ("hermes", '<tool_call>{"name": "get", "arguments": 5}</tool_call>', "5"),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": 01}}</tool_call>', '{"a": 01}'),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": NaN}}</tool_call>', '{"a": NaN}'),
        ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"a\\"}"}</tool_call>', '{"a"}'),
        ("hermes", '<tool_call>{"name": "get", "arguments": "\\ud800"}</tool_call>', "\\ud800"),
        ("hermes", '<tool_call>{"name": "get", "arguments": "\\x"}</tool_call>', '"\\x"'),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": [1}}</tool_call>', '{"a": [1}'),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": 1]}}</tool_call>', '{"a": 1]}'),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a": 1}}}</tool_call>', '{"a": 1}'),
        ("hermes", f'<tool_call>{{"name": "get", "arguments": {DEEP}', DEEP),
        ("pythonic", "[get(city=Rome)]", '{"city": '),
        ("pythonic", "[get(a=" + "[" * 100 + "]" * 100 + ")]", '{"a": ' + "[" * 65),
        ("pythonic", "[get(a='x\\uzzzz')]", '{"a": "x'),
        ("pythonic", "<|python_start|>[get(a=b)]<|python_end|>", '{"a": '),
        (
            "qwen3-coder",
            "<tool_call><function=get><parameter=a>\n1\n</parameter> x</tool_call>",
            '{"a": 1}',
        ),
        (
            "qwen3-coder",
            "<tool_call><function=get>\n<parameter=city>\n1\n</function>",
            '{"city": "1\\n</function>',
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.get <|constrain|>code<|message|>ls<|call|>",
            "ls",
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.get<|message|>{} and more<|call|>",
            "{}",
        ),
    ],
)  # fmt: skip
def test_parser_returns_malformed_arguments_as_written(name, text, arguments):
    for cuts in ((), range(0, len(text), 7)):
        parts = joined(parts_of(Written(name, lambda *_: ""), text, *cuts))
        assert parts == [ToolCallStart(0, "get"), ToolCallArguments(0, arguments)]


def test_parser_returns_what_follows_a_malformed_list_as_text():
    parts = parts_of(WRITTEN["json"], '[{"name": "get", "arguments": {}}, 5]')
    assert (calls_of(parts), text_of(parts)) == ([("get", {})], ", 5]")


def test_parser_returns_calls_after_a_malformed_one():
    broken = '<tool_call>{"name": get}</tool_call>'
    text = f'{broken} and <tool_call>{{"name": "get", "arguments": {{}}}}</tool_call> done'
    parts = parts_of(WRITTEN["hermes"], text, *range(len(text)))
    assert text_of(parts) == f"{broken} and  done"
    assert calls_of(parts) == [("get", {})]


def test_parser_keeps_text_between_and_after_calls():
    call = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    parts = parts_of(WRITTEN["hermes"], f"One\n{call}\nTwo {call}\n\n{call}\n")
    order = [part.text if isinstance(part, Text) else "" for part in parts]
    assert [text for text in order if text] == ["One", "\n\nTwo"]
    assert len(calls_of(parts)) == 3


def test_parser_keeps_whitespace_of_text_without_calls():
    parts = parts_of(WRITTEN["hermes"], " \n One \n\n", 2, 8)
    assert text_of(parts) == " \n One \n\n"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "get", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"arguments": {"a": 1.50}, "name": "get"}', {"a": 1.5}),
        ('{"name": "get", "parameters": {"a": 1}, "id": "x"}', {"a": 1}),
        ('{"name": "get", "arguments": {"a": "line\nbreak"}}', {"a": "line\nbreak"}),
    ],
)
def test_parser_takes_variants_of_objects(text, arguments):
    parts = parts_of(WRITTEN["hermes"], f"<tool_call>{text}</tool_call>")
    assert calls_of(parts) == [("get", arguments)]


def test_parser_keeps_arguments_as_the_model_wrote_them():
    arguments = '{"a": 1.50,"b":1e5, "c":"\\u00e9"}'
    text = f'<tool_call>{{"name": "get", "arguments": {arguments}}}</tool_call>'
    assert ToolCallArguments(0, arguments) in parts_of(WRITTEN["hermes"], text)


def test_pythonic_takes_literals_of_json_and_python():
    text = "[get(a=true, b=False, c=None, d=('x', \"it's\"), e={'k': [1,]}, f='\\x41\\u00e9\\/',)]"
    assert calls_of(parts_of(WRITTEN["pythonic"], text)) == [
        (
            "get",
            {
                "a": True,
                "b": False,
                "c": None,
                "d": ["x", "it's"],
                "e": {"k": [1]},
                "f": "Aé/",
            },
        )
    ]


def test_qwen3_coder_converts_values_by_their_schema():
    text = (
        "<tool_call>\n<function=get>\n<parameter=city>\n42\n</parameter>\n"
        "<parameter=days>\n42\n</parameter>\n<parameter=ok>\nTrue\n</parameter>\n"
        "<parameter=note>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>"
    )
    assert calls_of(parts_of(WRITTEN["qwen3-coder"], text)) == [
        ("get", {"city": "42", "days": 42, "ok": True, "note": "two\nlines"})
    ]


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
DEFINITIONS = {
    "Text": {"type": "string"},
    "Maybe": {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]},
    "Tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Tree"}}, {"type": "null"}]},
    "Loop": {"$ref": "#/$defs/Loop"},
}


@pytest.mark.symptom(
    "vllm#36032, sglang#30832",
    there="an object of an `anyOf` parameter becomes a string",
    here="Gives each parameter a type that its schema admits: an object here.",
)
@pytest.mark.symptom(
    "mlx-lm#1910",
    there="a string of digits becomes a number",
    here="Keeps the text where the schema admits a string and no number.",
)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (OPTIONAL, "12345", "12345"),
        (OPTIONAL, "1.10", "1.10"),
        (OPTIONAL, "true", "true"),
        (OPTIONAL, '{"a": 1}', '{"a": 1}'),
        (OPTIONAL, '"x"', '"x"'),
        (OPTIONAL, "null", None),
        (OPTIONAL, "None", None),
        ({"type": ["string", "null"]}, "12345", "12345"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"type": "string", "format": "password"}, "12345", "12345"),
        ({"type": "string", "minLength": 2}, "12345", "12345"),
        ({"$ref": "#/$defs/Text"}, "12345", "12345"),
        ({"$ref": "#/$defs/Maybe"}, "12345", "12345"),
        ({"$ref": "#/$defs/Maybe"}, "null", None),
        ({"$ref": "#/$defs/Tree"}, "[[], null]", [[], None]),
        ({"$ref": "#/$defs/Loop"}, "12345", 12345),
        ({"$ref": "#/$defs/Unknown"}, "12345", 12345),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["auto", 1]}, "1", 1),
        ({"enum": ["auto", None]}, "null", None),
        ({"const": "7"}, "7", "7"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "12345", "12345"),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "12345", 12345),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "1.10", "1.10"),
        ({"anyOf": [{"type": "number"}, {"type": "string"}]}, "5", 5),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, '{"a": 1}', {"a": 1}),
        ({"type": "integer"}, "12345", 12345),
        ({"type": "boolean"}, "False", False),
        ({"type": "object"}, '{"a": "two\nlines"}', {"a": "two\nlines"}),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({}, "12345", 12345),
        (True, "x", "x"),
        (False, "12345", 12345),
    ],
)
def test_qwen3_coder_types_values_by_all_that_schema_admits(schema, text, value):
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}
    options = ParsingOptions(tools=[Tool("get", parameters)])
    parameter = f"<parameter=a>\n{text}\n</parameter>"
    written = f"<tool_call>\n<function=get>\n{parameter}\n</function>\n</tool_call>"
    for cut in range(len(written) + 1):
        assert calls_of(parts_of(WRITTEN["qwen3-coder"], written, cut, options=options)) == [
            ("get", {"a": value})
        ]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # A grammar has these written as JSON, and strings that may be any as they are.
        (OPTIONAL, '"12345"', "12345"),
        ({"enum": ["1", "2"]}, '"1"', "1"),
        ({"type": "string"}, '"1"', '"1"'),
        ({"type": "string", "format": "password"}, "12345", "12345"),
    ],
)
def test_qwen3_coder_reads_what_its_grammar_has_written(schema, text, value):
    tool = Tool("get", {"type": "object", "properties": {"a": schema}})
    options = ParsingOptions(tools=[tool], choice=Choice.REQUIRED)
    written = f"<tool_call><function=get><parameter=a>\n{text}\n</parameter></function></tool_call>"
    parts = parts_of(WRITTEN["qwen3-coder"], written, options=options)
    assert calls_of(parts) == [("get", {"a": value})]


MARKS = "".join(way.write([("get", {"city": "x"})], "y") for way in WRITTEN.values())


@every_format
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_parser_survives_random_text(name, data):
    fragment = st.builds(
        lambda at, length: MARKS[at : at + length],
        st.integers(0, len(MARKS)),
        st.integers(0, 40),
    )
    pieces = data.draw(st.lists(fragment | st.text(max_size=5), max_size=12))
    for options in (AUTO, REQUIRED, ParsingOptions(splits_reasoning=True)):
        parts = parse(format_of(name).parser(options), pieces)
        if name != "harmony" and not any(isinstance(part, ToolCallStart) for part in parts):
            text, shown = "".join(pieces), text_of(parts)
            assert text.startswith(shown)
            # What is left out began as a call, and was cut off.
            assert not text[len(shown) :] or (options.tools and text[len(shown)] in "<[{")


@every_format
def test_parser_returns_text_alone_where_no_tool_may_be_called(name):
    text = "<tool_call>{}</tool_call>[TOOL_CALLS]"
    options = ParsingOptions(tools=TOOLS, choice=Choice.NONE)
    assert parse(format_of(name).parser(options), [text]) == [Text(text)]


@every_way
def test_parser_returns_no_call_where_no_tool_may_be_called(way):
    text = way.write([("get", {"city": "Rome"})], "")
    for options in (ParsingOptions(tools=TOOLS, choice=Choice.NONE), ParsingOptions()):
        for cut in range(len(text)):
            parts = parts_of(way, text, cut, options=options)
            assert (text_of(parts), calls_of(parts)) == (text, [])


def test_kept_tokens_are_the_special_tokens_of_the_format():
    kept = output_format("hermes", "think", TOKENIZER).kept_tokens
    assert kept == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    assert output_format("hermes", "think", plain_tokenizer()).kept_tokens == frozenset()
    assert "<|channel|>" in output_format("harmony", "harmony", TOKENIZER).kept_tokens


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (
            ("nothing", None),
            "tool-call-parser: is 'nothing'; expected one of deepseek, glm, harmony",
        ),
        ((None, "nothing"), "reasoning-parser: is 'nothing'; expected one of deepseek-r1"),
        (("harmony", "think"), "reasoning-parser: is 'think' where tool-call-parser is 'harmony'"),
    ],
)
def test_output_format_names_what_is_wrong(names, problem):
    with pytest.raises(InvalidArgumentError, match=problem):
        output_format(*names, TOKENIZER)


QWEN = (
    "{%- if tools %}{{- '# Tools' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}'
    '\\n</tool_call>" }}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}'
)


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        (None, "llama", FormatNames(None, None)),
        ("{{ messages }}", "llama", FormatNames(None, None)),
        (QWEN, "qwen2", FormatNames("hermes", None)),
        (QWEN + "<think></think>", "qwen3", FormatNames("hermes", "think")),
        ("<tool_call>\n<function=f>\n<parameter=", "qwen3_moe", FormatNames("qwen3-coder", None)),
        ("<tool_call>{name}\n<arg_key>arguments", "glm4_moe", FormatNames("glm", None)),
        ("[TOOL_CALLS] [THINK]", "mistral", FormatNames("mistral", "mistral")),
        (
            "{'<｜tool▁calls▁begin｜>' .split('</think>')",
            "deepseek_v3",
            FormatNames("deepseek", "deepseek-r1"),
        ),
        ("<|python_tag|>", "llama", FormatNames("llama3-json", None)),
        (
            'Respond in the format {"name": function name, "parameters": dictionary}',
            "llama",
            FormatNames("llama3-json", None),
        ),
        ("Use [func_name1(param1=value1)]", "llama4", FormatNames("pythonic", None)),
        ("<|channel|>analysis<|message|>", "other", FormatNames("harmony", "harmony")),
        (None, "gpt_oss", FormatNames("harmony", "harmony")),
        ("Here is my thought process:", "granite", FormatNames(None, "granite")),
    ],
)
def test_detect_recognizes_templates(template, model_type, expected):
    assert detect(template, model_type, TOKENIZER) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, False),
        ("{{ messages }}", False),
        (QWEN, True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{# tools #}{{ 'tools' }}{{ message.tools }}", False),
        ("{% for tools in messages %}{{ tools }}{% endfor %}", False),
        ("{% for m in messages %}{% generation %}{{ tools }}{% endgeneration %}"
         "{% break %}{% endfor %}", True),
        ("{% if %}", False),
    ],
)  # fmt: skip
def test_takes_tools_reads_the_template(template, expected):
    assert takes_tools(template) is expected
