"""Request validation and tokenization, before any compute is spent.

Every rejection is an `InvalidArgumentError` that names the field and the bound.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from baton.context_length import ContextLength
from baton.errors import InvalidArgumentError
from baton.fairness.fair_threads import FairThreads
from baton.models.images.encoder_input import EncoderInput
from baton.sampling import (
    SamplingParams,
    check_token_ids,
    check_vocabulary,
    with_banned_tokens,
)
from baton.serving.tenant import Tenant
from baton_router.call.ending import FinishReason
from baton_router.call.generate_call import (
    Conversation,
    GenerateCall,
    GivenImage,
    PromptInput,
    PromptTokens,
    ReceivedOutput,
)
from baton_router.call.request import ANONYMOUS, Request
from baton_router.text.chat import ChatTokenizer, RenderedChat
from baton_router.text.conversation.in_thread import in_thread_if_long, text_threads
from baton_router.text.conversation.normalising import normalised
from baton_router.text.images.expansion import ReadImage, encoder_inputs
from baton_router.text.least_tokens import least_tokens
from baton_router.text.model_card import THREAD_FROM_CHARS, ModelCard
from baton_router.text.parsing import (
    check_template_takes_tools,
    checked_parsing,
    constrained,
    request_parsing,
)
from baton_router.text.prompt_images import PromptImages, check_image_fields
from baton_router.text.rendering import rendered
from baton_router.text.request_bounds import RequestLimits, check_text, request_id_of

# Fewer tokens are detokenized faster than a thread is dispatched.
_THREAD_FROM_TOKENS = 256
# Characters of a conversation that a thread renders: with many marks each takes up to 2 us.
_THREAD_FROM_RENDERED = 2**15
# Last tokens of a prompt that tell whether it ends within reasoning.
_END_TOKENS = 64

_MESSAGES = "input.chat.messages"


class Intake:
    """Validator and tokenizer of requests for one model."""

    def __init__(
        self,
        card: ModelCard,
        limits: RequestLimits,
        *,
        allow_special_tokens: bool = False,
        images: PromptImages | None = None,
        threads: FairThreads | None = None,
    ) -> None:
        """Takes the way of control tokens in users' texts (`ChatTokenizer`), the reader of images,
        and the threads for long texts; `images` None: requests with images are refused; `threads`
        None: it has some of its own."""
        self.images = images or PromptImages(card)
        self._takes_images = self.images.are_taken
        self._card = card
        self._threads = threads or text_threads()
        self._chat = ChatTokenizer(
            card,
            allow_special_tokens=allow_special_tokens,
            cache_bytes=limits.text_cache_bytes,
        )
        self._max_prompt_bytes = limits.max_prompt_bytes
        self._max_messages = min(limits.max_messages, card.max_model_len)
        self._max_tools = limits.max_tools

    async def read(
        self, call: GenerateCall, longest: ContextLength, tenant: Tenant = ANONYMOUS
    ) -> Request:
        """Validates and tokenizes. `longest`: context length of the workers. Raises
        `ModelOutputError` for a model that does not generate."""
        self._card.check_makes(None)
        params = call.params.with_defaults(self._card.sampling_defaults)
        longest = longest.within(self._card.max_model_len)
        # The cheapest check that can refuse a long request comes first.
        if not call.clamps_max_tokens:
            longest.check_max_tokens(params.max_tokens)
        options = None
        if call.parsing is not None:
            if isinstance(call.input, Conversation) and call.input.tools:
                check_template_takes_tools(self._card)
            options = checked_parsing(call.parsing, self._card, self._max_tools)
        tenant = tenant.salted(call.cache_salt)
        prompt = await self.prompt_of(call.input, call.images, call.encoder_inputs, tenant, longest)
        token_ids = prompt.token_ids
        least = 1 if call.clamps_max_tokens else params.max_tokens
        longest.check(len(token_ids), least, f"input.{call.kind}")
        num_left = longest.num_tokens - len(token_ids)
        is_clamped = params.max_tokens > num_left
        if is_clamped:
            params = replace(params, max_tokens=num_left)
        if params.stop_token_ids:
            check_token_ids(params.stop_token_ids, self._card.vocab_size, "sampling.stop_token_ids")
        params = with_banned_tokens(params, self._card.encode_rendered)
        check_vocabulary(params, self._card.vocab_size)
        parsing = None
        if options is not None:
            end = self._card.tokenizer.decode(token_ids[-_END_TOKENS:], skip_special_tokens=False)
            parsing = request_parsing(
                self._card, options, end, continues_answer=prompt.continues_answer
            )
            params = constrained(params, self._card, parsing)
        return Request(
            request_id_of(call.request_id),
            tuple(token_ids),
            params,
            call.priority,
            self._received(call, params),
            tuple(map(_reported_reason, call.received)),
            tenant,
            parsing,
            self._card.name,
            # The time of a request must not reveal which images other tenants have sent.
            encoder_inputs=tuple(each.salted(tenant.salt) for each in prompt.encoder_inputs),
            is_clamped=is_clamped,
            continues_text=call.kind != "chat" or prompt.continues_answer,
            content=call.content,
        )

    async def tokenize(
        self,
        given: PromptInput,
        images: Sequence[GivenImage] = (),
        *,
        holder: str = ANONYMOUS.name,
        add_special_tokens: bool = True,
    ) -> tuple[Sequence[int], str]:
        """Returns the tokens of a text or a conversation, and the text that was tokenized; nothing
        of it is cached.

        Args:
            holder: name of the tenant in whose turn it is computed.
            add_special_tokens: those that the tokenizer puts around a text; a chat template has its
                own.
        """
        encode = partial(self._encode, add_special_tokens=add_special_tokens)
        prompt, text = await encode(given, images, holder, None)
        return prompt.token_ids, text

    async def detokenize(self, token_ids: list[int]) -> str:
        """Returns the text of tokens, special ones included. Raises `InvalidArgumentError`."""
        if not token_ids:
            return ""
        check_token_ids(token_ids, self._card.vocab_size, "tokens")
        decode = partial(self._card.tokenizer.decode, skip_special_tokens=False)
        is_long = len(token_ids) > _THREAD_FROM_TOKENS
        text = await asyncio.to_thread(decode, token_ids) if is_long else decode(token_ids)
        return str(text)

    async def prompt_of(
        self,
        given: PromptInput,
        images: Sequence[GivenImage] = (),
        encoder_inputs: Sequence[EncoderInput] = (),
        tenant: Tenant = ANONYMOUS,
        longest: ContextLength | None = None,
    ) -> PromptTokens:
        """Returns the tokens of an input, at least 1, with its images.

        Args:
            images, encoder_inputs: as of `GenerateCall`.
            tenant: in whose turn it is computed, and whose cached images and texts are taken.
            longest: length beyond which a text may be refused before it is tokenized; None: it is
                tokenized.
        """
        if images or encoder_inputs:
            check_image_fields(given, images, encoder_inputs)
        if isinstance(given, PromptTokens):
            return given
        if given is None or isinstance(given, str | Conversation):
            prompt, _ = await self._encode(given, images, tenant.name, tenant.salt, longest)
            if not prompt.token_ids:
                raise InvalidArgumentError("input", "has no tokens; at least 1 is needed")
            return prompt
        # Before a list is made of ids that are too many.
        ContextLength(self._card.max_model_len).check(len(given), 0, "input.token_ids")
        token_ids = list(given)
        check_token_ids(token_ids, self._card.vocab_size, "input.token_ids")
        if encoder_inputs:
            return await self.images.check(encoder_inputs, token_ids)
        if not images:
            return PromptTokens(token_ids)
        read = await self.images.read(images, tenant.name, tenant.salt)
        return self.images.expand_ids(token_ids, _flat(read))

    def forget(self, salt: bytes | None, *, images: bool) -> None:
        """Drops what is cached of the requests of one salt's tenants; None: of all. `images`: their
        images, too."""
        self._chat.pieces.drop(salt)
        if images and self.images.cache is not None:
            self.images.cache.drop(salt)

    async def _encode(
        self,
        given: PromptInput,
        images: Sequence[GivenImage],
        holder: str,
        salt: bytes | None,
        longest: ContextLength | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[PromptTokens, str]:
        if isinstance(given, str):
            check_text("input.text", given, self._max_prompt_bytes)
            read = await self._read(images, holder, salt)
            encode = self._encode_text if add_special_tokens else self._chat.encode
            encode = partial(self._encode_fitting, "input.text", longest, encode)
            made = RenderedChat(given)
            return await self._tokenized(made, read, "input.text", encode, holder)
        if isinstance(given, Conversation):
            return await self._encode_chat(given, holder, salt, longest)
        raise InvalidArgumentError("input", "is missing; set text, token_ids or chat")

    async def _encode_chat(
        self, chat: Conversation, holder: str, salt: bytes | None, longest: ContextLength | None
    ) -> tuple[PromptTokens, str]:
        """Returns the tokens of a conversation and its text, with its images expanded."""
        template = self._card.template(tools=bool(chat.tools))
        chat = await in_thread_if_long(len(chat.turns), normalised, chat, template)
        self._check_messages(len(chat.turns))
        text = "".join(_texts_of(chat))
        check_text(_MESSAGES, text, self._max_prompt_bytes)
        if chat.tools:
            check_template_takes_tools(self._card)
        read = await self._read(chat.images, holder, salt)
        num_frames = [len(frames) for frames in read]
        render = partial(rendered, chat, self._chat, template, num_frames)
        # Descriptions of tools may be long.
        is_long = bool(chat.tools) or len(text) >= _THREAD_FROM_RENDERED
        in_thread = partial(in_thread_if_long, len(chat.turns))
        made = await (self._threads.call(holder, render) if is_long else in_thread(render))
        encode = partial(self._chat.encode, salt=salt, holder=holder)
        encode = partial(self._encode_fitting, _MESSAGES, longest, encode)
        prompt, text = await self._tokenized(made, read, _MESSAGES, encode, holder)
        return replace(prompt, continues_answer=chat.continues_answer), text

    async def _read(
        self, images: Sequence[GivenImage], holder: str, salt: bytes | None
    ) -> Sequence[Sequence[ReadImage]]:
        return await self.images.read(images, holder, salt) if images else ()

    def _check_messages(self, num: int) -> None:
        if not 1 <= num <= self._max_messages:
            raise InvalidArgumentError(
                _MESSAGES,
                f"has {num} messages; must have at least 1 and at most {self._max_messages}",
            )

    def _encode_text(self, given: RenderedChat) -> list[int]:
        """Returns the tokens of a text, with those that the tokenizer puts around one."""
        return self._card.encode(given.text)

    def _encode_fitting(
        self,
        field: str,
        longest: ContextLength | None,
        encode: Callable[[RenderedChat], list[int]],
        given: RenderedChat,
    ) -> list[int]:
        """Returns the tokens of a text, as `encode`. Raises `ContextLengthError` for a long text
        whose bytes are more than tokens of the `longest` sequence hold."""
        if longest is not None and len(given.text) >= THREAD_FROM_CHARS:
            longest.check_least(least_tokens(self._card.tokenizer, given.text), field)
        return encode(given)

    async def _tokenized(
        self,
        given: RenderedChat,
        read: Sequence[Sequence[ReadImage]],
        field: str,
        encode: Callable[[RenderedChat], list[int]],
        holder: str,
    ) -> tuple[PromptTokens, str]:
        """Returns the tokens of a text and the text, with its images expanded."""
        images = _flat(read)
        has_places = images or self._takes_images
        expanded = self.images.expand(given, images, field) if has_places else given
        call = partial(encode, expanded)
        is_long = len(expanded.text) >= THREAD_FROM_CHARS
        token_ids = await self._threads.call(holder, call) if is_long else call()
        inputs = encoder_inputs(token_ids, images) if images else ()
        return PromptTokens(token_ids, inputs), expanded.text

    def _received(self, call: GenerateCall, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Returns the output that the client already has."""
        num_entries = len(call.received)
        if num_entries not in (0, params.n):
            raise InvalidArgumentError(
                "continue_from", f"has {num_entries} entries; must have sampling.n = {params.n}"
            )
        sequences = []
        for i, output in enumerate(call.received):
            field = f"continue_from[{i}].ids"
            if len(output.token_ids) > params.max_tokens:
                raise InvalidArgumentError(
                    field,
                    f"has {len(output.token_ids)} tokens; at most sampling.max_tokens = "
                    f"{params.max_tokens} are generated",
                )
            token_ids = tuple(output.token_ids)
            if token_ids:
                check_token_ids(token_ids, self._card.vocab_size, field)
            sequences.append(token_ids)
        return tuple(sequences)


def _texts_of(chat: Conversation) -> Iterator[str]:
    for turn in chat.turns:
        yield from turn.texts


def _flat(images: Sequence[Sequence[ReadImage]]) -> list[ReadImage]:
    return list(chain.from_iterable(images))


def _reported_reason(received: ReceivedOutput) -> FinishReason | None:
    """Returns the finish reason if only it tells of the end: a stop string is found in the
    tokens."""
    is_found = received.reason is FinishReason.STOP_STRING or not received.token_ids
    return None if is_found else received.reason
