"""Anthropic's Messages API: answers conversations of blocks by the pipeline of chat completions."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from baton.errors import InvalidArgumentError
from baton.serving.tenant import Caller
from baton_router.apis.answers.exchange import Exchange
from baton_router.apis.anthropic.conversion import chat_request, counted_request, in_messages_terms
from baton_router.apis.anthropic.schemas import Conversation, MessagesRequest
from baton_router.apis.anthropic.writer import MessageWriter
from baton_router.apis.openai.model_generations import ModelGenerations
from baton_router.apis.openai.schemas import ChatRequest

# Messages above which a thread converts them.
_THREAD_FROM_MESSAGES = 16

_Body = TypeVar("_Body", bound=Conversation)


class Messages:
    """Messages API over the pipeline of chat completions."""

    def __init__(self, generations: ModelGenerations) -> None:
        self._generations = generations

    async def create(self, body: MessagesRequest, caller: Caller) -> Exchange:
        """Makes the exchange of `POST /v1/messages`. Raises `InvalidArgumentError`."""
        chat = await _chat(chat_request, body)
        try:
            return await self._generations.chat(chat, caller, partial(MessageWriter, chat))
        except InvalidArgumentError as error:
            raise in_messages_terms(error, chat) from error

    async def count_tokens(self, body: Conversation, _caller: Caller) -> int:
        """Returns the number of tokens of the prompt. Raises `InvalidArgumentError`."""
        chat = await _chat(counted_request, body)
        try:
            return len(await self._generations.tokens_of_chat(chat))
        except InvalidArgumentError as error:
            raise in_messages_terms(error, chat) from error


async def _chat(convert: Callable[[_Body], ChatRequest], body: _Body) -> ChatRequest:
    if len(body.messages) > _THREAD_FROM_MESSAGES:
        return await asyncio.to_thread(convert, body)
    return convert(body)
