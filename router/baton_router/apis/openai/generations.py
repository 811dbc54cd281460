"""Conversion of completions and chat completions to requests of the router."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec
from tokenizers import Tokenizer

from baton.errors import InvalidArgumentError
from baton.sampling import GrammarKind, SamplingParams
from baton.serving.deadline import Deadline
from baton.serving.tenant import Caller
from baton_router.apis.answers.answer_writer import AnswerStart, Extra, WriterOf
from baton_router.apis.answers.http_call import MAX_SILENCE, HttpCall
from baton_router.apis.answers.sequence_reader import EchoedPrompt, Reader
from baton_router.apis.edge.body.structure import MAX_PROMPTS
from baton_router.apis.openai.choice_formats import ChatShape, CompletionShape
from baton_router.apis.openai.choice_writer import ChoiceWriter
from baton_router.apis.openai.conversation import conversation_of, parsing_of
from baton_router.apis.openai.sampling import (
    chat_sampling,
    completion_sampling,
    defaults_over_http,
    is_bounded,
)
from baton_router.apis.openai.schemas import (
    ChatOptions,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerationRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from baton_router.call.generate_call import Conversation, GenerateCall, PromptInput
from baton_router.call.output_format import ParsingOptions
from baton_router.routing.placement.placer import Placer
from baton_router.served.served_models import Models, ServedModel
from baton_router.text.conversation.in_thread import in_thread_if_long
from baton_router.text.token_bytes import TokenBytes

ExtraOf = Callable[[Caller, Placer], Extra]


class Generations:
    """Factory of exchanges for completions and chat completions of all models. Each method raises
    `ModelNotFoundError` and `InvalidArgumentError`.

    Args:
        timeout: seconds, for a request that sets no deadline.
        extra_of: makes the timeline for a caller that asks for it.
        clamps_max_tokens: more tokens than the prompt leaves of the model's length are lowered to
            these; False: refused.
        max_silence: seconds, as of `HttpCall`.
        reasoning_field: that of chat completions with the reasoning, or "both".
    """

    def __init__(
        self,
        models: Models,
        timeout: float,
        extra_of: ExtraOf,
        *,
        clamps_max_tokens: bool = True,
        max_silence: float = MAX_SILENCE,
        reasoning_field: str = "both",
    ) -> None:
        self._models = models
        self._clamps = clamps_max_tokens
        self._timeout = timeout
        self._extra_of = extra_of
        self._max_silence = max_silence
        both = ("reasoning_content", "reasoning")
        self._reasoning_names = both if reasoning_field == "both" else (reasoning_field,)
        self._tokens = {model.name: TokenBytes(_tokenizer(model)) for model in models}
        self._defaults = {
            model.name: defaults_over_http(model.services.card.sampling_defaults)
            for model in models
        }

    async def complete(self, body: CompletionRequest, caller: Caller) -> HttpCall:
        """Makes the exchange of `/v1/completions`."""
        model = self._model(body.model)
        _check_stream(body)
        deadline = self._deadline(body)
        request_id = _new_id()
        prompts = _prompts(body)
        calls: list[GenerateCall] = []
        readers = []
        params = completion_sampling(body, self._defaults[model.name])
        for at, prompt in enumerate(prompts):
            own_id = request_id if len(prompts) == 1 else f"{request_id}-{at}"
            calls.append(_call(body, model, own_id, prompt, params, clamps=self._clamps))
            echo = await _echo(body, model, prompt, caller) if body.echo else None
            readers.append(Reader(at * body.n, body.n, echo, is_prompt_alone=body.is_prompt_alone))

        async def prepare() -> Sequence[GenerateCall]:
            if len(calls) > 1:  # or the valid ones would cost compute before one is refused
                await model.inference.wait_for_workers(deadline)
                for call, reader in zip(calls, readers, strict=True):
                    reader.note_request(await model.inference.check(call, caller))
            return calls

        shape = CompletionShape(self._tokens[model.name])
        writer_of = partial(ChoiceWriter, body, shape)
        return self._exchange(
            body, model, caller, deadline, request_id, prepare, readers, writer_of
        )

    async def chat(self, body: ChatRequest, caller: Caller) -> HttpCall:
        """Makes the exchange of `/v1/chat/completions`."""
        return await self.answer(body, await _conversation(body), caller)

    async def answer(
        self,
        options: ChatOptions,
        conversation: Conversation,
        caller: Caller,
        writer_of: WriterOf | None = None,
        *,
        is_lenient: bool = False,
        ignored: Sequence[str] = (),
    ) -> HttpCall:
        """Makes the exchange of a conversation.

        Args:
            writer_of: makes the writer of its answer; None: that of `/v1/chat/completions`.
            is_lenient: `max_tokens` are clamped whatever the setting is, and a budget of reasoning
                is ignored for a model whose reasoning is not known.
            ignored: fields without effect.
        """
        model = self._model(options.model)
        inference, card = model.inference, model.services.card
        _check_stream(options)
        deadline = self._deadline(options)
        tenant = inference.tenant_of(caller)
        if is_lenient and options.thinking_token_budget is not None and not card.reasoning_format:
            options = msgspec.structs.replace(options, thinking_token_budget=None)
            ignored = [*ignored, "parsing.max_reasoning_tokens"]
        request_id = _new_id()
        params = chat_sampling(options, self._defaults[model.name], card.max_model_len)
        grammar = params.grammar
        has_free_grammar = grammar is not None and grammar.kind is not GrammarKind.JSON_SCHEMA
        parsing = parsing_of(options, card, has_free_grammar=has_free_grammar)
        clamps = is_lenient or self._clamps

        async def prepare() -> Sequence[GenerateCall]:
            await inference.wait_for_workers(deadline)
            async with deadline.limit():  # images take time to be fetched
                longest = inference.context_length
                prompt = await model.services.intake.prompt_of(
                    conversation, tenant=tenant, longest=longest
                )
            num_tokens = len(prompt.token_ids)
            longest.check(num_tokens, 1, "input.chat.messages")
            bounded = params
            if not is_bounded(options):
                bounded = replace(params, max_tokens=longest.num_tokens - num_tokens)
            return [_call(options, model, request_id, prompt, bounded, parsing, clamps=clamps)]

        if writer_of is None:
            shape = ChatShape(
                self._tokens[model.name],
                is_parsed=parsing is not None,
                may_call=parsing is not None and bool(parsing.tools),
                reasoning_names=self._reasoning_names if options.include_reasoning else (),
            )
            writer_of = partial(ChoiceWriter, options, shape)
        readers = [Reader(0, options.n)]
        return self._exchange(
            options,
            model,
            caller,
            deadline,
            request_id,
            prepare,
            readers,
            writer_of,
            is_parsed=parsing is not None,
            ignored=ignored,
        )

    async def tokens_of_chat(
        self, model: str, conversation: Conversation, caller: Caller
    ) -> Sequence[int]:
        """Returns the token ids of a conversation's prompt."""
        served = self._model(model)
        tenant = served.inference.tenant_of(caller)
        return (await served.services.intake.prompt_of(conversation, tenant=tenant)).token_ids

    async def tokenize(self, body: TokenizeRequest, caller: Caller) -> TokenizeResponse:
        """Answers `/tokenize`."""
        model = self._model(body.model)
        if body.prompt is not None and body.messages is not None:
            raise InvalidArgumentError("messages", "is set beside prompt; give one of them")
        if body.messages is None:
            if body.prompt is None:
                raise InvalidArgumentError("prompt", "is missing; set it, or messages")
            has_special = body.add_special_tokens is not False
            holder = model.inference.tenant_of(caller).name
            token_ids, _ = await model.services.intake.tokenize(
                body.prompt, holder=holder, add_special_tokens=has_special
            )
        elif body.add_special_tokens:
            raise InvalidArgumentError(
                "add_special_tokens", "is True; the chat template adds those of messages"
            )
        else:
            chat = ChatRequest(
                messages=body.messages,
                tools=body.tools,
                chat_template_kwargs=body.chat_template_kwargs,
                continue_final_message=body.continue_final_message,
                add_generation_prompt=body.add_generation_prompt,
            )
            token_ids = await self.tokens_of_chat(model.name, await _conversation(chat), caller)
        names = None
        if body.return_token_strs:
            names = [_tokenizer(model).id_to_token(i) or "" for i in token_ids]
        limit = model.inference.max_model_len
        return TokenizeResponse(list(token_ids), len(token_ids), limit, names)

    async def detokenize(self, body: DetokenizeRequest, _caller: Caller) -> DetokenizeResponse:
        """Answers `/detokenize`."""
        intake = self._model(body.model).services.intake
        return DetokenizeResponse(await intake.detokenize(body.tokens))

    def _model(self, name: str) -> ServedModel:
        # Requests over HTTP do not resume at another router, so that any id may draw the model.
        return self._models.of(name, _new_id())

    def _exchange(
        self,
        body: GenerationRequest,
        model: ServedModel,
        caller: Caller,
        deadline: Deadline,
        request_id: str,
        prepare: Callable[[], Awaitable[Sequence[GenerateCall]]],
        readers: Sequence[Reader],
        writer_of: WriterOf,
        *,
        is_parsed: bool = False,
        ignored: Sequence[str] = (),
    ) -> HttpCall:
        has_extra = body.baton.timeline
        extra = self._extra_of(caller, model.services.placer) if has_extra else None
        tokens = self._tokens[model.name]
        start = AnswerStart(
            request_id, model.name, readers, is_parsed, self._defaults[model.name], extra, tokens
        )
        return HttpCall(
            model.inference,
            caller,
            deadline,
            request_id,
            prepare,
            readers,
            writer_of(start),
            is_stream=body.stream,
            ignored=ignored,
            max_silence=self._max_silence,
        )

    def _deadline(self, body: GenerationRequest) -> Deadline:
        given = body.baton.timeout_s
        return Deadline.after(self._timeout if given is None else given)


