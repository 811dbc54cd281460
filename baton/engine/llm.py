"""LLM: offline batches of prompts, in one process and without a network.

`LLM.from_pretrained(path).generate(prompts)`.
"""

import os
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import LoadProgress, OnLoadedBytes
from baton.engine.core.engine_core import EngineCore
from baton.engine.core.request_check import why_no_images
from baton.engine.outputs import SequenceUpdate
from baton.engine.pooling import pooled_output, pooled_request
from baton.engine.ranking import ranked
from baton.engine.request import EngineRequest, FinishReason, MultimodalPrompt
from baton.engine.scheduler.plan import Float32Array, TokenLogprobs
from baton.engine.stopped_texts import StoppedText, StoppedTexts
from baton.errors import FailedPreconditionError, InvalidArgumentError, OverloadedError
from baton.models.detokenizer import text_after
from baton.models.generation_config import sampling_defaults
from baton.models.pooling import why_not
from baton.sampling import SamplingDefaults, SamplingParams, with_banned_tokens

if TYPE_CHECKING:
    from baton.engine.executor.vision.prompt_processor import PromptProcessor

Prompt = str | SequenceOf[int] | MultimodalPrompt


@dataclass(frozen=True, slots=True)
class Completion:
    """Finished continuation of a prompt.

    Attributes:
        text: the new tokens as text; None if all prompts were token ids and no tokenizer is loaded.
        logprobs: one per token, if requested; else empty.
        score: score of a beam.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Continuations of a prompt: `n` of them, the best first where they were ranked.

    Attributes:
        prompt_logprobs: from the second prompt token on, if requested.
    """

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first continuation; the properties below are its as well."""
        return self.completions[0].token_ids

    @property
    def text(self) -> str | None:
        return self.completions[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(logprobs.logprob for logprobs in self.completions[0].logprobs)


class LLM:
    """Offline inference of one checkpoint.

    Attributes:
        core: the engine, which may also be stepped by hand.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._tokenizer: Any = None
        self._prompt_processor: PromptProcessor | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        on_progress: LoadProgress = lambda _phase, _fraction: None,
        on_loaded_bytes: OnLoadedBytes = lambda _loaded, _all: None,
    ) -> "LLM":
        """Loads a checkpoint; arguments and errors as of `EngineCore.from_pretrained`."""
        return cls(
            EngineCore.from_pretrained(
                path, config, on_progress=on_progress, on_loaded_bytes=on_loaded_bytes
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all requests and frees their blocks. Also the end of a `with` block. Idempotent."""
        self.core.close()

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Continues every prompt and returns the results in order. Runs requests that were added
        to `core`, too, as far as they get meanwhile; their updates of these steps are dropped.
        Steps are the largest, unless `max_num_tokens_with_decodes` is set.

        Args:
            prompts: texts, lists of token ids, or prompts with images (`prompt_with_images`).
            params: one for all prompts, or one each; what they leave unset is taken of
                `sampling_defaults`. None: 16 tokens. With `stop` a sequence's text ends before the
                first stop string, its tokens with the one that completes it.
        """
        every = [
            with_banned_tokens(one, self._encode_word) for one in self._params_for(prompts, params)
        ]
        requests = [
            self._request(f"generate-{i}", prompt, of_one)
            for i, (prompt, of_one) in enumerate(zip(prompts, every, strict=True))
        ]
        collected: dict[str, list[SequenceUpdate]] = {r.request_id: [] for r in requests}
        stopped = {r.request_id: self._stopped_texts(r) for r in requests if r.params.stop}
        added: list[str] = []
        try:
            for request in requests:
                self.core.add(request)
                added.append(request.request_id)
            with self._largest_steps():
                self._run_to_end(collected, stopped)
        except BaseException:
            self.core.scheduler.abort(*added)
            raise
        return [
            self._result(r, collected[r.request_id], prompts, stopped.get(r.request_id, {}))
            for r in requests
        ]

    def _largest_steps(self) -> AbstractContextManager[None]:
        is_limited = self.core.config.max_num_tokens_with_decodes is not None
        return nullcontext() if is_limited else self.core.scheduler.largest_steps()

    def pool(self, prompts: SequenceOf[str | SequenceOf[int]]) -> list[Float32Array]:
        """Returns the pooled output of every prompt, in order: embeddings, or outputs of the
        classification head. Raises `FailedPreconditionError` if the model has none."""
        pooling = self.core.facts.info.pooling
        if pooling is None:
            raise FailedPreconditionError(why_not(self.core.facts.info.name, None, "embedding"))
        requests = [
            pooled_request(f"pool-{i}", tuple(self._encode(prompt)), pooling)
            for i, prompt in enumerate(prompts)
        ]
        collected: dict[str, list[SequenceUpdate]] = {r.request_id: [] for r in requests}
        try:
            for request in requests:
                self.core.add(request)
            self._run_to_end(collected)
        except BaseException:
            self.core.scheduler.abort(*collected)
            raise
        return [pooled_output(pooling, collected[r.request_id], len(r.token_ids)) for r in requests]

    def _run_to_end(
        self,
        collected: dict[str, list[SequenceUpdate]],
        stopped: Mapping[str, StoppedTexts] = MappingProxyType({}),
    ) -> None:
        """Steps until no work is left, or can be done, and collects these requests' updates. Raises
        `OverloadedError` if some of them cannot run, or the device has too little memory, and
        `NonFiniteError` for one whose logits are not finite."""
        made_progress = True
        while self.core.has_work and made_progress:
            output = self.core.step()
            for request_id in output.failed.keys() & collected.keys():
                raise output.failed[request_id]
            for update in output.updates:
                if update.request_id in collected:
                    collected[update.request_id].append(update)
                    if update.request_id in stopped:
                        stopped[update.request_id].push(update)
            made_progress = output.made_progress
        if any(i in self.core.scheduler for i in collected):
            reason = "blocks that these prompts need are kept by earlier requests; release them"
            if made_progress:
                reason = "the engine is paused and starts no new request; resume it"
            raise OverloadedError(reason)

    def _params_for(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            given = (params or SamplingParams()).with_defaults(self.sampling_defaults)
            return [given] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidArgumentError(
                "params", f"has {len(params)} entries for {len(prompts)} prompts"
            )
        return [each.with_defaults(self.sampling_defaults) for each in params]

    def prompt_with_images(self, text: str, images: SequenceOf[Any]) -> MultimodalPrompt:
        """Returns a prompt made by the checkpoint's tokenizer and image processor.

        Args:
            text: with the processor's image token once per image, such as "<image>", and the tokens
                that the model's chat template has around it, such as "<|vision_start|>".
            images: images of Pillow; transparent ones are seen on white.

        Raises `FailedPreconditionError` if the model takes no images, and `InvalidArgumentError` if
        the text has another number of image tokens.
        """
        if self.core.facts.info.images is None:
            raise FailedPreconditionError(why_no_images(self.core.facts.info))
        if self._prompt_processor is None:
            from baton.engine.executor.vision.prompt_processor import PromptProcessor

            self._prompt_processor = PromptProcessor(self.core.path, self.core.facts.info.images)
            self._tokenizer = self._prompt_processor.tokenizer
        return self._prompt_processor(text, images)

    def _request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        inputs = prompt.encoder_inputs if isinstance(prompt, MultimodalPrompt) else ()
        given = prompt.token_ids if isinstance(prompt, MultimodalPrompt) else self._encode(prompt)
        token_ids = tuple(given)
        return EngineRequest(request_id, token_ids, params, len(token_ids), encoder_inputs=inputs)

    def _stopped_texts(self, request: EngineRequest) -> StoppedTexts:
        def end(index: int) -> None:
            self.core.scheduler.end_sequence(request.request_id, index)

        backend, params = self.tokenizer.backend_tokenizer, request.params
        text = partial(StoppedText, backend, request.token_ids, self._ends(params), params.stop)
        return StoppedTexts(text, end)

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        """Returns the tokens that end a sequence, which are no part of its text."""
        ends = self.core.facts.info.eos_token_ids
        return (frozenset() if params.ignore_eos else ends) | frozenset(params.stop_token_ids)

    def _encode_word(self, word: str) -> SequenceOf[int]:
        token_ids: SequenceOf[int] = self.tokenizer.encode(word, add_special_tokens=False)
        return token_ids

    def _encode(self, prompt: str | SequenceOf[int]) -> SequenceOf[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling parameters that the checkpoint advises."""
        return sampling_defaults(Path(self.core.path))

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded on first use."""
        if self._tokenizer is None:
            from baton.engine.executor.models.hf import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.core.path, trust_remote_code=False)
        return self._tokenizer

    def _result(
        self,
        request: EngineRequest,
        updates: list[SequenceUpdate],
        prompts: SequenceOf[Prompt],
        stopped: Mapping[int, StoppedText],
    ) -> GenerationResult:
        decodes = self._tokenizer is not None or any(isinstance(p, str) for p in prompts)
        return GenerationResult(
            prompt_token_ids=request.token_ids,
            completions=tuple(
                self._completion(of_one, request, stopped.get(of_one[0].index), decodes=decodes)
                for of_one in ranked(updates, request.params)
            ),
            num_cached_tokens=updates[0].num_cached_tokens,
            prompt_logprobs=tuple(logprobs for u in updates for logprobs in u.prompt_logprobs),
        )

    def _completion(
        self,
        updates: list[SequenceUpdate],
        request: EngineRequest,
        stopped: StoppedText | None,
        *,
        decodes: bool,
    ) -> Completion:
        token_ids = tuple(u.token_id for u in updates if u.token_id is not None)
        if updates[-1].failure is not None:
            raise InvalidArgumentError("sampling.grammar", updates[-1].failure)
        reason = updates[-1].finish_reason
        assert reason is not None, "a completion that has not ended"
        logprobs = (
            tuple(u.logprobs for u in updates if u.logprobs) if request.params.logprobs else ()
        )
        text = None
        if stopped is not None:
            text = stopped.shown
            if stopped.has_stopped:
                reason = FinishReason.STOP_STRING
                # Steps that were launched ahead may have added tokens.
                token_ids = token_ids[: stopped.num_tokens]
                logprobs = logprobs[: stopped.num_tokens]
        elif decodes:
            is_end = token_ids[-1:] and token_ids[-1] in self._ends(request.params)
            shown = token_ids[:-1] if is_end else token_ids
            text = text_after(self.tokenizer.backend_tokenizer, request.token_ids, shown)
        return Completion(
            token_ids=token_ids,
            text=text,
            finish_reason=reason,
            logprobs=logprobs,
            score=updates[-1].score,
        )
