"""Request check: the errors of a request that an engine cannot serve, found from its facts alone.

Any process that has the facts may check. Knows nothing of what the engine holds now.
"""

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from baton.context_length import POOL_SETTINGS, ContextLength
from baton.engine.executor.cache.kv_layout import KvLayout
from baton.engine.executor.memory.pool_size import peak_blocks
from baton.engine.facts import EngineFacts, ModelInfo
from baton.engine.request import EngineRequest, KvSource, Purpose
from baton.engine.scheduler.sequences.encoder_inputs import check_encoder_inputs
from baton.errors import EngineLimitError, FailedPreconditionError, InvalidArgumentError
from baton.models.images.encoder_input import CONTENT_HASH_BYTES, EncoderInput
from baton.models.images.image_format import ImageFormat
from baton.models.pooling import why_not
from baton.sampling import check_token_ids, check_vocabulary

if TYPE_CHECKING:
    from baton.engine.executor.grammar.state import RequestGrammar


class RequestCheck:
    """Request check of one engine. Call it with a request; it raises `InvalidArgumentError` or
    `FailedPreconditionError` with the reason."""

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self._info = facts.info

    def __call__(self, request: EngineRequest) -> None:
        if self._facts.encoder_only:
            raise FailedPreconditionError(
                f"this engine has loaded the encoder of model {self._info.name!r} alone; load it "
                "without encoder_only to run requests"
            )
        pooling = self._info.pooling
        if request.is_pooled != (pooling is not None):
            reason = why_not(self._info.name, pooling, "embedding" if request.is_pooled else None)
            raise FailedPreconditionError(reason)
        check_token_ids(request.token_ids, self._info.vocab_size, "token_ids")
        if not 1 <= request.num_prompt_tokens <= len(request.token_ids):
            raise InvalidArgumentError(
                "num_prompt_tokens",
                f"is {request.num_prompt_tokens}; must be in [1, {len(request.token_ids)}]",
            )
        self._check_length(request)
        if len(request.token_ids) - request.num_prompt_tokens >= request.params.max_tokens:
            raise InvalidArgumentError(
                "sampling.max_tokens", "is already reached by the output given"
            )
        check_vocabulary(request.params, self._info.vocab_size)
        self._check_images(request)
        self._check_several(request)
        self._check_outputs(request)
        _check_returnable(request)
        for layout, num_blocks in zip(self._facts.layouts, self._facts.num_blocks, strict=True):
            needed = self._num_blocks_for(request, layout)
            if needed > num_blocks:
                size = layout.block_size
                raise EngineLimitError(
                    "token_ids",
                    f"with what is to follow, they need {needed * size} tokens of KV, in blocks of "
                    f"{size}; the KV pool has room for {num_blocks * size}. Ask for fewer tokens, "
                    f"or enlarge the pool by {POOL_SETTINGS}.",
                )

    def encoder_input(self, encoder_input: EncoderInput, *, has_tensors: bool) -> None:
        """Raises for an input outside of a prompt that this engine could not compute. Its
        tensors may be missing unless `has_tensors`."""
        field, facts = "encoder_input", self._facts
        if self._info.images is None:
            raise FailedPreconditionError(why_no_images(self._info))
        if len(encoder_input.content_hash) != CONTENT_HASH_BYTES:
            raise InvalidArgumentError(
                f"{field}.content_hash",
                f"has {len(encoder_input.content_hash)} bytes; expected {CONTENT_HASH_BYTES}",
            )
        most = min(facts.encoder_cache_tokens, facts.encoder_budget)
        if not 1 <= encoder_input.length <= most:
            kind = EngineLimitError if encoder_input.length > most else InvalidArgumentError
            raise kind(f"{field}.length", f"is {encoder_input.length}; expected 1 to {most}")
        if has_tensors:
            _check_tensors(self._info.images, encoder_input, field)

    def _check_length(self, request: EngineRequest) -> None:
        """Raises `ContextLengthError` if a sequence would be too long. Another engine writes the
        output of a prefill, but for its first token."""
        longest = ContextLength(self._info.max_model_len)
        if request.purpose is Purpose.PREFILL:
            longest.check(len(request.token_ids), 1)
        else:
            longest.check(request.num_prompt_tokens, request.params.max_tokens)

    def _check_images(self, request: EngineRequest) -> None:
        """Raises if a request's images do not fit the model, its prompt or the encoder."""
        inputs = request.encoder_inputs
        if not inputs:
            return
        if self._info.images is None:
            raise FailedPreconditionError(why_no_images(self._info))
        facts = self._facts
        check_encoder_inputs(
            inputs, request.num_prompt_tokens, facts.encoder_cache_tokens, facts.encoder_budget
        )
        if facts.uncut_image_tokens is not None:
            _check_uncut(inputs, request.num_prompt_tokens, facts.uncut_image_tokens)
        for i, encoder_input in enumerate(inputs):
            _check_image(self._info.images, request, encoder_input, f"encoder_inputs[{i}]")

    def _check_several(self, request: EngineRequest) -> None:
        """Raises if a request of several sequences, which all fork from its prompt, cannot run."""
        params, num_sequences = request.params, request.params.num_sequences
        params.check_several()
        if request.purpose is Purpose.PREFILL:
            return
        if num_sequences > self._facts.max_num_seqs:
            raise EngineLimitError(
                f"sampling.{params.sequences_field}",
                f"asks for {num_sequences} sequences; this engine runs {self._facts.max_num_seqs} "
                "at once (--max-num-seqs)",
            )
        if num_sequences > 1 and len(request.token_ids) > request.num_prompt_tokens:
            raise InvalidArgumentError(
                "num_prompt_tokens",
                f"is {request.num_prompt_tokens} of {len(request.token_ids)} tokens; must be all "
                "where several sequences are asked for: they share their prompt only",
            )

    def _check_outputs(self, request: EngineRequest) -> None:
        """Raises if the given `outputs` do not fit the request's sequences."""
        params, outputs = request.params, request.outputs
        if not outputs:
            return
        if params.num_sequences == 1 or params.is_ranked:
            raise InvalidArgumentError(
                "outputs", "is only for several sequences that are not ranked (n > 1)"
            )
        if len(outputs) != params.n:
            raise InvalidArgumentError(
                "outputs", f"has {len(outputs)} entries; must have sampling.n = {params.n}, or none"
            )
        if not request.unfinished:
            raise InvalidArgumentError("outputs", "are all complete; nothing is left to generate")
        for i, output in enumerate(outputs):
            if not output:
                continue
            if len(output) >= params.max_tokens:
                raise InvalidArgumentError(
                    _field_of(i),
                    f"has {len(output)} tokens; must have fewer than sampling.max_tokens = "
                    f"{params.max_tokens}",
                )
            check_token_ids(output, self._info.vocab_size, _field_of(i))

    def _num_blocks_for(self, request: EngineRequest, layout: KvLayout) -> int:
        """Returns the most blocks of one group for a request. The KV of the last token is never
        computed. Of several sequences one can always continue alone, but beams only together."""
        total = request.num_prompt_tokens + request.params.max_tokens - 1
        if request.purpose is Purpose.PREFILL:
            total = len(request.token_ids)
        num_blocks = peak_blocks(layout, total, self._facts.max_num_batched_tokens)
        is_beam_search = request.params.beam_width and request.purpose is not Purpose.PREFILL
        return num_blocks * request.params.beam_width if is_beam_search else num_blocks


