"""Prompt of a request for a model server: its tokens, as far as placement needs them.

A conversation has the tokens that a router gives it. Of a body that a router would refuse only the
text is compared: the model server is to judge it.
"""

import asyncio
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidArgumentError
from baton_picker.conversations import conversation_in
from baton_router.call.generate_call import Conversation
from baton_router.text.chat import ChatTokenizer
from baton_router.text.conversation.normalising import normalised
from baton_router.text.model_card import ModelCard
from baton_router.text.rendering import rendered
from baton_router.text.request_bounds import PromptLimits

# Bodies above this are read in a thread, as they would hold the event loop for milliseconds.
_INLINE_BYTES = 16 * 2**10
_NUM_THREADS = 2
# Tokens with a part in placement: hashing more would hold the event loop for too long.
_MAX_TOKENS = 2**17
# Bytes of a body that stand for one token where it is too large to be parsed.
_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class PickedPrompt:
    """Prompt of a request, as a pick needs it.

    Attributes:
        model: model or adapter that the request names; empty if it names none.
        salt: its `cache_salt`: prompts with different salts share no prefix.
        token_ids: its tokens; empty if the request has no prompt.
    """

    model: str = ""
    salt: str = ""
    token_ids: tuple[int, ...] = ()


NO_PROMPT = PickedPrompt()


class PromptReader:
    """Reader of request bodies, by the tokenizer and chat template of a model card.

    Args:
        limits: of the bytes of a body that is parsed, and of text that is tokenized; what follows
            has no part in placement.
    """

    def __init__(self, card: ModelCard, limits: PromptLimits) -> None:
        self._card = card
        self._max_bytes = limits.max_prompt_bytes
        self._chat = ChatTokenizer(card, cache_bytes=limits.text_cache_bytes)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompt")

    async def read(self, body: bytes, path: str = "") -> PickedPrompt:
        """Returns the prompt of a body sent to `path`, which names the API; empty: OpenAI's. Raises
        `InvalidArgumentError` for a body that is no JSON object.

        Of a body above `max_bytes` only the beginning is compared, as bytes, which finds equal
        prefixes of conversations with images: parsing it would hold the interpreter."""
        if len(body) > self._max_bytes:
            starts = range(0, self._max_bytes, _BYTES_PER_TOKEN)
            checksums = (zlib.crc32(body[start : start + _BYTES_PER_TOKEN]) for start in starts)
            return PickedPrompt(token_ids=tuple(checksums)[:_MAX_TOKENS])
        if len(body) <= _INLINE_BYTES:
            return self._read(body, path)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._read, body, path)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, body: bytes, path: str) -> PickedPrompt:
        fields = _object(body)
        model, salt = (
            value if isinstance(value, str) else ""
            for value in (fields.get("model"), fields.get("cache_salt"))
        )
        return PickedPrompt(model, salt, tuple(self._token_ids(fields, path, salt)[:_MAX_TOKENS]))

    def _token_ids(self, fields: dict[str, Any], path: str, salt: str) -> list[int]:
        """Returns the tokens of the prompt; those of its JSON where it is none that a router takes.
        Both have equal beginnings where prompts have."""
        try:
            if conversation := conversation_in(fields, path):
                return self._tokens_of_chat(conversation, salt)
        except (InvalidArgumentError, RecursionError):
            pass
        if isinstance(messages := fields.get("messages"), list):
            tools = fields.get("tools")
            prompt: Any = [*(tools if isinstance(tools, list) else ()), *messages]
        else:
            prompt = fields.get("prompt", fields.get("input"))
        if isinstance(prompt, list) and all(map(_is_token_id, prompt)):
            return prompt
        return self._card.encode(_text(prompt)) if prompt else []

    def _tokens_of_chat(self, conversation: Conversation, salt: str) -> list[int]:
        """Returns the tokens of a conversation. Raises `InvalidArgumentError`."""
        template = self._card.template(tools=bool(conversation.tools))
        chat = rendered(normalised(conversation, template), self._chat, template)
        return self._chat.encode(chat, salt.encode())


def _object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(_without_halves(body))
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgumentError("body", f"is not JSON: {problem}; send a JSON object") from None
    if not isinstance(fields, dict):
        raise InvalidArgumentError("body", "is JSON of another kind; expected a JSON object")
    return fields


def _without_halves(body: bytes) -> bytes:
    """Returns JSON without halves of surrogate pairs, which have no tokens."""
    if rb"\ud" not in body.lower():
        return body
    return json.dumps(json.loads(body), ensure_ascii=False).encode(errors="replace")


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _text(prompt: Any) -> str:
    """Returns a text that is equal for equal prompts: the prompt itself, or its JSON."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
