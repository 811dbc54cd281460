"""Request validation and tokenization, before any compute is spent.

Every rejection is an `InvalidArgumentError` that names the field and the bound.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from baton.encoder_input import EncoderInput
from baton.errors import InvalidArgumentError
from baton.params_wire import from_proto
from baton.sampling import (
    MAX_BAD_TOKEN_SEQUENCE_LENGTH,
    SamplingParams,
    check_length,
    check_token_ids,
    check_vocabulary,
)
from baton.serving.tenant import Tenant
from baton.v1 import inference_pb2 as pb
from baton_router.call.ending import FinishReason
from baton_router.call.request import ANONYMOUS, Request
from baton_router.text.chat import ChatTokenizer, RenderedChat
from baton_router.text.images.expansion import PromptTokens, ReadImage, encoder_inputs
from baton_router.text.images.image_source import GivenImage
from baton_router.text.model_card import THREAD_FROM_CHARS, ModelCard
from baton_router.text.parsing import (
    check_template_takes_tools,
    constrained,
    images_of,
    parsing_options,
    request_parsing,
    template_tools,
    template_turns,
    template_variables,
    texts_of,
    with_frames,
)
from baton_router.text.prompt_images import PromptImages, check_image_fields, images_beside
from baton_router.text.request_bounds import (
    DEFAULT_MAX_MESSAGES,
    DEFAULT_MAX_TOOLS,
    check_text,
    request_id_of,
)

# Fewer tokens are detokenized faster than a thread is dispatched.
_THREAD_FROM_TOKENS = 256
# Conversations above which a thread renders them, as it does all with tools.
_THREAD_FROM_MESSAGES = 16
# Last tokens of a prompt that tell whether it ends within reasoning.
_END_TOKENS = 64

_REPORTED_FINISH_REASONS = {
    pb.FINISH_REASON_END_OF_SEQUENCE: FinishReason.END_OF_SEQUENCE,
    pb.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


class Intake:
    """Validator and tokenizer of requests for one model."""

    def __init__(
        self,
        card: ModelCard,
        max_prompt_bytes: int,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_tools: int = DEFAULT_MAX_TOOLS,
        *,
        allow_special_tokens: bool = False,
        images: PromptImages | None = None,
    ) -> None:
        """Limits texts to `max_prompt_bytes`, conversations to `max_messages`, requests to
        `max_tools`. `allow_special_tokens`: see `ChatTokenizer`. `images`: None: requests with
        images are refused."""
        self.images = images or PromptImages(card)
        self._card = card
        self._chat = ChatTokenizer(card, allow_special_tokens=allow_special_tokens)
        self._max_prompt_bytes = max_prompt_bytes
        self._max_messages = min(max_messages, card.max_model_len)
        self._max_tools = max_tools

    async def read(
        self,
        message: pb.GenerateRequest,
        max_model_len: int,
        tenant: Tenant = ANONYMOUS,
        images: Sequence[EncoderInput] = (),
    ) -> Request:
        """Validates and tokenizes. `max_model_len`: the smallest worker limit, in tokens. `images`:
        those of `token_ids` that `prompt_of_chat` has made. Raises `ModelOutputError` for a model
        that does not generate."""
        self._card.check_makes(None)
        params = from_proto(message.sampling, default_seed=secrets.randbits(64))
        limit = min(max_model_len, self._card.max_model_len)
        # The cheapest check that can refuse a long request comes first.
        check_length(1, params.max_tokens, limit)
        options = None
        if message.HasField("parsing"):
            if message.parsing.tools and message.WhichOneof("input") == "chat":
                check_template_takes_tools(self._card)
            options = parsing_options(
                message.parsing, self._card, self._max_tools, self._max_prompt_bytes
            )
        prompt = await self.prompt_of(message, tenant)
        token_ids = prompt.token_ids
        prompt_field = f"input.{message.WhichOneof('input')}"
        check_length(len(token_ids), params.max_tokens, limit, prompt_field)
        if params.stop_token_ids:
            check_token_ids(params.stop_token_ids, self._card.vocab_size, "sampling.stop_token_ids")
        if params.bad_words:
            params = self._without_words(params)
        check_vocabulary(params, self._card.vocab_size)
        parsing = None
        if options is not None:
            end = self._card.tokenizer.decode(token_ids[-_END_TOKENS:], skip_special_tokens=False)
            parsing = request_parsing(self._card, options, end)
            params = constrained(params, self._card, parsing)
        request_id = request_id_of(message.request_id)
        received = self._received(message, params)
        endings = tuple(map(_ending_of, message.continue_from))
        return Request(
            request_id,
            tuple(token_ids),
            params,
            message.priority,
            received,
            endings,
            tenant,
            parsing,
            self._card.name,
            # The time of a request must not reveal which images other tenants have sent.
            encoder_inputs=tuple(
                each.salted(tenant.salt) for each in images or prompt.encoder_inputs
            ),
        )

    async def tokenize(
        self, message: pb.TokenizeRequest, *, add_special_tokens: bool = True
    ) -> tuple[list[int], str]:
        """Returns the tokens of an input, and the text that was tokenized. `add_special_tokens`:
        those that the tokenizer puts around a text; a chat template has its own."""
        prompt, text = await self._encode(message, add_special_tokens=add_special_tokens)
        return prompt.token_ids, text

    async def detokenize(self, token_ids: list[int]) -> str:
        """Returns the text of tokens, special ones included. Raises `InvalidArgumentError`."""
        check_token_ids(token_ids, self._card.vocab_size, "tokens")
        decode = partial(self._card.tokenizer.decode, skip_special_tokens=False)
        is_long = len(token_ids) > _THREAD_FROM_TOKENS
        text = await asyncio.to_thread(decode, token_ids) if is_long else decode(token_ids)
        return str(text)

    async def prompt_of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        images: Sequence[GivenImage] = (),
        tenant: Tenant | None = None,
    ) -> PromptTokens:
        """Returns the prompt of a conversation, whose messages may have more fields than role and
        text. The arguments are those of `ModelCard.render`, and the images and clips of its parts.
        `tenant`: whose cached images are taken; None: none are."""
        self._check_messages(len(messages))
        if tools:
            check_template_takes_tools(self._card)
        read = await self.images.read(images, tenant)
        chat = await self._render(with_frames(messages, map(len, read)), tools, variables)
        check_text("input.chat.messages", chat.text, self._max_prompt_bytes)
        prompt, _ = await self._tokenized(chat, read, "input.chat.messages", self._chat.encode)
        return prompt

    async def prompt_of(
        self, message: pb.GenerateRequest, tenant: Tenant | None = None
    ) -> PromptTokens:
        """Returns the tokens of the input, at least 1, with its images. `tenant`: as of
        `prompt_of_chat`."""
        check_image_fields(message)
        if message.WhichOneof("input") == "token_ids":
            # Before a list is made of ids that are too many.
            check_length(len(message.token_ids.ids), 0, self._card.max_model_len, "input.token_ids")
            token_ids = list(message.token_ids.ids)
            check_token_ids(token_ids, self._card.vocab_size, "input.token_ids")
            if message.encoder_inputs:
                return await self.images.check(message, token_ids)
            read = await self.images.read(images_beside(message), tenant)
            return self.images.expand_ids(token_ids, _flat(read))
        prompt, _ = await self._encode(message, tenant)
        if not prompt.token_ids:
            raise InvalidArgumentError("input", "has no tokens; at least 1 is needed")
        return prompt

    async def _encode(
        self,
        message: pb.GenerateRequest | pb.TokenizeRequest,
        tenant: Tenant | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[PromptTokens, str]:
        kind = message.WhichOneof("input")
        if kind == "text":
            check_text("input.text", message.text, self._max_prompt_bytes)
            read = await self.images.read(images_beside(message), tenant)
            encode = self._encode_text if add_special_tokens else self._chat.encode
            return await self._tokenized(RenderedChat(message.text), read, "input.text", encode)
        if kind == "chat":
            return await self._encode_chat(message, tenant)
        raise InvalidArgumentError("input", "is missing; set text, token_ids or chat")

    async def _encode_chat(
        self, message: pb.GenerateRequest | pb.TokenizeRequest, tenant: Tenant | None
    ) -> tuple[PromptTokens, str]:
        """Returns the tokens of a message's conversation and its text, with its images expanded."""
        chat = message.chat
        self._check_messages(len(chat.messages))
        check_text("input.chat.messages", "".join(texts_of(chat)), self._max_prompt_bytes)
        parsing = message.parsing if isinstance(message, pb.GenerateRequest) else pb.OutputParsing()
        tools, variables = template_tools(parsing), template_variables(parsing)
        read = await self.images.read(images_of(chat), tenant)
        make = partial(template_turns, chat, needs_parts=self._card.template_needs_parts)
        is_long = len(chat.messages) > _THREAD_FROM_MESSAGES
        turns = await asyncio.to_thread(make) if is_long else make()
        rendered = await self._render(with_frames(turns, map(len, read)), tools, variables)
        return await self._tokenized(rendered, read, "input.chat.messages", self._chat.encode)

    async def _render(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
    ) -> RenderedChat:
        render = partial(self._chat.render, turns, tools, variables)
        is_long = len(turns) > _THREAD_FROM_MESSAGES or tools
        return await asyncio.to_thread(render) if is_long else render()

    def _check_messages(self, num: int) -> None:
        if not 1 <= num <= self._max_messages:
            raise InvalidArgumentError(
                "input.chat.messages",
                f"has {num} messages; must have at least 1 and at most {self._max_messages}",
            )

    def _encode_text(self, given: RenderedChat) -> list[int]:
        """Returns the tokens of a text, with those that the tokenizer puts around one."""
        return self._card.encode(given.text)

    async def _tokenized(
        self,
        given: RenderedChat,
        read: Sequence[Sequence[ReadImage]],
        field: str,
        encode: Callable[[RenderedChat], list[int]],
    ) -> tuple[PromptTokens, str]:
        """Returns the tokens of a text and the text, with its images expanded."""
        images = _flat(read)
        expanded = self.images.expand(given, images, field)
        call = partial(encode, expanded)
        is_long = len(expanded.text) >= THREAD_FROM_CHARS
        token_ids = await asyncio.to_thread(call) if is_long else call()
        return PromptTokens(token_ids, encoder_inputs(token_ids, images)), expanded.text

    def _without_words(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters with bad words replaced by their tokens."""
        banned = dict.fromkeys(params.bad_token_ids)
        for i, word in enumerate(params.bad_words):
            banned |= dict.fromkeys(self._tokens_of_word(f"sampling.bad_words[{i}]", word))
        return replace(params, bad_words=(), bad_token_ids=tuple(banned))

    def _tokens_of_word(self, field: str, word: str) -> list[tuple[int, ...]]:
        """Returns the tokens of a word after a space, and of one inside or starting a text."""
        bare = word.lstrip(" ")
        forms = dict.fromkeys((word, bare, f" {bare}") if bare else (word,))
        found = [tuple(self._card.encode_rendered(form)) for form in forms]
        most = MAX_BAD_TOKEN_SEQUENCE_LENGTH
        for token_ids in found:
            if not 1 <= len(token_ids) <= most:
                raise InvalidArgumentError(
                    field, f"is {len(token_ids)} tokens of this model; must be 1 to {most}"
                )
        return found

    def _received(
        self, message: pb.GenerateRequest, params: SamplingParams
    ) -> tuple[tuple[int, ...], ...]:
        """Returns the output that the client already has."""
        num_entries = len(message.continue_from)
        if num_entries not in (0, params.n):
            raise InvalidArgumentError(
                "continue_from", f"has {num_entries} entries; must have sampling.n = {params.n}"
            )
        sequences = []
        for i, sequence in enumerate(message.continue_from):
            field = f"continue_from[{i}]"
            if len(sequence.ids) > params.max_tokens:
                raise InvalidArgumentError(
                    f"{field}.ids",
                    f"has {len(sequence.ids)} tokens; at most sampling.max_tokens = "
                    f"{params.max_tokens} are generated",
                )
            if sequence.finish_reason not in pb.FinishReason.values():
                raise InvalidArgumentError(
                    f"{field}.finish_reason",
                    f"is {sequence.finish_reason}; must be one of the values of FinishReason",
                )
            token_ids = tuple(sequence.ids)
            if token_ids:
                check_token_ids(token_ids, self._card.vocab_size, f"{field}.ids")
            sequences.append(token_ids)
        return tuple(sequences)


def _flat(images: Sequence[Sequence[ReadImage]]) -> list[ReadImage]:
    return list(chain.from_iterable(images))


def _ending_of(received: pb.ReceivedTokens) -> FinishReason | None:
    """Returns the finish reason if only it tells of the end: a stop string is found in the
    tokens."""
    return _REPORTED_FINISH_REASONS.get(received.finish_reason) if received.ids else None