async def _echo(
    body: CompletionRequest, model: ServedModel, prompt: str | Sequence[int], caller: Caller
) -> EchoedPrompt:
    """Returns the prompt to repeat, with its tokens if they are to be scored."""
    if not isinstance(prompt, str):
        text = _tokenizer(model).decode(prompt, skip_special_tokens=False)
        return EchoedPrompt(text, prompt if body.logprobs is not None else ())
    if body.logprobs is None:
        return EchoedPrompt(prompt)
    holder = model.inference.tenant_of(caller).name
    token_ids, _ = await model.services.intake.tokenize(prompt, holder=holder)
    return EchoedPrompt(prompt, token_ids)


def _tokenizer(model: ServedModel) -> Tokenizer:
    return model.services.card.tokenizer


async def _conversation(body: ChatRequest) -> Conversation:
    return await in_thread_if_long(len(body.messages), conversation_of, body)


def _call(
    body: GenerationRequest,
    model: ServedModel,
    request_id: str,
    prompt: PromptInput,
    params: SamplingParams,
    parsing: ParsingOptions | None = None,
    *,
    clamps: bool,
) -> GenerateCall:
    return GenerateCall(
        prompt,
        params,
        model.name,
        request_id,
        body.priority or body.baton.priority,
        parsing,
        cache_salt=body.cache_salt,
        clamps_max_tokens=clamps,
    )


def _new_id() -> str:
    return secrets.token_hex(8)


def _check_stream(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidArgumentError("stream_options", "is only for requests with stream = true")


def _prompts(body: CompletionRequest) -> Sequence[str | Sequence[int]]:
    """Returns each prompt of a request that may have several."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidArgumentError("prompt", "is empty")
    if isinstance(prompt[0], int):
        prompts: Sequence[str | Sequence[int]] = [prompt]
    else:
        prompts = prompt
    if len(prompts) > MAX_PROMPTS:
        raise InvalidArgumentError(
            "prompt", f"has {len(prompts)} prompts; at most {MAX_PROMPTS} are taken"
        )
    return prompts
