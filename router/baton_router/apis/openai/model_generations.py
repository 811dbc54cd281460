"""Choice of a model for completions and chat completions, by name or alias."""

import secrets
from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from baton.serving.tenant import Caller
from baton_router.apis.answers.answer_writer import WriterOf
from baton_router.apis.answers.exchange import Exchange
from baton_router.apis.openai.generations import Generations
from baton_router.apis.openai.schemas import (
    ChatOptions,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from baton_router.call.generate_call import Conversation
from baton_router.served.served_models import Models

_Body = TypeVar(
    "_Body", CompletionRequest, ChatOptions, ChatRequest, TokenizeRequest, DetokenizeRequest
)


class ModelGenerations:
    """Factory of exchanges for all models: that of a body's model makes its exchange.

    Args:
        of: factory of each model, by its name.
    """

    def __init__(self, models: Models, of: Mapping[str, Generations]) -> None:
        self._models = models
        self._of = of

    async def complete(self, body: CompletionRequest, caller: Caller) -> Exchange:
        """Makes the exchange of `/v1/completions`. Raises `ModelNotFoundError` and as
        `Generations.complete`."""
        of_model = self._named(body)
        return await self._of[of_model.model].complete(of_model, caller)

    async def chat(self, body: ChatRequest, caller: Caller) -> Exchange:
        """Makes the exchange of `/v1/chat/completions`. Raises `ModelNotFoundError` and as
        `Generations.chat`."""
        of_model = self._named(body)
        return await self._of[of_model.model].chat(of_model, caller)

    async def answer(
        self, options: ChatOptions, conversation: Conversation, caller: Caller, writer_of: WriterOf
    ) -> Exchange:
        """Makes the exchange of a conversation. Raises `ModelNotFoundError` and as
        `Generations.answer`."""
        of_model = self._named(options)
        return await self._of[of_model.model].answer(of_model, conversation, caller, writer_of)

    async def tokens_of_chat(self, model: str, conversation: Conversation) -> Sequence[int]:
        """Returns the tokens of a conversation. Raises `ModelNotFoundError` and as
        `Generations.tokens_of_chat`."""
        return await self._of[self._name(model)].tokens_of_chat(conversation)

    async def tokenize(self, body: TokenizeRequest, caller: Caller) -> TokenizeResponse:
        """Answers `/tokenize`. Raises `ModelNotFoundError` and as `Generations.tokenize`."""
        of_model = self._named(body)
        return await self._of[of_model.model].tokenize(of_model, caller)

    async def detokenize(self, body: DetokenizeRequest, caller: Caller) -> DetokenizeResponse:
        """Answers `/detokenize`. Raises `ModelNotFoundError` and as `Generations.detokenize`."""
        of_model = self._named(body)
        return await self._of[of_model.model].detokenize(of_model, caller)

    def _named(self, body: _Body) -> _Body:
        """Returns the body with the name of the model that answers it."""
        name = self._name(body.model)
        return body if body.model == name else replace(body, model=name)

    def _name(self, given: str) -> str:
        # Requests over HTTP do not resume at another router, so that any id may draw the model.
        return self._models.of(given, secrets.token_hex(8)).name