def check_grammar(request: EngineRequest, grammar: "RequestGrammar") -> None:
    """Raises `InvalidArgumentError` unless `grammar` allows the output that the request has."""
    grammar.start(request.token_ids[request.num_prompt_tokens :])
    for i, output in enumerate(request.outputs):
        if output:
            grammar.start(output, _field_of(i))


def _field_of(index: int) -> str:
    return f"outputs[{index}].token_ids"


def why_no_images(info: ModelInfo) -> str:
    """Returns the reason for which a model without images refuses one."""
    return (
        f"model {info.name!r} takes no images: {info.architecture} is served as a language model; "
        "choose a vision-language model"
    )


def _check_uncut(inputs: SequenceOf[EncoderInput], num_prompt_tokens: int, most: int) -> None:
    """Raises `EngineLimitError` for an image that one step could not compute, and
    `InvalidArgumentError` for one that no text follows: the last token of a prompt may be computed
    apart, and images side by side would be one to transformers."""
    starts = [*(i.start for i in inputs[1:]), num_prompt_tokens]
    for i, (encoder_input, next_start) in enumerate(zip(inputs, starts, strict=True)):
        field = f"encoder_inputs[{i}]"
        if encoder_input.length > most:
            raise EngineLimitError(
                field,
                f"is {encoder_input.length} tokens long, which one step has to compute; beside "
                f"decodes it has room for {most}: raise max_num_batched_tokens, "
                "max_num_tokens_with_decodes or long_prefill_threshold, or lower max_num_seqs",
            )
        if encoder_input.end == next_start:
            raise InvalidArgumentError(field, "is not followed by a token of text")


def _check_image(
    images: ImageFormat, request: EngineRequest, encoder_input: EncoderInput, field: str
) -> None:
    """Raises `InvalidArgumentError` for an image that does not fit the tokens of its span, or that
    the model's encoder could not compute."""
    expected = _check_tensors(images, encoder_input, field)
    span = request.token_ids[encoder_input.start : encoder_input.end]
    for i, (token_id, placeholder_id) in enumerate(zip(span, expected, strict=True)):
        if token_id != placeholder_id:
            raise InvalidArgumentError(
                f"token_ids[{encoder_input.start + i}]",
                f"is {token_id} within {field}; expected the placeholder {placeholder_id}",
            )


def _check_tensors(images: ImageFormat, encoder_input: EncoderInput, field: str) -> SequenceOf[int]:
    """Returns the tokens of an image. Raises `InvalidArgumentError` for one that the encoder could
    not compute."""
    try:
        expected = images.span(encoder_input.tensors)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{field}.{error.field}", error.problem) from error
    if encoder_input.length != len(expected):
        raise InvalidArgumentError(
            field, f"is {encoder_input.length} tokens long; its image has {len(expected)}"
        )
    return expected


def _check_returnable(request: EngineRequest) -> None:
    """Raises if a request has a return cost but could not be returned."""
    if request.return_cost is None:
        return
    is_external = request.kv_source is KvSource.EXTERNAL and not request.num_external_tokens
    generates = request.purpose is Purpose.GENERATE and request.params.num_sequences == 1
    if not (is_external and generates):
        raise InvalidArgumentError(
            "return_cost", "is only for one sequence that arrives with the KV of all its tokens"
        )
