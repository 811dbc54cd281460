"""`baton chat`: a conversation, one line a turn."""

import contextlib
import sys

from baton.client.client import Client, Message
from baton.errors import BatonError, FailedPreconditionError
from baton.models import DEFAULT_MODEL, INTRODUCTION
from baton.sampling import SamplingParams


class Conversation:
    """Conversation so far; a turn that failed is not part of it."""

    def __init__(
        self, client: Client, params: SamplingParams, system: str, priority: int = 0
    ) -> None:
        self._client = client
        self._params = params
        self._priority = priority
        self.messages = [Message("system", system)] if system else []

    def say(self, content: str) -> None:
        """Adds a turn of the user and streams the answer to stdout.

        Ctrl-C cuts the answer short; the conversation continues from there.
        """
        messages = [*self.messages, Message("user", content)]
        texts: list[str] = []
        with (
            contextlib.suppress(KeyboardInterrupt),
            self._client.generate(messages, self._params, priority=self._priority) as generation,
        ):
            for chunk in generation:
                texts.append(chunk.text)
                print(chunk.text, end="", flush=True)
        print(flush=True)
        self.messages = [*messages, Message("assistant", "".join(texts))]


def run(client: Client, params: SamplingParams, system: str, priority: int) -> None:
    """Reads turns from stdin until it ends.

    At a terminal a failed turn is printed and the conversation continues; otherwise it raises.
    """
    model = client.get_model()
    if not model.has_chat_template:
        raise FailedPreconditionError(f"{model.name} has no chat template; use `baton generate`")
    conversation = Conversation(client, params, system, priority)
    if sys.stdin.isatty():
        _talk(conversation, model.name)
    else:
        for line in sys.stdin:
            if line.strip():
                conversation.say(line.strip())


def _talk(conversation: Conversation, model: str) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing
    print(f"chat with {model}; Ctrl-C stops an answer, Ctrl-D ends")
    if model == DEFAULT_MODEL:
        print(INTRODUCTION)
    while True:
        try:
            line = input("> ").strip()
            if line:
                conversation.say(line)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except BatonError as error:
            print(f"baton: {error}", file=sys.stderr)
