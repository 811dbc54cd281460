"""Request validation and tokenization, before any compute is spent.

Every rejection is an `InvalidArgumentError` that names the field and the bound.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from baton.encoder_input import EncoderInput
from baton.encoder_input_wire import tensors_from_proto
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
from baton.v1 import admin_pb2
from baton.v1 import inference_pb2 as pb
from baton_router.images.expansion import (
    PromptTokens,
    ReadImage,
    encoder_inputs,
    expand_ids,
    expand_text,
    placeholders,
)
from baton_router.images.image_source import GivenImage, ImageError, NoImagesError
from baton_router.intake.chat import ChatTokenizer, RenderedChat
from baton_router.intake.model_card import ModelCard
from baton_router.intake.parsing import (
    check_template_takes_tools,
    constrained,
    given_image,
    images_of,
    parsing_options,
    request_parsing,
    template_tools,
    template_turns,
    template_variables,
    texts_of,
    with_frames,
)
from baton_router.intake.request_bounds import (
    DEFAULT_MAX_INPUT_TOKENS,
    DEFAULT_MAX_INPUTS,
    DEFAULT_MAX_MESSAGES,
    DEFAULT_MAX_TOOLS,
)
from baton_router.request import ANONYMOUS, Request

if TYPE_CHECKING:
    from baton_router.images.image_cache import ImageCache
    from baton_router.images.image_reader import ImageReader

MAX_REQUEST_ID_BYTES = 128
# Shorter texts are tokenized faster than a thread is dispatched.
_THREAD_FROM_BYTES = 4096
_THREAD_FROM_TOKENS = 256
# Texts above which a thread tokenizes them together.
_THREAD_FROM_TEXTS = 16
# Conversations above which a thread renders them, as it does all with tools.
_THREAD_FROM_MESSAGES = 16
# Last tokens of a prompt that tell whether it ends within reasoning.
_END_TOKENS = 64

_REPORTED_FINISH_REASONS = (
    pb.FINISH_REASON_END_OF_SEQUENCE,
    pb.FINISH_REASON_STOP_TOKEN,
    pb.FINISH_REASON_LENGTH,
)

_Text = TypeVar("_Text", str, RenderedChat)


class Intake:
    """Validator and tokenizer of requests for one model."""

    def __init__(
        self,
        card: ModelCard,
        max_prompt_bytes: int,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_tools: int = DEFAULT_MAX_TOOLS,
        *,
        max_inputs: int = DEFAULT_MAX_INPUTS,
        max_input_tokens: int = DEFAULT_MAX_INPUT_TOKENS,
        allow_special_tokens: bool = False,
        images: "ImageReader | None" = None,
        why_no_images: str = "",
    ) -> None:
        """Limits texts to `max_prompt_bytes`, conversations to `max_messages`, requests to
        `max_tools`, and calls for pooled outputs to `max_inputs` of `max_input_tokens` together.
        `allow_special_tokens`: see `ChatTokenizer`. `images`: reader of images; None: requests with
        images are refused, for the reason `why_no_images`; empty: the model takes none."""
        self._card = card
        self._images = images
        self._why_no_images = why_no_images
        self._chat = ChatTokenizer(card, allow_special_tokens=allow_special_tokens)
        self._max_prompt_bytes = max_prompt_bytes
        self._max_messages = min(max_messages, card.max_model_len)
        self._max_tools = max_tools
        self._max_inputs = max_inputs
        self._max_input_tokens = max_input_tokens

    @property
    def takes_images(self) -> bool:
        """True if requests may have images."""
        return self._images is not None

    @property
    def image_cache(self) -> "ImageCache | None":
        """Preprocessed images of earlier requests; None: requests may have none."""
        return None if self._images is None else self._images.cache

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
        request_id = _request_id(message.request_id)
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

    async def read_inputs(
        self, message: pb.EmbedRequest, max_model_len: int, tenant: Tenant = ANONYMOUS
    ) -> list[Request]:
        """Returns a request for the pooled output of each input. Arguments as of `read`."""
        self._check_num("inputs", len(message.inputs))
        texts: list[str] = []
        for i, given in enumerate(message.inputs):
            kind = given.WhichOneof("input")
            if kind is None:
                raise InvalidArgumentError(f"inputs[{i}]", "is missing; set text or token_ids")
            if kind == "text":
                self._check_size(f"inputs[{i}].text", given.text)
                texts.append(given.text)
        encoded = iter(await self._encode_all(texts))
        prompts = [
            tuple(given.token_ids.ids) if given.HasField("token_ids") else tuple(next(encoded))
            for given in message.inputs
        ]
        return self._pooled(message, "inputs", prompts, max_model_len, tenant)

    async def read_pairs(
        self, message: pb.ScoreRequest, max_model_len: int, tenant: Tenant = ANONYMOUS
    ) -> list[Request]:
        """Returns a request for the score of each pair as one prompt. Arguments as of `read`."""
        self._check_pairs(message)
        encoded = await self._encode_all([(pair.first, pair.second) for pair in message.pairs])
        return self._pooled(message, "pairs", list(map(tuple, encoded)), max_model_len, tenant)

    async def read_texts_of_pairs(
        self, message: pb.ScoreRequest, max_model_len: int, tenant: Tenant = ANONYMOUS
    ) -> tuple[list[Request], list[tuple[int, int]]]:
        """Returns a request for the embedding of each text, once for all pairs that share it, and
        the two indices of each pair. Arguments as of `read`."""
        self._check_pairs(message)
        texts = list(dict.fromkeys(t for pair in message.pairs for t in (pair.first, pair.second)))
        prompts = list(map(tuple, await self._encode_all(texts)))
        requests = self._pooled(message, "pairs", prompts, max_model_len, tenant)
        at = {text: i for i, text in enumerate(texts)}
        return requests, [(at[pair.first], at[pair.second]) for pair in message.pairs]

    def _check_pairs(self, message: pb.ScoreRequest) -> None:
        self._check_num("pairs", len(message.pairs))
        for i, pair in enumerate(message.pairs):
            self._check_size(f"pairs[{i}].first", pair.first)
            self._check_size(f"pairs[{i}].second", pair.second)

    def _pooled(
        self,
        message: pb.EmbedRequest | pb.ScoreRequest,
        field: str,
        prompts: Sequence[tuple[int, ...]],
        max_model_len: int,
        tenant: Tenant,
    ) -> list[Request]:
        pooling = self._card.pooling
        assert pooling is not None, "a pooled output of a model without one"
        limit = min(max_model_len, self._card.max_model_len)
        for i, token_ids in enumerate(prompts):
            check_token_ids(token_ids, self._card.vocab_size, f"{field}[{i}]")
            check_length(len(token_ids), 1, limit, f"{field}[{i}]")
        num_tokens = sum(map(len, prompts))
        if num_tokens > self._max_input_tokens:
            raise InvalidArgumentError(
                field,
                f"have {num_tokens} tokens together; at most {self._max_input_tokens} are taken: "
                "send fewer at once",
            )
        # Prompt log-probabilities keep a placement from counting cached tokens that are computed.
        scored = 0 if pooling.needs_all_tokens else None
        params = SamplingParams(max_tokens=1, prompt_logprobs=scored)
        own_id = _request_id(message.request_id)
        return [
            Request(
                own_id if len(prompts) == 1 else f"{own_id}-{i}",
                token_ids,
                params,
                message.priority,
                tenant=tenant,
                model=self._card.name,
            )
            for i, token_ids in enumerate(prompts)
        ]

    def _check_num(self, field: str, num: int) -> None:
        if not 1 <= num <= self._max_inputs:
            raise InvalidArgumentError(
                field, f"has {num} items; must have at least 1 and at most {self._max_inputs}"
            )

    async def _encode_all(self, texts: list[str] | list[tuple[str, str]]) -> list[list[int]]:
        num_chars = sum(len(t) if isinstance(t, str) else len(t[0]) + len(t[1]) for t in texts)
        is_long = len(texts) > _THREAD_FROM_TEXTS or num_chars >= _THREAD_FROM_BYTES
        encode = partial(self._card.encode_all, texts)
        return await asyncio.to_thread(encode) if is_long else encode()

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
        read = await self._read_images(images, tenant)
        chat = await self._render(with_frames(messages, map(len, read)), tools, variables)
        self._check_size("input.chat.messages", chat.text)
        prompt, _ = await self._encode_chat(chat, _flat(read))
        return prompt

    async def prompt_of(
        self,
        message: "pb.GenerateRequest | admin_pb2.FlushCacheRequest",
        tenant: Tenant | None = None,
    ) -> PromptTokens:
        """Returns the tokens of the input, at least 1, with its images. `tenant`: as of
        `prompt_of_chat`."""
        given = message if isinstance(message, pb.GenerateRequest) else pb.GenerateRequest()
        kind = message.WhichOneof("input")
        if given.images and kind == "chat":
            raise ImageError("images", "is set beside chat; expected them in parts of its messages")
        if given.encoder_inputs and (kind != "token_ids" or given.images):
            raise ImageError(
                "encoder_inputs", "is set; expected only with token_ids, and without images"
            )
        if kind == "token_ids":
            # Before a list is made of ids that are too many.
            check_length(len(message.token_ids.ids), 0, self._card.max_model_len, "input.token_ids")
            token_ids = list(message.token_ids.ids)
            check_token_ids(token_ids, self._card.vocab_size, "input.token_ids")
            if given.encoder_inputs:
                return await self._check_inputs(given, token_ids)
            images = await self._read_images(_images_of(given), tenant)
            return await self._expand_ids(token_ids, _flat(images))
        prompt, _ = await self._encode(message, tenant)
        if not prompt.token_ids:
            raise InvalidArgumentError("input", "has no tokens; at least 1 is needed")
        return prompt

    async def _read_images(
        self, images: Sequence[GivenImage], tenant: Tenant | None
    ) -> list[list[ReadImage]]:
        """Returns the frames of each image and clip."""
        if not images:
            return []
        read = await self._reader().read(images, None if tenant is None else tenant.salt)
        num_tokens = sum(len(image.span) for image in _flat(read))
        if num_tokens > self._card.max_model_len:  # before they are tokenized
            raise ImageError(
                images[-1].field,
                f"makes the images of the request {num_tokens} tokens; the model's length is "
                f"{self._card.max_model_len}",
            )
        return read

    def _reader(self) -> "ImageReader":
        """Returns the reader of images. Raises `NoImagesError` if there is none."""
        if self._images is None:
            raise NoImagesError(
                self._why_no_images
                or f"model {self._card.name!r} takes no images; expected a vision-language model, "
                "such as LLaVA"
            )
        return self._images

    async def _check_inputs(self, message: pb.GenerateRequest, ids: list[int]) -> PromptTokens:
        """Returns the prompt of a client that has preprocessed its images."""
        # The hash is computed here: the engine believes it.
        given = [
            EncoderInput(b"", item.start, item.length, tensors_from_proto(item))
            for item in message.encoder_inputs
        ]
        return PromptTokens(ids, await self._reader().check(given, ids))

    async def _expand_ids(self, ids: list[int], images: Sequence[ReadImage]) -> PromptTokens:
        if self._images is None or not images:
            return PromptTokens(ids)
        reader = self._images
        _check_placeholders(ids.count(reader.placeholder_id), images, reader, "input.token_ids")
        texts = list(dict.fromkeys(image.replacement for image in images))
        ids_of = {text: self._card.encode_rendered(text) for text in texts}
        replacements = [ids_of[image.replacement] for image in images]
        expanded = expand_ids(ids, reader.placeholder_id, replacements)
        return PromptTokens(expanded, encoder_inputs(expanded, images))

    async def _encode_chat(
        self, chat: RenderedChat, images: Sequence[ReadImage]
    ) -> tuple[PromptTokens, str]:
        """Returns the tokens of a conversation and its text, with its images expanded."""
        chat = self._expand(chat, images, "input.chat.messages")
        token_ids = await _off_loop(self._chat.encode, chat, len(chat.text))
        return PromptTokens(token_ids, encoder_inputs(token_ids, images)), chat.text

    def _expand(self, given: RenderedChat, images: Sequence[ReadImage], field: str) -> RenderedChat:
        """Returns a text with its placeholders expanded. Raises `InvalidArgumentError` unless it
        has one for each image."""
        reader = self._images
        if reader is None:
            return given
        places = placeholders(given.text, reader.placeholder, given.cuts)
        _check_placeholders(len(places), images, reader, field)
        replacements = [image.replacement for image in images]
        return RenderedChat(
            *expand_text(given.text, reader.placeholder, places, replacements, given.cuts)
        )

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

    async def _encode(
        self,
        message: "pb.GenerateRequest | pb.TokenizeRequest | admin_pb2.FlushCacheRequest",
        tenant: Tenant | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[PromptTokens, str]:
        kind = message.WhichOneof("input")
        if kind == "text":
            self._check_size("input.text", message.text)
            images = _flat(await self._read_images(_images_of(message), tenant))
            text = self._expand(RenderedChat(message.text), images, "input.text").text
            encode = self._card.encode if add_special_tokens else self._card.encode_rendered
            token_ids = await _off_loop(encode, text, len(text))
            return PromptTokens(token_ids, encoder_inputs(token_ids, images)), text
        if kind == "chat":
            return await self._encode_message(message, tenant)
        raise InvalidArgumentError("input", "is missing; set text, token_ids or chat")

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

    async def _encode_message(
        self,
        message: "pb.GenerateRequest | pb.TokenizeRequest | admin_pb2.FlushCacheRequest",
        tenant: Tenant | None,
    ) -> tuple[PromptTokens, str]:
        """Returns the tokens of a message's conversation and its text, with its images expanded."""
        chat = message.chat
        self._check_messages(len(chat.messages))
        self._check_size("input.chat.messages", "".join(texts_of(chat)))
        parsing = message.parsing if isinstance(message, pb.GenerateRequest) else pb.OutputParsing()
        tools = template_tools(parsing)
        variables = template_variables(parsing)
        read = await self._read_images(images_of(chat), tenant)
        make = partial(template_turns, chat, needs_parts=self._card.template_needs_parts)
        is_long = len(chat.messages) > _THREAD_FROM_MESSAGES
        turns = await asyncio.to_thread(make) if is_long else make()
        rendered = await self._render(with_frames(turns, map(len, read)), tools, variables)
        return await self._encode_chat(rendered, _flat(read))

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

    def _check_size(self, field: str, text: str) -> None:
        if not text:
            raise InvalidArgumentError(field, "is empty; at least 1 character is needed")
        # A character has at least one byte, so most texts need not be encoded to be refused.
        size = len(text) if len(text) > self._max_prompt_bytes else len(text.encode())
        if size > self._max_prompt_bytes:
            raise InvalidArgumentError(
                field, f"has {size} bytes or more; at most {self._max_prompt_bytes} are taken"
            )


