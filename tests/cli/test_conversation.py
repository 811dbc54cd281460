from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.cli.chat import Conversation
from baton.client.client import Chunk, Message
from baton.errors import UnavailableError
from baton.sampling import SamplingParams


class FakeClient:
    """Answers with these texts; raises those that are exceptions."""

    def __init__(self, *script: str | BaseException) -> None:
        self.script = script
        self.asked: list[list[Message]] = []

    @contextmanager
    def generate(
        self, prompt: list[Message], params: SamplingParams, *, priority: int
    ) -> Iterator[Iterator[Chunk]]:
        self.asked.append(prompt)
        yield self._chunks()

    def _chunks(self) -> Iterator[Chunk]:
        for step in self.script:
            if isinstance(step, BaseException):
                raise step
            yield Chunk(step, (1,), 0, 0, ())


def conversation(client: FakeClient, system: str = "") -> Conversation:
    return Conversation(client, SamplingParams(), system)


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


def test_conversation_keeps_the_part_of_an_interrupted_answer() -> None:
    talk = conversation(FakeClient("he", KeyboardInterrupt()))
    talk.say("one")
    assert talk.messages == [Message("user", "one"), Message("assistant", "he")]


def test_conversation_drops_a_turn_that_failed() -> None:
    talk = conversation(FakeClient("he", UnavailableError("gone")))
    with pytest.raises(UnavailableError):
        talk.say("one")
    assert talk.messages == []
