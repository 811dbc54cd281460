"""Parsers of reasoning, alone and before tool calls."""

import functools
import itertools

import pytest

from baton_router.call.output_format import OutputFormat, ParsingOptions, Tool
from baton_router.call.parts import Reasoning, Text
from baton_router.text.output_parsing.formats.catalog import output_format, reasoning_format_names
from tests.support.model_outputs import (
    WRITTEN,
    calls_of,
    parse,
    reasoning_of,
    special_tokenizer,
    text_of,
)

TOKENIZER = special_tokenizer()
SPLIT = ParsingOptions(splits_reasoning=True)
OPEN = ParsingOptions(splits_reasoning=True, is_reasoning_open=True)
CALLING = ParsingOptions(tools=[Tool("get")], splits_reasoning=True)
MARKS = {
    "deepseek-r1": ("<think>", "</think>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "mistral": ("[THINK]", "[/THINK]"),
    "think": ("<think>", "</think>"),
}
every_marked = pytest.mark.parametrize("name", MARKS)


@functools.cache
def format_of(reasoning: str, tools: str | None = None) -> OutputFormat:
    return output_format(tools, reasoning, TOKENIZER)


def parts_of(name: str, text: str, *cuts: int, options: ParsingOptions = SPLIT):
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    return parse(format_of(name).parser(options), pieces)


def test_every_reasoning_format_is_tested():
    assert {*MARKS, "harmony"} == set(reasoning_format_names())


@every_marked
def test_parser_splits_reasoning_when_cut_at_every_place(name):
    opening, closing = MARKS[name]
    body = "First <b>, [then] é.\n\nHere is 1</thin"
    text = f"{opening}\n{body}\n{closing}\n\nThe answer.\n"
    for cut in range(len(text) + 1):
        for cuts in ((cut,), range(cut)):
            parts = parts_of(name, text, *cuts)
            assert reasoning_of(parts) == body
            assert text_of(parts) == "The answer.\n"


@every_marked
def test_parser_splits_reasoning_that_the_prompt_opened(name):
    opening, closing = MARKS[name]
    text = f"Hm.\n{closing}\nYes."
    for cut in range(len(text) + 1):
        parts = parts_of(name, text, cut, options=OPEN)
        assert (reasoning_of(parts), text_of(parts)) == ("Hm.", "Yes.")
    parts = parts_of(name, f"{opening}\n{text}", options=OPEN)
    assert (reasoning_of(parts), text_of(parts)) == ("Hm.", "Yes.")


@every_marked
def test_parser_returns_text_of_a_model_that_does_not_reason(name):
    text = " <thinking> [TH 1 < 2, Here is my way.\n"
    for cut in range(len(text) + 1):
        assert text_of(parts_of(name, text, cut)) == text


@every_marked
def test_parser_returns_reasoning_without_an_end(name):
    opening, _ = MARKS[name]
    parts = parts_of(name, f"{opening}\nHm </thi")
    assert reasoning_of(parts) == "Hm </thi"
    assert all(isinstance(part, Reasoning) for part in parts)


@every_marked
def test_parser_leaves_reasoning_in_the_text_where_not_asked(name):
    opening, closing = MARKS[name]
    text = f"{opening}\nHm.\n{closing}\n\nYes."
    parts = parts_of(name, text, 5, 12, options=ParsingOptions())
    assert text_of(parts) == text
    assert reasoning_of(parts) == ""


@every_marked
def test_parser_finds_marks_in_text_only_at_its_beginning(name):
    opening, closing = MARKS[name]
    text = f"Yes. {opening} no {closing}"
    assert text_of(parts_of(name, text)) == text


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("think", "<|im_start|>assistant\n", False),
        ("think", "<|im_start|>assistant\n<think>\n", True),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek-r1", "<｜Assistant｜>", True),
        ("deepseek-r1", "<｜Assistant｜></think>", False),
        ("mistral", "[/INST]", False),
        ("harmony", "<|start|>assistant", False),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", True),
    ],
)
def test_format_knows_whether_a_prompt_opens_reasoning(name, prompt, expected):
    assert format_of(name).opens_reasoning(prompt) is expected


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("think", "<|im_start|>assistant\n", False),
        ("think", "<|im_start|>assistant\n<think>\n", False),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", True),
        ("harmony", "<|start|>assistant", False),
    ],
)
def test_format_knows_whether_a_prompt_closes_reasoning(name, prompt, expected):
    assert format_of(name).closes_reasoning(prompt) is expected


@pytest.mark.parametrize("tools", [None, "hermes"])
def test_format_without_reasoning_opens_none(tools):
    assert not output_format(tools, None, TOKENIZER).opens_reasoning("<think>\n")


@pytest.mark.parametrize("way", [key for key in WRITTEN if "harmony" not in key])
def test_parser_returns_calls_after_reasoning(way):
    written = WRITTEN[way]
    calls = [("get", {"city": "Rome"}), ("get", {})]
    text = written.write(calls, "Let me see." if written.takes_text else "")
    reasoned = f"<think>\nA {text[:20]} B\n</think>\n\n{text}"
    options = ParsingOptions(tools=[Tool("get")], splits_reasoning=True)
    for cut in range(len(reasoned)):
        pieces = [reasoned[:cut], reasoned[cut:]]
        parts = parse(format_of("think", written.format_name).parser(options), pieces)
        assert reasoning_of(parts) == f"A {text[:20]} B"
        assert calls_of(parts) == calls
        assert text_of(parts) == ("Let me see." if written.takes_text else "")


