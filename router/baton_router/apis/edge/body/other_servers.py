"""Fields of other servers' requests that change the answer: what each becomes here, or that it is
refused unless its value changes nothing.

The documentation lists this table (`docs/http_fields_reference.py`). Fields that change nothing are
`baton_router.apis.edge.body.unknown_fields.HINTS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.errors import InvalidArgumentError

JsonObject = dict[str, Any]

_VARIABLES: Final = "chat_template_kwargs"


@dataclass(frozen=True, slots=True)
class OtherField:
    """Field of other servers.

    Attributes:
        meaning: what it does there, in a few words.
        neutral: values that change nothing.
        becomes: fields that it may become, of which a route has to know all.
        converted: returns those fields from its value. Raises `InvalidArgumentError`.
    """

    meaning: str
    neutral: Sequence[Any] = ()
    becomes: Sequence[str] = ()
    converted: Callable[[Any], JsonObject] = lambda _value: {}


def _renamed(meaning: str, name: str, neutral: Sequence[Any] = ()) -> OtherField:
    return OtherField(meaning, neutral, (name,), lambda value: {name: value})


def _grammar(value: Any) -> JsonObject:
    match value:
        case str():
            return {"guided_grammar": value}
        case {"type": "json" | "json_object", "value": schema}:
            return {"guided_json": schema}
        case {"type": "regex", "value": pattern}:
            return {"guided_regex": pattern}
    raise InvalidArgumentError(
        "grammar", "is neither a text nor an object with `type` json or regex and `value`"
    )


def _variables(is_on: bool) -> JsonObject:
    """Returns the variables that turn thinking on or off in the templates that can."""
    return {_VARIABLES: {"enable_thinking": is_on, "thinking": is_on}}


def _switch(name: str) -> Callable[[Any], JsonObject]:
    def converted(value: Any) -> JsonObject:
        if not isinstance(value, bool):
            raise InvalidArgumentError(name, "must be true or false")
        return _variables(value)

    return converted


def _reasoning_format(value: Any) -> JsonObject:
    if value != "none":
        raise InvalidArgumentError("reasoning_format", "must be auto, deepseek or none")
    return {"separate_reasoning": False}


def _thinking(value: Any) -> JsonObject:
    if isinstance(value, bool):
        return _variables(value)
    options = _object("thinking", value, ("type", "budget_tokens"))
    fields: JsonObject = {}
    if "budget_tokens" in options:
        fields["thinking_token_budget"] = options["budget_tokens"]
    match options.get("type"):
        case "enabled" | "disabled" as kind:
            return {**fields, **_variables(kind == "enabled")}
        case "auto" | "adaptive":
            return fields
    raise InvalidArgumentError("thinking.type", "must be enabled, disabled, auto or adaptive")


def _reasoning(value: Any) -> JsonObject:
    options = _object("reasoning", value, ("effort", "enabled", "exclude", "max_tokens", "summary"))
    fields: JsonObject = {}
    if "enabled" in options:
        fields |= _switch("reasoning.enabled")(options["enabled"])
    for given, name in (("effort", "reasoning_effort"), ("max_tokens", "thinking_token_budget")):
        if given in options:
            fields[name] = options[given]
    if options.get("exclude"):
        fields["include_reasoning"] = False
    return fields


def _object(name: str, value: Any, known: Sequence[str]) -> JsonObject:
    """Returns the fields of an object that are not null. Raises `InvalidArgumentError`."""
    if not isinstance(value, dict):
        raise InvalidArgumentError(name, "must be an object")
    fields = {key: inner for key, inner in value.items() if inner is not None}
    for key in fields:
        if key not in known:
            raise InvalidArgumentError(f"{name}.{key}", "is not supported here; leave it out")
    return fields


_BUDGETED: Final = (_VARIABLES, "thinking_token_budget")
_GRAMMARS: Final = ("guided_grammar", "guided_json", "guided_regex")

OTHER_FIELDS: Final[Mapping[str, OtherField]] = {
    # The prompt.
    "add_generation_prompt": OtherField("begins an answer", (True,)),
    "add_special_tokens": OtherField("special tokens around the prompt"),
    "chat_template": OtherField("a template of the client's"),
    "continue_final_message": OtherField("continues the last message", (False,)),
    "documents": OtherField("documents for the template", ([],)),
    "echo": OtherField("repeats the prompt", (False,)),
    "enable_search": OtherField("searches the web", (False,)),
    "function_call": OtherField("older form of `tool_choice`", ("auto", "none")),
    "functions": OtherField("older form of `tools`", ([],)),
    "image_data": OtherField("images of the prompt"),
    "images": OtherField("images of the prompt", ([],)),
    "input": OtherField("items of a conversation"),
    "input_embeds": OtherField("embeddings as prompt"),
    "input_ids": OtherField("tokens as prompt"),
    "input_prefix": OtherField("text before the prompt", ("",)),
    "input_suffix": OtherField("text after the prompt", ("",)),
    "instructions": OtherField("the system message"),
    "messages": OtherField("a conversation"),
    "mm_processor_kwargs": OtherField("another size of images", ({},)),
    "partial": OtherField("continues the last message", (False,)),
    "prefix": OtherField("continues the last message", (False,)),
    "prompt": OtherField("a text"),
    "prompt_embeds": OtherField("embeddings as prompt"),
    "prompt_token_ids": OtherField("tokens as prompt"),
    "raw": OtherField("no template", (False,)),
    "safe_prompt": OtherField("another system message", (False,)),
    "search_parameters": OtherField("searches the web"),
    "suffix": OtherField("text after the answer", ("",)),
    "system": OtherField("the system message"),
    "template": OtherField("a template of the client's"),
    "truncate": OtherField("cuts the prompt", (False,)),
    "truncate_prompt_tokens": OtherField("cuts the prompt"),
    "web_search_options": OtherField("searches the web"),
    # The end of the answer.
    "include_stop_str_in_output": OtherField("shows the stop string", (False,)),
    "max_length": OtherField("tokens of prompt and answer"),
    "max_new_tokens": _renamed("tokens of the answer", "max_tokens"),
    "max_output_tokens": _renamed("tokens of the answer", "max_tokens"),
    "min_new_tokens": _renamed("least tokens of the answer", "min_tokens"),
    "no_stop_trim": OtherField("shows the stop string", (False,)),
    "min_length": OtherField("tokens of prompt and answer", (0,)),
    "n_predict": _renamed("tokens of the answer", "max_tokens", (-1,)),
    "num_predict": _renamed("tokens of the answer", "max_tokens", (-1,)),
    "stop_regex": OtherField("patterns that end the answer", ("", [])),
    "stop_sequences": _renamed("stop strings", "stop"),
    # Sampling.
    "allowed_token_ids": OtherField("the only tokens", ([],)),
    "best_of": OtherField("answers to choose from", (1,)),
    "custom_logit_processor": OtherField("code of the client's"),
    "do_sample": OtherField("samples at all", (True,)),
    "dry_multiplier": OtherField("DRY sampler", (0,)),
    "dynatemp_range": OtherField("range of the temperature", (0,)),
    "logits_processors": OtherField("code of the client's", ([],)),
    "mirostat": OtherField("Mirostat sampler", (0,)),
    "num_beams": OtherField("beams", (1,)),
    "options": OtherField("options of sampling", ({},)),
    "num_return_sequences": _renamed("number of answers", "n"),
    "random_seed": _renamed("seed", "seed"),
    "repeat_last_n": OtherField("tokens that are penalized", (-1,)),
    "repeat_penalty": _renamed("penalty of repeated tokens", "repetition_penalty"),
    "samplers": OtherField("order of the samplers"),
    "smoothing_factor": OtherField("quadratic sampler", (0,)),
    "tfs_z": OtherField("tail-free sampler", (1,)),
    "top_a": OtherField("top-a sampler", (0,)),
    "top_n_sigma": OtherField("top-n-sigma sampler", (-1, 0)),
    "typical_p": OtherField("typical sampler", (0, 1)),
    "watermark": OtherField("a watermark", (False,)),
    "xtc_probability": OtherField("XTC sampler", (0,)),
    # Grammars.
    "ebnf": _renamed("grammar of the answer", "guided_grammar"),
    "grammar": OtherField("grammar of the answer", ("",), _GRAMMARS, _grammar),
    "format": OtherField("schema of the answer", ("",)),
    "guided_decoding": OtherField("grammar of the answer"),
    "guided_structural_tag": OtherField("grammars within tags"),
    "json_schema": _renamed("schema of the answer", "guided_json"),
    "regex": _renamed("pattern of the answer", "guided_regex"),
    "structural_tag": OtherField("grammars within tags"),
    # Reasoning.
    "prompt_mode": OtherField("turns thinking on"),
    "reasoning_budget": _renamed("tokens of thinking", "thinking_token_budget", (-1,)),
    "reasoning_format": OtherField(
        "reasoning apart or in the text",
        ("auto", "deepseek"),
        ("separate_reasoning",),
        _reasoning_format,
    ),
    "think": OtherField("turns thinking on or off", (), (_VARIABLES,), _switch("think")),
    "thinking_budget": _renamed("tokens of thinking", "thinking_token_budget"),
    "enable_thinking": OtherField(
        "turns thinking on or off", (), (_VARIABLES,), _switch("enable_thinking")
    ),
    "reasoning": OtherField(
        "options of thinking",
        ({},),
        (*_BUDGETED, "include_reasoning", "reasoning_effort"),
        _reasoning,
    ),
    "stream_reasoning": OtherField("reasoning in pieces", (True,)),
    "thinking": OtherField("turns thinking on or off", (), _BUDGETED, _thinking),
    # The form of the answer, and what makes it.
    "audio": OtherField("an answer in sound"),
    "details": OtherField("another form of the answer", (False,)),
    "input_token_logprobs": OtherField("log-probabilities of the prompt", (False,)),
    "kv_transfer_params": OtherField("KV of another server"),
    "logprob_token_ids": OtherField("log-probabilities of these tokens", ([],)),
    "lora": OtherField("adapter", ([],)),
    "lora_path": OtherField("adapter"),
    "lora_request": OtherField("adapter"),
    "modalities": OtherField("text or sound", (["text"],)),
    "n_probs": OtherField("log-probabilities", (0,)),
    "return_full_text": OtherField("repeats the prompt", (False,)),
    "return_hidden_states": OtherField("states of the model", (False,)),
    "return_tokens_as_token_ids": OtherField("names of tokens", (False,)),
    "skip_special_tokens": OtherField("leaves special tokens out", (True,)),
    "t_max_predict_ms": OtherField("time of the answer", (0, -1)),
    "top_n_tokens": OtherField("log-probabilities", (0,)),
}

OF_MESSAGES: Final = frozenset({"audio", "function_call", "images", "partial", "prefix"})
"""Those that messages have, too."""

_CONVERTED: Final = {name for name, field in OTHER_FIELDS.items() if field.becomes}


def in_own_terms(content: JsonObject, known: frozenset[str]) -> JsonObject:
    """Returns a body with fields of other servers under names that its schema knows; those that
    cannot be are left as they are.

    Args:
        known: names of the schema's fields.

    Raises `InvalidArgumentError`, also for a field that contradicts one of the schema's.
    """
    others = content.keys() & _CONVERTED
    if not others:
        return content
    kept = dict(content)
    for name in sorted(others - known):
        field = OTHER_FIELDS[name]
        if content[name] in field.neutral or not known.issuperset(field.becomes):
            continue
        del kept[name]
        for own, value in field.converted(content[name]).items():
            if own == _VARIABLES and isinstance(kept.get(own, {}), dict):
                value = {**value, **kept.get(own, {})}
            elif kept.get(own, value) != value:
                raise InvalidArgumentError(name, f"is set beside {own}; give one of them")
            kept[own] = value
    return kept
