"""Validation and tokenization of calls for pooled outputs, embeddings and scores.

Every rejection is an `InvalidArgumentError` that names the field and the bound.
"""

from collections.abc import Sequence
from typing import TypeAlias

from baton.context_length import ContextLength
from baton.errors import InvalidArgumentError
from baton.fairness.fair_threads import FairThreads
from baton.sampling import SamplingParams, check_token_ids
from baton.serving.tenant import Tenant
from baton_router.call.generate_call import EmbedCall, ScoreCall
from baton_router.call.request import ANONYMOUS, Request
from baton_router.text.conversation.in_thread import text_threads
from baton_router.text.least_tokens import least_tokens
from baton_router.text.model_card import THREAD_FROM_CHARS, ModelCard
from baton_router.text.request_bounds import RequestLimits, check_text, request_id_of

_Named: TypeAlias = tuple[str, str | tuple[str, str]]
"""A text, or a pair of texts, after the field that has it."""

# Texts above which a thread tokenizes them together.
_THREAD_FROM_TEXTS = 16


class PooledIntake:
    """Validator and tokenizer of calls for pooled outputs of one model."""

    def __init__(
        self,
        card: ModelCard,
        limits: RequestLimits,
        threads: FairThreads | None = None,
    ) -> None:
        """Takes the threads for long texts; None: it has some of its own."""
        self._card = card
        self._threads = threads or text_threads()
        self._max_prompt_bytes = limits.max_prompt_bytes
        self._max_inputs = limits.max_inputs
        self._max_input_tokens = limits.max_input_tokens

    async def read_inputs(
        self, call: EmbedCall, longest: ContextLength, tenant: Tenant = ANONYMOUS
    ) -> list[Request]:
        """Returns a request for the pooled output of each input. Arguments as of `Intake.read`."""
        self._check_num("inputs", len(call.inputs))
        texts: list[_Named] = []
        for i, given in enumerate(call.inputs):
            if isinstance(given, str):
                check_text(f"inputs[{i}].text", given, self._max_prompt_bytes)
                texts.append((f"inputs[{i}]", given))
        encoded = iter(await self._encode_all(texts, longest, tenant.name))
        prompts = [
            tuple(next(encoded)) if isinstance(given, str) else tuple(given)
            for given in call.inputs
        ]
        return self._requests(call, "inputs", prompts, longest, tenant)

    async def read_pairs(
        self, call: ScoreCall, longest: ContextLength, tenant: Tenant = ANONYMOUS
    ) -> list[Request]:
        """Returns a request for the score of each pair as one prompt. Arguments as of
        `Intake.read`."""
        self._check_pairs(call)
        pairs = [(f"pairs[{i}]", pair) for i, pair in enumerate(call.pairs)]
        encoded = await self._encode_all(pairs, longest, tenant.name)
        return self._requests(call, "pairs", list(map(tuple, encoded)), longest, tenant)

    async def read_texts_of_pairs(
        self, call: ScoreCall, longest: ContextLength, tenant: Tenant = ANONYMOUS
    ) -> tuple[list[Request], list[tuple[int, int]]]:
        """Returns a request for the embedding of each text, once for all pairs that share it, and
        the two indices of each pair. Arguments as of `Intake.read`."""
        self._check_pairs(call)
        fields: dict[str, str] = {}
        for i, text in ((i, text) for i, pair in enumerate(call.pairs) for text in pair):
            fields.setdefault(text, f"pairs[{i}]")
        named = [(field, text) for text, field in fields.items()]
        prompts = list(map(tuple, await self._encode_all(named, longest, tenant.name)))
        requests = self._requests(call, "pairs", prompts, longest, tenant)
        at = {text: i for i, text in enumerate(fields)}
        return requests, [(at[first], at[second]) for first, second in call.pairs]

    def _check_pairs(self, call: ScoreCall) -> None:
        self._check_num("pairs", len(call.pairs))
        for i, (first, second) in enumerate(call.pairs):
            check_text(f"pairs[{i}].first", first, self._max_prompt_bytes)
            check_text(f"pairs[{i}].second", second, self._max_prompt_bytes)

    def _requests(
        self,
        call: EmbedCall | ScoreCall,
        field: str,
        prompts: Sequence[tuple[int, ...]],
        longest: ContextLength,
        tenant: Tenant,
    ) -> list[Request]:
        pooling = self._card.pooling
        assert pooling is not None, "a pooled output of a model without one"
        longest = longest.within(self._card.max_model_len)
        for i, token_ids in enumerate(prompts):
            check_token_ids(token_ids, self._card.vocab_size, f"{field}[{i}]")
            longest.check(len(token_ids), 1, f"{field}[{i}]")
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
        own_id = request_id_of(call.request_id)
        return [
            Request(
                own_id if len(prompts) == 1 else f"{own_id}-{i}",
                token_ids,
                params,
                call.priority,
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

    async def _encode_all(
        self, texts: Sequence[_Named], longest: ContextLength, holder: str
    ) -> list[list[int]]:
        """Returns the tokens of each text, or pair of texts. Raises `ContextLengthError` for long
        ones that are too many tokens by their bytes."""
        num_chars = sum(len(text) for _, given in texts for text in _parts(given))
        if num_chars < THREAD_FROM_CHARS and len(texts) <= _THREAD_FROM_TEXTS:
            return self._card.encode_all([given for _, given in texts])
        within = longest.within(self._card.max_model_len)
        return await self._threads.call(holder, self._encode_fitting, texts, within)

    def _encode_fitting(self, texts: Sequence[_Named], longest: ContextLength) -> list[list[int]]:
        for field, given in texts:
            least = sum(least_tokens(self._card.tokenizer, text) for text in _parts(given))
            longest.check_least(least, field)
        return self._card.encode_all([given for _, given in texts])


def _parts(given: str | tuple[str, str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given
