"""Sampling parameters: the one set of fields and bounds that all packages share.

Bounds are checked where a boundary of trust is: by the constructor, which the client and offline
batches call, the router's APIs, and the workers, whose ports programs other than the router may
reach (`baton.rpc.params.params_of`). A copy that a process decodes for its own engine is trusted.

Independent of models, tokenizers and protobuf. The names of fields in errors are those of
`baton.v1.SamplingParams`.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from enum import Enum
from functools import wraps
from typing import Any, Final, NoReturn, Protocol, TypeVar

from baton.errors import InvalidArgumentError

DEFAULT_MAX_TOKENS = 16
MAX_SEQUENCES = 16
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_COUNT_PENALTY = 2.0
MAX_LENGTH_PENALTY = 10.0
MAX_SEED = 2**64 - 1
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BIASED_TOKENS = 300
MAX_BIAS = 100.0
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_BAD_TOKEN_SEQUENCES = 256
MAX_BAD_TOKEN_SEQUENCE_LENGTH = 32
MAX_GRAMMAR_BYTES = 65_536

# Token ids that an error shows.
_SHOWN_IDS = 8


class EarlyStopping(Enum):
    """Stopping rule of a beam search that has `beam_width` finished sequences."""

    HEURISTIC = "heuristic"
    """Stops once no running beam would beat the worst finished one if it ended now (False of
    transformers)."""
    FIRST = "first"
    """Stops at once (True of transformers)."""
    NEVER = "never"
    """Stops once no running beam can ever beat the worst finished one ("never" of transformers)."""


class GrammarKind(Enum):
    """Language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"


class _Bounded(Protocol):
    def check(self) -> None: ...


_AnyBounded = TypeVar("_AnyBounded", bound=_Bounded)


def _checked_when_made(kind: type[_AnyBounded]) -> type[_AnyBounded]:
    """Makes the constructor of a data class check its bounds. No `__post_init__` does, since
    msgspec calls that of each trusted copy that it decodes."""
    make: Callable[..., None] = kind.__init__

    @wraps(make)
    def make_checked(self: _AnyBounded, *values: Any, **fields: Any) -> None:
        make(self, *values, **fields)
        self.check()

    kind.__init__ = make_checked  # type: ignore[assignment]
    return kind


@_checked_when_made
@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that the whole output must match. `text` is 1 to 65,536 bytes of UTF-8."""

    kind: GrammarKind
    text: str

    def check(self) -> None:
        """Raises `InvalidArgumentError` beyond the bound."""
        _check_text(f"grammar.{self.kind.value}", self.text, MAX_GRAMMAR_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of the sampling parameters that a request leaves unset; None: there is none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def over(self, others: "SamplingDefaults") -> "SamplingDefaults":
        """Returns the values with those of `others` in place of None."""
        return replace(others, **self.given)

    @property
    def given(self) -> dict[str, Any]:
        """Values by name, without None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NO_DEFAULTS = SamplingDefaults()
NOTHING_CHANGED = SamplingDefaults(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0
)
"""Values under which the most likely token is chosen, of the model's own distribution."""
_DEFAULTED: Final = tuple(each.name for each in fields(SamplingDefaults))