async def _off_loop(encode: Callable[[_Text], list[int]], text: _Text, num_chars: int) -> list[int]:
    """Tokenizes long texts in a thread, so that other requests' tokens keep flowing."""
    return encode(text) if num_chars < _THREAD_FROM_BYTES else await asyncio.to_thread(encode, text)


def _images_of(
    message: "pb.GenerateRequest | pb.TokenizeRequest | admin_pb2.FlushCacheRequest",
) -> list[GivenImage]:
    """Returns the images beside an input, in order."""
    if isinstance(message, admin_pb2.FlushCacheRequest):
        return []
    return [given_image(image, f"images[{at}]") for at, image in enumerate(message.images)]


def _flat(images: Iterable[Sequence[ReadImage]]) -> list[ReadImage]:
    return list(chain.from_iterable(images))


def _check_placeholders(
    num: int, images: Sequence[ReadImage], reader: "ImageReader", field: str
) -> None:
    if num != len(images):
        raise InvalidArgumentError(
            field,
            f"has {num} times {reader.placeholder!r}; expected it once for each of the "
            f"{len(images)} images",
        )


def _ending_of(received: pb.ReceivedTokens) -> pb.FinishReason.ValueType:
    """Returns the finish reason if only it tells of the end: a stop string is found in the
    tokens."""
    is_reported = received.ids and received.finish_reason in _REPORTED_FINISH_REASONS
    return received.finish_reason if is_reported else pb.FINISH_REASON_UNSPECIFIED


def _request_id(given: str) -> str:
    if len(given.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidArgumentError(
            "request_id",
            f"has {len(given.encode())} bytes; at most {MAX_REQUEST_ID_BYTES} are taken",
        )
    return given or secrets.token_hex(8)
