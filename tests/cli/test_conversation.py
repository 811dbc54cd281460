from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.cli.chat import Conversation, read_clip, read_image, read_tools
from baton.client.client import (
    Chunk,
    Clip,
    Finished,
    FinishReason,
    Image,
    Message,
    OutputParsing,
    Part,
    ReasoningPart,
    TextPart,
    Timings,
    Tool,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from baton.errors import InvalidArgumentError, UnavailableError
from baton.sampling import Grammar, GrammarKind, SamplingParams

WEATHER = Tool("weather")
NUM_TOKENS = 7


class FakeGeneration:
    """Generation of these parts; raises those that are exceptions."""

    def __init__(self, script: Sequence[Part | BaseException], reason: FinishReason) -> None:
        self.script = script
        self.finished = Finished(reason, "", Usage(*[NUM_TOKENS] * 6), Timings(*[0.1] * 5))

    def __iter__(self) -> Iterator[Chunk]:
        for step in self.script:
            if isinstance(step, BaseException):
                raise step
            yield Chunk("not shown", (1,), 0, 0, (), parts=(step,))


class FakeClient:
    """Answers with these parts, and texts; raises those that are exceptions."""

    def __init__(self, *script: Part | str | BaseException) -> None:
        self.script = [TextPart(step) if isinstance(step, str) else step for step in script]
        self.asked: list[list[Message]] = []
        self.parsing: OutputParsing | None = None
        self.reason = FinishReason.END_OF_SEQUENCE
        self.is_clamped = False
        self.model = ""

    @contextmanager
    def generate(
        self,
        prompt: list[Message],
        params: SamplingParams,
        *,
        model: str,
        priority: int,
        parsing: OutputParsing | None,
        clamp_max_tokens: bool,
    ) -> Iterator[FakeGeneration]:
        self.asked.append(prompt)
        self.model = model
        self.parsing = parsing
        self.is_clamped = clamp_max_tokens
        yield FakeGeneration(self.script, self.reason)


def conversation(
    client: FakeClient, system: str = "", max_tokens: int = 16, **options: Any
) -> Conversation:
    return Conversation(client, SamplingParams(max_tokens=max_tokens), system, **options)


def test_conversation_sends_all_earlier_messages(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient("he", "llo")
    talk = conversation(client, system="Be kind.")
    talk.say("one")
    talk.say("two")
    assert capsys.readouterr().out == "hello\nhello\n"
    assert client.asked[1] == [
        Message("system", "Be kind."),
        Message("user", "one"),
        Message("assistant", "hello"),
        Message("user", "two"),
    ]


def test_conversation_asks_the_model_that_it_was_given() -> None:
    client = FakeClient("hello")
    conversation(client, model="coder").say("one")
    assert client.model == "coder"


def test_conversation_sends_images_with_first_turn(tmp_path: Path) -> None:
    file = tmp_path / "circles.png"
    file.write_bytes(b"a file")
    client = FakeClient("two")
    talk = conversation(client, system="Be kind.", images=[read_image(file), read_clip(file)])
    talk.say("How many?")
    talk.say("Sure?")
    first = Message("user", [Image(b"a file"), Clip(b"a file"), "How many?"])
    assert client.asked[0][1:] == [first]
    assert client.asked[1][1:] == [first, Message("assistant", "two"), Message("user", "Sure?")]
    for read, option in ((read_image, "--image"), (read_clip, "--clip")):
        with pytest.raises(InvalidArgumentError, match=f"{option}: cannot be read"):
            read(tmp_path / "missing.png")


def test_conversation_keeps_the_part_of_an_interrupted_answer() -> None:
    talk = conversation(FakeClient("he", KeyboardInterrupt()))
    talk.say("one")
    assert talk.messages == [Message("user", "one"), Message("assistant", "he")]


def test_conversation_drops_a_turn_that_failed() -> None:
    talk = conversation(FakeClient("he", UnavailableError("gone")))
    with pytest.raises(UnavailableError):
        talk.say("one")
    assert talk.messages == []


CALL: list[Part] = [
    ToolCallStart(0, "call_1", "weather"),
    ToolCallArguments(0, '{"city": '),
    ToolCallArguments(0, '"Oslo"}'),
]


def test_conversation_shows_reasoning_dim_at_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    conversation(FakeClient(ReasoningPart("Hm"), ReasoningPart("."), "Yes", "\t!")).say("one")
    printed = capsys.readouterr()
    assert printed.out == "\x1b[2mHm\x1b[0m\x1b[2m.\x1b[0m\nYes\t!\n"
    assert printed.err == ""


def test_conversation_pipes_the_answer_without_reasoning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = FakeClient(ReasoningPart("Hm."), "Yes.")
    talk = conversation(client)
    talk.say("one")
    assert capsys.readouterr() == ("Yes.\n", "Hm.\n")
    assert talk.messages[-1] == Message("assistant", "Yes.", reasoning="Hm.")


def test_conversation_shows_calls_as_they_come_and_takes_results(
    capsys: pytest.CaptureFixture[str],
) -> None:
    second = ToolCallStart(1, "call_2", "weather"), ToolCallArguments(1, "{}")
    client = FakeClient("I look.", *CALL, *second)
    talk = conversation(client, tools=[WEATHER])
    talk.say("one")
    assert capsys.readouterr().out == 'I look.\nweather {"city": "Oslo"}\nweather {}\n'
    assert client.parsing == OutputParsing([WEATHER])
    calls = (ToolCall("call_1", "weather", '{"city": "Oslo"}'), ToolCall("call_2", "weather", "{}"))
    assert talk.messages[-1] == Message("assistant", "I look.", calls)
    client.script = [TextPart("Rain.")]
    talk.say("rain")
    assert len(client.asked) == 1, "one result is missing"
    assert talk.pending == [calls[1]]
    talk.say("sun")
    assert client.asked[1][-2:] == [
        Message("tool", "rain", tool_call_id="call_1", name="weather"),
        Message("tool", "sun", tool_call_id="call_2", name="weather"),
    ]
    assert (talk.pending, talk.messages[-1]) == ([], Message("assistant", "Rain."))


def test_conversation_drops_calls_of_an_interrupted_answer() -> None:
    talk = conversation(FakeClient("I look.", *CALL[:2], KeyboardInterrupt()), tools=[WEATHER])
    talk.say("one")
    assert (talk.pending, talk.messages[-1]) == ([], Message("assistant", "I look."))


def test_conversation_asks_for_no_parts_under_a_free_grammar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = FakeClient("a")
    params = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a"))
    Conversation(client, params, "").say("one")
    assert client.parsing is None
    assert capsys.readouterr().out == "not shown\n"


def test_conversation_tells_of_a_cut_answer_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for max_tokens, bound in ((16, "the model's length"), (NUM_TOKENS, "--max-tokens")):
        client = FakeClient("he")
        client.reason = FinishReason.LENGTH
        conversation(client, max_tokens=max_tokens).say("one")
        assert capsys.readouterr() == ("he\n", f"[the answer was cut at {bound}]\n")
        assert client.is_clamped


def test_conversation_tells_of_a_cut_answer_dim_at_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    client = FakeClient("he")
    client.reason = FinishReason.LENGTH
    conversation(client).say("one")
    assert capsys.readouterr().err == "\x1b[2m[the answer was cut at the model's length]\x1b[0m\n"


def test_tools_are_read_in_the_form_of_openai(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(
        '[{"type": "function", "function": {"name": "weather", "description": "Of a city.",'
        ' "parameters": {"type": "object"}}}]'
    )
    assert read_tools(file) == [Tool("weather", "Of a city.", {"type": "object"})]
    for text in ("{}", "[{}]", "[1]", "["):
        file.write_text(text if text != "{}" else '{"a": 1}')
        with pytest.raises(InvalidArgumentError, match="--tools: cannot be read"):
            read_tools(file)
