"""Fields of other servers' requests that change the answer: what each becomes here, or that it is
refused unless its value changes nothing.

The documentation lists this table (`docs/http_fields_reference.py`). Fields that change nothing are
`baton_router.apis.edge.body.unknown_fields.HINTS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.errors import InvalidArgumentError
from baton_router.apis.edge.body.other_values import (
    VARIABLES,
    JsonObject,
    grammar,
    reasoning,
    reasoning_format,
    switch,
    thinking,
)


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


_TAGS = OtherField(
    "grammars within tags",
    (),
    ("structured_outputs",),
    lambda value: {"structured_outputs": {"structural_tag": value}},
)
_BUDGETED: Final = (VARIABLES, "thinking_token_budget")
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
    "media_io_kwargs": OtherField("another choice of frames", ({},)),
    "messages": OtherField("a conversation"),
    "mm_processor_kwargs": OtherField("another size of images", ({},)),
    "negative_prompt": OtherField("a second prompt", ("",)),
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
    "n_indent": OtherField("indentation of the lines", (0,)),
    "no_stop_trim": OtherField("shows the stop string", (False,)),
    "min_length": OtherField("tokens of prompt and answer", (0,)),
    "n_predict": _renamed("tokens of the answer", "max_tokens", (-1,)),
    "num_predict": _renamed("tokens of the answer", "max_tokens", (-1,)),
    "stop_regex": OtherField("patterns that end the answer", ("", [])),
    "stop_sequences": _renamed("stop strings", "stop"),
    # Sampling.
    "adaptive_target": OtherField("adaptive sampler", (-1,)),
    "allowed_token_ids": OtherField("the only tokens", ([],)),
    "ban_eos_token": OtherField("does not end", (False,)),
    "banned_strings": OtherField("texts that are left out", ([],)),
    "banned_tokens": OtherField("tokens that are left out", ([], "")),
    "best_of": OtherField("answers to choose from", (1,)),
    "custom_logit_processor": OtherField("code of the client's"),
    "custom_params": OtherField("arguments of the client's code", ({},)),
    "custom_token_bans": OtherField("tokens that are left out", ([], "")),
    "do_sample": OtherField("samples at all", (True,)),
    "dry_multiplier": OtherField("DRY sampler", (0,)),
    "dynamic_temperature": OtherField("range of the temperature", (False,)),
    "dynatemp_range": OtherField("range of the temperature", (0,)),
    "encoder_repetition_penalty": OtherField("penalty of other tokens", (1,)),
    "epsilon_cutoff": OtherField("epsilon sampler", (0,)),
    "eta_cutoff": OtherField("eta sampler", (0,)),
    "guidance_scale": OtherField("guidance by a second prompt", (1,)),
    "logits_processors": OtherField("code of the client's", ([],)),
    "mirostat": OtherField("Mirostat sampler", (0,)),
    "mirostat_mode": OtherField("Mirostat sampler", (0,)),
    "no_repeat_ngram_size": OtherField("runs of tokens that come once", (0,)),
    "nsigma": OtherField("top-n-sigma sampler", (0,)),
    "num_beams": OtherField("beams", (1,)),
    "num_return_sequences": _renamed("number of answers", "n"),
    "options": OtherField("options of sampling", ({},)),
    "penalty_alpha": OtherField("contrastive search", (0,)),
    "random_seed": _renamed("seed", "seed"),
    "repeat_last_n": OtherField("tokens that are penalized", (-1,)),
    "repeat_penalty": _renamed("penalty of repeated tokens", "repetition_penalty"),
    "repetition_detection": OtherField("ends repetition"),
    "samplers": OtherField("order of the samplers"),
    "skew": OtherField("skew sampler", (0,)),
    "smoothing_factor": OtherField("quadratic sampler", (0,)),
    "temperature_last": OtherField("order of the samplers", (False,)),
    "tfs": OtherField("tail-free sampler", (1,)),
    "tfs_z": OtherField("tail-free sampler", (1,)),
    "top_a": OtherField("top-a sampler", (0,)),
    "top_n_sigma": OtherField("top-n-sigma sampler", (-1, 0)),
    "typical_p": OtherField("typical sampler", (0, 1)),
    "vllm_xargs": OtherField("arguments of the client's code", ({},)),
    "watermark": OtherField("a watermark", (False,)),
    "xtc_probability": OtherField("XTC sampler", (0,)),
    # Grammars.
    "ebnf": _renamed("grammar of the answer", "guided_grammar"),
    "grammar": OtherField("grammar of the answer", ("",), _GRAMMARS, grammar),
    "format": OtherField("schema of the answer", ("",)),
    "guided_decoding": OtherField("grammar of the answer"),
    "guided_structural_tag": _TAGS,
    "json_schema": _renamed("schema of the answer", "guided_json"),
    "regex": _renamed("pattern of the answer", "guided_regex"),
    "structural_tag": _TAGS,
    # Reasoning.
    "prompt_mode": OtherField("turns thinking on"),
    "reasoning_budget": _renamed("tokens of thinking", "thinking_token_budget", (-1,)),
    "reasoning_format": OtherField(
        "reasoning apart or in the text",
        ("auto", "deepseek"),
        ("separate_reasoning",),
        reasoning_format,
    ),
    "think": OtherField("turns thinking on or off", (), (VARIABLES,), switch("think")),
    "thinking_budget": _renamed("tokens of thinking", "thinking_token_budget"),
    "enable_thinking": OtherField(
        "turns thinking on or off", (), (VARIABLES,), switch("enable_thinking")
    ),
    "reasoning": OtherField(
        "options of thinking",
        ({},),
        (*_BUDGETED, "include_reasoning", "reasoning_effort"),
        reasoning,
    ),
    "stream_reasoning": OtherField("reasoning in pieces", (True,)),
    "thinking": OtherField("turns thinking on or off", (), _BUDGETED, thinking),
    # The form of the answer, and what makes it.
    "adapter_id": OtherField("adapter"),
    "adapters": OtherField("adapter", ([], "")),
    "audio": OtherField("an answer in sound"),
    "details": OtherField("another form of the answer", (False,)),
    "input_token_logprobs": OtherField("log-probabilities of the prompt", (False,)),
    "kv_transfer_params": OtherField("KV of another server"),
    "logprob_token_ids": OtherField("log-probabilities of these tokens", ([],)),
    "lora": OtherField("adapter", ([],)),
    "lora_path": OtherField("adapter"),
    "lora_request": OtherField("adapter"),
    "merged_adapters": OtherField("adapter"),
    "modalities": OtherField("text or sound", (["text"],)),
    "n_probs": OtherField("log-probabilities", (0,)),
    "return_full_text": OtherField("repeats the prompt", (False,)),
    "return_hidden_states": OtherField("states of the model", (False,)),
    "return_tokens_as_token_ids": OtherField("names of tokens", (False,)),
    "skip_special_tokens": OtherField("leaves special tokens out", (True,)),
    "session_params": OtherField("continues another request"),
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
            if own == VARIABLES and isinstance(kept.get(own, {}), dict):
                value = {**value, **kept.get(own, {})}
            elif kept.get(own, value) != value:
                raise InvalidArgumentError(name, f"is set beside {own}; give one of them")
            kept[own] = value
    return kept
