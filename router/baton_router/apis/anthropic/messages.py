"""Anthropic's Messages API: answers conversations of blocks by the pipeline of chat completions."""

from baton.serving.tenant import Caller
from baton_router.apis.answers.http_call import HttpCall
from baton_router.apis.anthropic.conversion import conversation_of, options_of, prompt_options
from baton_router.apis.anthropic.schemas import Conversation, MessagesRequest
from baton_router.apis.anthropic.writer import MessageWriter
from baton_router.apis.openai.generations import Generations
from baton_router.apis.openai.schemas import ChatOptions
from baton_router.call.generate_call import Conversation as GivenConversation
from baton_router.text.conversation.in_thread import in_thread_if_long


class Messages:
    """Messages API over the pipeline of chat completions."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def create(self, body: MessagesRequest, caller: Caller) -> HttpCall:
        """Makes the exchange of `POST /v1/messages`. Raises `InvalidArgumentError`."""
        options = options_of(body)
        conversation = await _conversation(body, options)
        return await self._generations.answer(
            options, conversation, caller, MessageWriter, is_lenient=True
        )

    async def count_tokens(self, body: Conversation, caller: Caller) -> int:
        """Returns the number of tokens of the prompt. Raises `InvalidArgumentError`."""
        conversation = await _conversation(body, ChatOptions(**prompt_options(body)))
        return len(await self._generations.tokens_of_chat(body.model, conversation, caller))


async def _conversation(body: Conversation, options: ChatOptions) -> GivenConversation:
    return await in_thread_if_long(len(body.messages), conversation_of, body, options)