@_checked_when_made
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Checked when made: `InvalidArgumentError` names field and
    bound.

    Logits are changed in the order of transformers: bias, repetition penalty, presence and
    frequency penalties, bad tokens, min_tokens, grammar, temperature, top-k, top-p, min-p.

    Attributes:
        max_tokens: tokens to generate at most per sequence, at least 1.
        min_tokens: until so many are generated, the end-of-sequence tokens and `stop_token_ids`
            are not chosen; in [0, max_tokens].
        temperature: 0 is greedy; in [0, 100]. This and the next three and `repetition_penalty` are
            the model's own default if None, of its `generation_config.json`, or off without one.
        top_k: only the k most likely tokens are considered; 0 means all.
        top_p: only the most likely tokens whose probabilities sum to this; in (0, 1].
        min_p: only tokens at least this times as likely as the most likely one; in [0, 1].
        seed: the random numbers of token i of sequence s are a function of (seed, s, i) alone.
            None: `Client` or the router draws one; an engine on its own takes 0.
        n: sequences returned, 1 to 16; several differ, so they need a temperature or beams.
        best_of: sequences generated, of which the `n` with the highest mean log-probability are
            returned; in [n, 16], None is `n`.
        beam_width: beams of a beam search, at least `n`, 2 to 16; 0 is off.
        length_penalty: a beam's score is its log-probability over its length to this power; in
            [-10, 10]. Only for beams.
        early_stopping: stopping rule of a beam search. Only for beams.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that
            prompt or output contain; in (0, 10], 1 is off.
        presence_penalty: subtracted once from the logits of tokens the output contains; in [-2, 2].
        frequency_penalty: subtracted as often as the output contains the token; in [-2, 2].
        logit_bias: (token id, number added to its logit, in [-100, 100]), at most 300.
        bad_words: strings not to be generated, at most 64 of 1 to 256 bytes; converted to
            `bad_token_ids` where text is tokenized, so the engine core ignores it.
        bad_token_ids: sequences of 1 to 32 token ids not to be generated, at most 256.
        stop_token_ids: generation ends with one of these, which is part of the output.
        stop: generation ends when the text contains one of these; applied where tokens
            are detokenized, so the engine core ignores it.
        ignore_eos: continue after the model's end-of-sequence tokens, which may still be chosen.
        logprobs: report the log-probability of each generated token, in nats, of the model's own
            distribution: before all of the above.
        top_logprobs: report those of so many most likely tokens too; 0 to 20, needs `logprobs`.
        prompt_logprobs: report those of the prompt's tokens and of so many most likely ones in
            their place; 0 to 20, None reports none.
        grammar: grammar that the output has to match; None: any output.
        speculate: let a draft propose tokens, which changes no result; None is the engine's choice.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    speculate: bool | None = None

    def check(self) -> None:
        """Raises `InvalidArgumentError`, which names field and bound, beyond one of the bounds."""
        if not isinstance(self.logprobs, bool):
            raise InvalidArgumentError(
                "sampling.logprobs",
                f"is {self.logprobs!r}; must be true or false. The most likely tokens are "
                f"logprobs=True, top_logprobs={self.logprobs!r}",
            )
        for name, (is_within, bound) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not is_within(value):
                _refuse(name, value, bound)
        _check_texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_BYTES)
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_BYTES)
        _check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "ids")
        _check_logit_bias(self.logit_bias)
        _check_bad_token_ids(self.bad_token_ids)
        if self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"in [0, max_tokens = {self.max_tokens}]")
        if self.top_logprobs and not self.logprobs:
            _refuse("top_logprobs", self.top_logprobs, "0 where sampling.logprobs is false")
        if self.beam_width:
            _check_beams(self)
        elif (best_of := self.num_sequences) < self.n:
            _refuse("best_of", best_of, f"at least sampling.n = {self.n}")
        if self.temperature is not None:
            self.check_several()

    def check_several(self) -> None:
        """Raises `InvalidArgumentError` for several samples that would all be greedy."""
        if self.num_sequences > 1 and self.is_greedy and not self.beam_width:
            name, value = ("n", self.n) if self.n > 1 else ("best_of", self.num_sequences)
            bound = "1 where sampling.temperature is 0: the sequences would be the same"
            _refuse(name, value, bound)

    def with_defaults(self, defaults: SamplingDefaults) -> "SamplingParams":
        """Returns the parameters with the values of `defaults`, else those of `NOTHING_CHANGED`, in
        place of None. Of a beam search the repetition penalty alone is taken, since it chooses by
        score. Raises `InvalidArgumentError` for several samples that would all be greedy."""
        own = SamplingDefaults(**{name: getattr(self, name) for name in _DEFAULTED})
        if None not in astuple(own):
            return self
        if self.beam_width:
            defaults = SamplingDefaults(repetition_penalty=defaults.repetition_penalty)
        return replace(self, **asdict(own.over(defaults).over(NOTHING_CHANGED)))

    @property
    def is_greedy(self) -> bool:
        return not self.temperature

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated at the same time."""
        return self.beam_width or self.best_of or self.n

    @property
    def sequences_field(self) -> str:
        """Field that sets `num_sequences`."""
        return "beam_width" if self.beam_width else "best_of" if self.best_of else "n"

    @property
    def is_ranked(self) -> bool:
        """True if the returned sequences are known only when all have ended."""
        return self.beam_width > 0 or self.num_sequences > self.n


def _between(low: float, high: float) -> tuple[Callable[[Any], bool], str]:
    # Written so that NaN fails.
    return lambda value: low <= value <= high, f"in [{low:g}, {high:g}]"


# Check of each number, and its bound in words. Fields that may be None are not checked then.
_BOUNDS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "max_tokens": (lambda value: value >= 1, "at least 1"),
    "min_tokens": (lambda value: value >= 0, "at least 0"),
    "temperature": _between(0.0, MAX_TEMPERATURE),
    "top_k": (lambda value: value >= 0, "0 (all) or more"),
    "top_p": (lambda value: 0.0 < value <= 1.0, "in (0, 1]"),
    "min_p": _between(0.0, 1.0),
    "seed": (lambda value: 0 <= value <= MAX_SEED, "in [0, 2^64)"),
    "n": _between(1, MAX_SEQUENCES),
    "best_of": _between(1, MAX_SEQUENCES),
    "beam_width": (
        lambda value: value == 0 or 2 <= value <= MAX_SEQUENCES,
        f"0 (off) or in [2, {MAX_SEQUENCES}]",
    ),
    "length_penalty": _between(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    "repetition_penalty": (
        lambda value: 0.0 < value <= MAX_REPETITION_PENALTY,
        f"in (0, {MAX_REPETITION_PENALTY:g}]",
    ),
    "presence_penalty": _between(-MAX_COUNT_PENALTY, MAX_COUNT_PENALTY),
    "frequency_penalty": _between(-MAX_COUNT_PENALTY, MAX_COUNT_PENALTY),
    "top_logprobs": _between(0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": _between(0, MAX_TOP_LOGPROBS),
}


def with_banned_tokens(
    params: SamplingParams, encode: Callable[[str], Sequence[int]]
) -> SamplingParams:
    """Returns the parameters with `bad_words` as `bad_token_ids`: each word after a space, and
    inside or at the start of a text.

    Args:
        encode: returns the tokens of a text, without any that the tokenizer adds.

    Raises `InvalidArgumentError` for a word of too many tokens.
    """
    if not params.bad_words:
        return params
    banned = dict.fromkeys(params.bad_token_ids)
    for i, word in enumerate(params.bad_words):
        bare = word.lstrip(" ")
        for form in dict.fromkeys((word, bare, f" {bare}") if bare else (word,)):
            token_ids = tuple(encode(form))
            if not 1 <= len(token_ids) <= MAX_BAD_TOKEN_SEQUENCE_LENGTH:
                bound = f"1 to {MAX_BAD_TOKEN_SEQUENCE_LENGTH}"
                _refuse(f"bad_words[{i}]", f"{len(token_ids)} tokens of this model", bound)
            banned[token_ids] = None
    return replace(params, bad_words=(), bad_token_ids=tuple(banned))


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Raises `InvalidArgumentError` unless there is a token and all are in [0, vocab_size)."""
    if not token_ids:
        raise InvalidArgumentError(field, "is empty; at least 1 token is needed")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        at = next(i for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        _refuse(f"{field}[{at}]", token_ids[at], f"in [0, {vocab_size})")


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidArgumentError` unless the tokens biased and banned are in [0, vocab_size)."""
    beyond = [token_id for token_id, _ in params.logit_bias if token_id >= vocab_size]
    if beyond:
        shown = ", ".join(map(str, beyond[:_SHOWN_IDS]))
        raise InvalidArgumentError(
            "sampling.logit_bias", f"has the token ids {shown}; must be in [0, {vocab_size})"
        )
    for i, banned in enumerate(params.bad_token_ids):
        check_token_ids(banned, vocab_size, f"sampling.bad_token_ids[{i}]")


def _check_beams(params: SamplingParams) -> None:
    """Refuses fields that contradict a beam search: it ranks whole sequences by score alone."""
    if params.n > params.beam_width:
        _refuse("n", params.n, f"at most sampling.beam_width = {params.beam_width}")
    contradictions = {
        "temperature": bool(params.temperature),
        "top_k": bool(params.top_k),
        "top_p": params.top_p not in (None, 1.0),
        "min_p": bool(params.min_p),
        "best_of": params.best_of is not None,
        "stop": bool(params.stop),
        "top_logprobs": params.top_logprobs > 0,
        "grammar": params.grammar is not None,
        "speculate": params.speculate is True,
    }
    for name, contradicts in contradictions.items():
        if contradicts:
            _refuse("beam_width", params.beam_width, f"0 (off) where sampling.{name} is set")


def _check_logit_bias(logit_bias: tuple[tuple[int, float], ...]) -> None:
    _check_count("logit_bias", logit_bias, MAX_BIASED_TOKENS, "tokens")
    for i, (token_id, bias) in enumerate(logit_bias):
        if token_id < 0:
            _refuse(f"logit_bias[{i}]", f"of token {token_id}", "of a token id of at least 0")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            _refuse(f"logit_bias[{i}]", bias, f"in [-{MAX_BIAS:g}, {MAX_BIAS:g}]")
    for token_id, times in Counter(token_id for token_id, _ in logit_bias).items():
        if times > 1:
            _refuse("logit_bias", f"given {times} times for token {token_id}", "given once")


def _check_bad_token_ids(sequences: tuple[tuple[int, ...], ...]) -> None:
    _check_count("bad_token_ids", sequences, MAX_BAD_TOKEN_SEQUENCES, "sequences")
    longest = MAX_BAD_TOKEN_SEQUENCE_LENGTH
    for i, token_ids in enumerate(sequences):
        if not 1 <= len(token_ids) <= longest:
            _refuse(f"bad_token_ids[{i}]", f"{len(token_ids)} ids", f"1 to {longest} ids")
        if min(token_ids) < 0:
            _refuse(f"bad_token_ids[{i}]", token_ids, "ids of at least 0")


def _check_texts(field: str, texts: tuple[str, ...], most: int, max_bytes: int) -> None:
    if isinstance(texts, str):  # type: ignore[unreachable]
        _refuse(field, f"the text {texts!r}", "a tuple of texts")
    _check_count(field, texts, most, "strings")
    for i, text in enumerate(texts):
        _check_text(f"{field}[{i}]", text, max_bytes)


def _check_text(field: str, text: str, max_bytes: int) -> None:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        _refuse(field, "half of a surrogate pair", "text that UTF-8 can hold")
    if not 1 <= num_bytes <= max_bytes:
        _refuse(field, f"{num_bytes} bytes", f"1 to {max_bytes} bytes")


def _check_count(field: str, values: Sequence[object], most: int, what: str) -> None:
    if len(values) > most:
        _refuse(field, f"{len(values)} {what}", f"at most {most}")


def _refuse(field: str, value: object, bound: str) -> NoReturn:
    shown = "NaN" if isinstance(value, float) and math.isnan(value) else value
    is_path = field.startswith(("input", "token_ids", "outputs", "continue_from", "sampling."))
    raise InvalidArgumentError(
        field if is_path else f"sampling.{field}", f"is {shown}; must be {bound}"
    )
