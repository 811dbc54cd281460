"""Sampling options of the commands that generate.

`baton.sampling` has their bounds; errors about them name the option, not the field.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from baton.cli.options.option_group import takes_options
from baton.errors import InvalidArgumentError
from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingParams

_LENGTH = "Length"
_CHOICE = "Sampling"
_SEVERAL = "Multiple sequences"
_BANS = "Penalties and bans"
_FORM = "Structured output"
_LOGPROBS = "Log-probabilities (with --json)"
_WORK = "Execution"

# Of the parameters that a model's `generation_config.json` may give.
_UNSET = "Unset: the model's own default."
# A bound beyond the length of any model, which the router lowers.
_ANY_LENGTH = 2**31

# Fields whose option has another name.
_OPTIONS_OF_FIELDS = {
    "bad_words": "bad_word",
    "stop_token_ids": "stop_token_id",
    "top_logprobs": "logprobs",
    "grammar.json_schema": "json_schema",
    "grammar.regex": "regex",
    "grammar.ebnf": "grammar",
}
_FIELD = re.compile(r"\bsampling\.((?:grammar\.)?\w+)")


def _option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling options of a command line; a field is an option of the same name."""

    max_tokens: Annotated[int | None, _option(_LENGTH, "Maximum tokens to generate.")] = 128
    min_tokens: Annotated[int, _option(_LENGTH, "Minimum tokens to generate.")] = 0
    stop: Annotated[list[str] | None, _option(_LENGTH, "Stop string; may be repeated.")] = None
    stop_token_id: Annotated[
        list[int] | None, _option(_LENGTH, "Stop token; may be repeated.", metavar="ID")
    ] = None
    ignore_eos: Annotated[
        bool, _option(_LENGTH, "Continue past end-of-sequence tokens.", "--ignore-eos")
    ] = False

    temperature: Annotated[
        float | None,
        _option(_CHOICE, f"0: greedy, the most likely token; larger: more random. {_UNSET}"),
    ] = None
    top_k: Annotated[
        int | None,
        _option(_CHOICE, f"Sample from the k most likely tokens; 0: from all. {_UNSET}"),
    ] = None
    top_p: Annotated[
        float | None,
        _option(
            _CHOICE,
            f"Sample from the most likely tokens up to this probability, in (0, 1]. {_UNSET}",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        _option(
            _CHOICE,
            f"Minimum probability relative to the most likely token, in [0, 1]. {_UNSET}",
        ),
    ] = None
    seed: Annotated[
        int | None,
        _option(_CHOICE, "Random seed: the same seed draws the same tokens. Unset: a random one."),
    ] = None

    n: Annotated[
        int, _option(_SEVERAL, "Sequences to return, printed one after the other.", "--n")
    ] = 1
    best_of: Annotated[
        int | None,
        _option(_SEVERAL, "Sequences to generate, of which the n most likely are returned."),
    ] = None
    beam_width: Annotated[int, _option(_SEVERAL, "Beam width; 0: no beam search.")] = 0
    length_penalty: Annotated[
        float, _option(_SEVERAL, "Of beams: above 0 favours long sequences, below 0 short ones.")
    ] = 1.0
    early_stopping: Annotated[
        EarlyStopping,
        _option(
            _SEVERAL,
            "Beam search ends with the first full set of beams (first), once a better one is "
            "unlikely (heuristic), or once it is impossible (never).",
        ),
    ] = EarlyStopping.HEURISTIC

    repetition_penalty: Annotated[
        float | None,
        _option(
            _BANS,
            f"Above 1: tokens of prompt and output become less likely; at most 10. {_UNSET}",
        ),
    ] = None
    presence_penalty: Annotated[
        float, _option(_BANS, "Above 0: tokens of the output become less likely; in [-2, 2].")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _option(_BANS, "The same, times the token's occurrences in the output; in [-2, 2].")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        _option(
            _BANS,
            "Bias that is added to a token's logit; may be repeated.",
            metavar="ID=BIAS",
        ),
    ] = None
    bad_word: Annotated[
        list[str] | None, _option(_BANS, "Text that is never generated; may be repeated.")
    ] = None
    bad_token_ids: Annotated[
        list[str] | None,
        _option(
            _BANS,
            "Tokens that are never generated in this order; may be repeated.",
            metavar="ID[,ID...]",
        ),
    ] = None

    json_schema: Annotated[
        str | None,
        _option(_FORM, "Generate JSON that is valid under this schema.", metavar="FILE|TEXT"),
    ] = None
    regex: Annotated[str | None, _option(_FORM, "Generate a match of this regular expression.")] = (
        None
    )
    grammar: Annotated[
        Path | None,
        _option(_FORM, "Generate a match of the EBNF grammar in this file."),
    ] = None

    logprobs: Annotated[
        int | None,
        _option(
            _LOGPROBS, "Those of the output's tokens, and of the N most likely in their place."
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        _option(
            _LOGPROBS, "Those of the prompt's tokens, and of the N most likely in their place."
        ),
    ] = None

    speculate: Annotated[
        bool | None,
        _option(
            _WORK,
            "Speculative decoding, which affects only speed. Unset: the workers' default.",
            "--speculate/--no-speculate",
        ),
    ] = None
    priority: Annotated[
        int,
        _option(_WORK, "Priority: smaller values run first on workers that schedule by priority."),
    ] = 0

    def params(self) -> SamplingParams:
        """Raises `InvalidArgumentError` for a value that cannot be read or is out of bounds."""
        return SamplingParams(
            max_tokens=_ANY_LENGTH if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            n=self.n,
            best_of=self.best_of,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(map(_bias, self.logit_bias or ())),
            bad_words=tuple(self.bad_word or ()),
            bad_token_ids=tuple(map(_token_ids, self.bad_token_ids or ())),
            grammar=self._grammar(),
            logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
            prompt_logprobs=self.prompt_logprobs,
            speculate=self.speculate,
        )

    def _grammar(self) -> Grammar | None:
        given = [
            option
            for option, value in (
                ("--json-schema", self.json_schema),
                ("--regex", self.regex),
                ("--grammar", self.grammar),
            )
            if value is not None
        ]
        if len(given) > 1:
            raise InvalidArgumentError(given[1], f"cannot be given together with {given[0]}")
        if self.json_schema is not None:
            return Grammar(GrammarKind.JSON_SCHEMA, _json_text(self.json_schema))
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.grammar is not None:
            return Grammar(GrammarKind.EBNF, _content("--grammar", self.grammar))
        return None


class GroupedCommand(TyperCommand):
    """Command whose help lists its options under the panels they name."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                panel = getattr(param, "rich_help_panel", None)
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(panel or default, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def takes_sampling(
    *, without: frozenset[str] = frozenset(), **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command every option of `SamplingOptions`, as its parameter `sampling`.

    Args:
        without: fields that are not offered.
        defaults: of this command, where they differ.
    """
    return takes_options(SamplingOptions, "sampling", without=without, **defaults)


def with_options_named(message: str) -> str:
    """Returns an error's text with options of the command line in place of fields."""
    return _FIELD.sub(lambda match: _name_of_option(match[1]), message)


def _name_of_option(field: str) -> str:
    if field == "grammar":  # from any of its options
        return field
    return f"--{_OPTIONS_OF_FIELDS.get(field, field).replace('_', '-')}"


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise InvalidArgumentError(
            "--logit-bias", f"is {text!r}; must be ID=BIAS, such as 15=-2.5"
        ) from None


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise InvalidArgumentError(
            "--bad-token-ids", f"is {text!r}; must be ID or ID,ID,..., such as 15,3"
        ) from None


def _json_text(value: str) -> str:
    """Returns the schema itself, or the content of the file of this name."""
    text = value if value.lstrip().startswith("{") else _content("--json-schema", Path(value))
    try:
        json.loads(text)
    except ValueError as error:
        _refuse("--json-schema", value, f"no JSON: {error}")
    return text


def _content(option: str, file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError as error:
        _refuse(option, str(file), f"a file that cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        _refuse(option, str(file), "a file that is not UTF-8")


def _refuse(option: str, value: str, why: str) -> NoReturn:
    raise InvalidArgumentError(option, f"{value!r} is {why}")