IN_THOUGHTS = [key for key in WRITTEN if "harmony" not in key]


@pytest.mark.symptom(
    "halogen-flash-server#84, software-agent-sdk#2512",
    there="a call within a thought that does not end is lost",
    here="Returns the calls that such a thought ends with.",
)
@pytest.mark.parametrize("way", IN_THOUGHTS)
@pytest.mark.parametrize("splits", [True, False], ids=["split", "text"])
def test_parser_returns_calls_that_an_open_thought_ends_with(way, splits):
    written = WRITTEN[way]
    calls = [("get", {"city": "Rome"}), ("get", {})]
    text = f"<think>\nI call {written.write([('get', {'city': 'Oslo'})], '')} or:\n\n"
    text += written.write(calls, "")
    options = ParsingOptions(tools=[Tool("get")], splits_reasoning=splits)
    for cut in range(len(text)):
        parser = format_of("think", written.format_name).parser(options)
        parts = parse(parser, [text[:cut], text[cut:]])
        shown, hidden = (reasoning_of, text_of) if splits else (text_of, reasoning_of)
        assert (shown(parts), hidden(parts)) == (text.removeprefix("<think>\n" * splits), "")
        assert calls_of(parts) == calls


@pytest.mark.parametrize("way", IN_THOUGHTS)
@pytest.mark.parametrize("end", ["</think>\n\nDone.", " but no."], ids=["closed", "open"])
def test_parser_returns_no_call_that_a_thought_goes_past(way, end):
    written = WRITTEN[way]
    text = f"<think>{written.write([('get', {})], '')}{end}"
    options = ParsingOptions(tools=[Tool("get")], splits_reasoning=True)
    for cut in range(len(text)):
        parser = format_of("think", written.format_name).parser(options)
        parts = parse(parser, [text[:cut], text[cut:]])
        assert calls_of(parts) == []
        assert reasoning_of(parts) + text_of(parts) == text[7:].replace("</think>\n\n", "")


UNMARKED = [key for key in WRITTEN if not WRITTEN[key].takes_text]


@pytest.mark.parametrize("way", UNMARKED)
@pytest.mark.parametrize("before", ["", "I call ", "See [1] {2}:\n{3}\n[4]\n" * 9], ids=len)
def test_parser_finds_calls_without_marks_in_an_open_thought(way, before):
    """At its beginning, after a word, and after more lines with brackets than are tried."""
    calls = [("get", {"city": "Rome", "days": [{"of": {"week": 1}}]})]
    text = f"<think>\n{before}{WRITTEN[way].write(calls, '')}\n"
    parser = format_of("think", WRITTEN[way].format_name).parser(CALLING)
    parts = parse(parser, list(text))
    assert calls_of(parts) == calls
    assert (reasoning_of(parts), text_of(parts)) == (text.removeprefix("<think>\n"), "")


@pytest.mark.parametrize("way", UNMARKED)
def test_parser_takes_no_brackets_of_a_thought_for_calls(way):
    for text in ('[1]\n{"a": 1}', '{"name": "Ann", "type": "x"}', "[x]\n[get]", "[{\n[{\n" * 99):
        parts = parse(
            format_of("think", WRITTEN[way].format_name).parser(CALLING), ["<think>", text]
        )
        assert (calls_of(parts), reasoning_of(parts).strip()) == ([], text.strip())


def test_harmony_returns_a_call_that_an_open_thought_ends_with():
    call = '<|channel|>commentary to=functions.get <|message|>{"city": "Rome"}<|call|>'
    for between in ("", "<|start|>assistant"):
        text = f"<|channel|>analysis<|message|>Hm.{between}{call}"
        for cut in range(len(text)):
            parser = format_of("harmony", "harmony").parser(CALLING)
            parts = parse(parser, [text[:cut], text[cut:]])
            assert (reasoning_of(parts), text_of(parts)) == ("Hm.", "")
            assert calls_of(parts) == [("get", {"city": "Rome"})]


HARMONY = (
    "<|channel|>analysis<|message|>Hm {1}\n<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    "<|channel|>analysis<|message|> Again.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 10_000])
def test_harmony_splits_channels(length):
    options = ParsingOptions(tools=[Tool("get")], splits_reasoning=True)
    pieces = [HARMONY[at : at + length] for at in range(0, len(HARMONY), length)]
    parts = parse(format_of("harmony", "harmony").parser(options), pieces)
    assert reasoning_of(parts) == "Hm {1}\n Again."
    assert text_of(parts) == "Let me see."
    assert calls_of(parts) == [("get", {"city": "Rome"})]


def test_harmony_continues_an_analysis_that_the_prompt_opened():
    text = "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    for cut in range(len(text) + 1):
        parts = parts_of("harmony", text, cut, options=OPEN)
        assert (reasoning_of(parts), text_of(parts)) == ("Hm.", "Yes.")


def test_harmony_leaves_the_analysis_in_the_text_where_not_asked():
    analysis = "<|channel|>analysis<|message|>Hm.<|end|>"
    text = f"{analysis}<|start|>assistant<|channel|>final<|message|>Yes."
    parts = parts_of("harmony", text, 4, 30, options=ParsingOptions())
    assert text_of(parts) == f"{analysis}Yes."
    assert parse(format_of("harmony").parser(SPLIT), ["No marks."]) == [Text("No marks.")]
