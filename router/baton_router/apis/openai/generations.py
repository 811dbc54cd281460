"""Conversion of completions and chat completions to requests of the router."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from baton.errors import InvalidArgumentError
from baton.sampling import GrammarKind, SamplingParams
from baton.serving.deadline import Deadline
from baton.serving.tenant import Caller
from baton_router.apis.answers.answer_writer import AnswerStart, Extra, WriterOf
from baton_router.apis.answers.exchange import Exchange
from baton_router.apis.answers.sequence_reader import Prompt, Reader
from baton_router.apis.edge.structure import MAX_PROMPTS
from baton_router.apis.openai.choice_formats import ChatShape, CompletionShape
from baton_router.apis.openai.choice_writer import ChoiceWriter
from baton_router.apis.openai.conversation import conversation_of, parsing_of
from baton_router.apis.openai.sampling import chat_sampling, completion_sampling
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
from baton_router.lifecycle.inference import Inference
from baton_router.text.conversation import in_thread_if_long
from baton_router.text.intake import Intake
from baton_router.text.token_bytes import TokenBytes

ExtraOf = Callable[[Caller], Extra]


class Generations:
    """Factory of exchanges for completions and chat completions.

    Args:
        timeout: seconds, for a request that sets no deadline.
        extra_of: makes the timeline for a caller that asks for it.
    """

    def __init__(
        self, inference: Inference, intake: Intake, timeout: float, extra_of: ExtraOf
    ) -> None:
        self._inference = inference
        self._intake = intake
        self._timeout = timeout
        self._extra_of = extra_of
        self._tokens = TokenBytes(inference.card.tokenizer)

    async def complete(self, body: CompletionRequest, caller: Caller) -> Exchange:
        """Makes the exchange of `/v1/completions`. Raises `InvalidArgumentError`."""
        _check_stream(body)
        deadline = self._deadline(body)
        request_id = _new_id()
        prompts = _prompts(body)
        calls, readers = [], []
        params = completion_sampling(body)
        for at, prompt in enumerate(prompts):
            own_id = request_id if len(prompts) == 1 else f"{request_id}-{at}"
            calls.append(_call(body, own_id, prompt, params))
            echo = await self._echo(body, prompt) if body.echo else None
            readers.append(Reader(at * body.n, body.n, echo))
        if len(calls) > 1:  # or the valid ones would cost compute before one is refused
            await self._inference.wait_for_workers(deadline)
            for call in calls:
                await self._inference.check(call, caller)
        shape = CompletionShape(self._tokens)
        writer_of = partial(ChoiceWriter, body, shape)
        return self._exchange(body, caller, deadline, request_id, calls, readers, writer_of)

    async def chat(self, body: ChatRequest, caller: Caller) -> Exchange:
        """Makes the exchange of `/v1/chat/completions`. Raises `InvalidArgumentError`."""
        return await self.answer(body, await _conversation(body), caller)

    async def answer(
        self,
        options: ChatOptions,
        conversation: Conversation,
        caller: Caller,
        writer_of: WriterOf | None = None,
    ) -> Exchange:
        """Makes the exchange of a conversation. `writer_of` makes the writer of its answer; None:
        that of `/v1/chat/completions`. Raises `InvalidArgumentError`."""
        _check_stream(options)
        deadline = self._deadline(options)
        await self._inference.wait_for_workers(deadline)
        tenant = self._inference.tenant_of(caller)
        async with asyncio.timeout(deadline.remaining()):  # images take time to be fetched
            prompt = await self._intake.prompt_of(conversation, tenant=tenant)
        num_tokens = len(prompt.token_ids)
        num_left = self._inference.max_model_len - num_tokens
        if num_left < 1:
            raise InvalidArgumentError(
                "input.chat.messages",
                f"have {num_tokens} tokens; the model's length is "
                f"{self._inference.max_model_len}, and an answer needs one at least",
            )
        request_id = _new_id()
        params = chat_sampling(options, num_left)
        grammar = params.grammar
        has_free_grammar = grammar is not None and grammar.kind is not GrammarKind.JSON_SCHEMA
        parsing = parsing_of(options, self._inference.card, has_free_grammar=has_free_grammar)
        call = _call(options, request_id, prompt, params, parsing)
        if writer_of is None:
            shape = ChatShape(self._tokens, is_parsed=parsing is not None)
            writer_of = partial(ChoiceWriter, options, shape)
        readers = [Reader(0, options.n)]
        return self._exchange(options, caller, deadline, request_id, [call], readers, writer_of)

    async def tokens_of_chat(self, conversation: Conversation) -> Sequence[int]:
        """Returns the token ids of a conversation's prompt. Raises `InvalidArgumentError`."""
        return (await self._intake.prompt_of(conversation)).token_ids

    async def tokenize(self, body: TokenizeRequest, _caller: Caller) -> TokenizeResponse:
        """Answers `/tokenize`. Raises `InvalidArgumentError`."""
        if body.prompt is not None and body.messages is not None:
            raise InvalidArgumentError("messages", "is set beside prompt; give one of them")
        if body.messages is None:
            if body.prompt is None:
                raise InvalidArgumentError("prompt", "is missing; set it, or messages")
            has_special = body.add_special_tokens is not False
            token_ids, _ = await self._intake.tokenize(body.prompt, add_special_tokens=has_special)
        elif body.add_special_tokens:
            raise InvalidArgumentError(
                "add_special_tokens", "is True; the chat template adds those of messages"
            )
        else:
            chat = ChatRequest(
                messages=body.messages,
                tools=body.tools,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            token_ids = await self.tokens_of_chat(await _conversation(chat))
        names = None
        if body.return_token_strs:
            names = [self._inference.card.tokenizer.id_to_token(i) or "" for i in token_ids]
        limit = self._inference.max_model_len
        return TokenizeResponse(list(token_ids), len(token_ids), limit, names)

    async def detokenize(self, body: DetokenizeRequest, _caller: Caller) -> DetokenizeResponse:
        """Answers `/detokenize`. Raises `InvalidArgumentError`."""
        return DetokenizeResponse(await self._intake.detokenize(body.tokens))

    def _exchange(
        self,
        body: GenerationRequest,
        caller: Caller,
        deadline: Deadline,
        request_id: str,
        calls: Sequence[GenerateCall],
        readers: Sequence[Reader],
        writer_of: WriterOf,
    ) -> Exchange:
        extra = self._extra_of(caller) if body.baton.timeline else None
        is_parsed = calls[0].parsing is not None
        start = AnswerStart(request_id, self._inference.card.name, readers, is_parsed, extra)
        writer = writer_of(start)
        return Exchange(
            self._inference,
            caller,
            deadline,
            calls,
            readers,
            writer,
            is_stream=body.stream,
        )

    def _deadline(self, body: GenerationRequest) -> Deadline:
        given = body.baton.timeout_s
        return Deadline.after(self._timeout if given is None else given)

    async def _echo(self, body: CompletionRequest, prompt: str | Sequence[int]) -> Prompt:
        """Returns the prompt to repeat, with its tokens if they are to be scored."""
        if not isinstance(prompt, str):
            text = self._inference.card.tokenizer.decode(prompt, skip_special_tokens=False)
            return Prompt(text, prompt if body.logprobs is not None else ())
        if body.logprobs is None:
            return Prompt(prompt)
        token_ids, _ = await self._intake.tokenize(prompt)
        return Prompt(prompt, token_ids)


async def _conversation(body: ChatRequest) -> Conversation:
    return await in_thread_if_long(len(body.messages), conversation_of, body)


def _call(
    body: GenerationRequest,
    request_id: str,
    prompt: PromptInput,
    params: SamplingParams,
    parsing: ParsingOptions | None = None,
) -> GenerateCall:
    return GenerateCall(prompt, params, body.model, request_id, body.baton.priority, parsing)


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
