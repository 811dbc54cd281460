"""Names of fields of OpenAI's API in errors."""

import re

from baton_router.apis.edge.body.field_names import FieldNames, Names
from baton_router.apis.openai.conversation import tool_index
from baton_router.apis.openai.schemas import ChatRequest, ScoreRequest
from baton_router.apis.openai.structured_outputs import field_of_grammar

_SAMPLING: Names = {
    r"sampling\.grammar.*": lambda body, _: field_of_grammar(body),
    r"sampling\.beam_width": "use_beam_search",
    r"sampling\.": "",
}


def _max_tokens(body: ChatRequest, _match: re.Match[str]) -> str:
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _function(body: ChatRequest, match: re.Match[str]) -> str:
    return f"tools[{tool_index(body, match)}].function"


def score_fields(body: ScoreRequest) -> tuple[str, str]:
    """Returns the names of the fields that have the pairs."""
    return ("queries", "documents") if body.queries is not None else ("text_1", "text_2")


COMPLETIONS = FieldNames(
    {
        r"input(\.text|\.token_ids)?": "prompt",
        r"sampling\.(top|prompt)_logprobs": "logprobs",
        **_SAMPLING,
    }
)
CHAT_COMPLETIONS = FieldNames(
    {
        r"input\.text": "prompt",  # of /tokenize
        r"input(\.chat)?(\.messages)?": "messages",
        r"parsing\.tools\[(\d+)\]\.parameters_json_schema": lambda body, match: (
            f"{_function(body, match)}.parameters"
        ),
        r"parsing\.tools\[(\d+)\]": _function,
        r"parsing\.tools": "tools",
        r"parsing\.tool_(choice|name)": "tool_choice",
        r"parsing\.max_reasoning_tokens": "thinking_token_budget",
        r"parsing\.template_variables": "chat_template_kwargs",
        r"sampling\.max_tokens": _max_tokens,
        **_SAMPLING,
    }
)
EMBEDDINGS = FieldNames({r"inputs((?:\[\d+\])*)(\.\w+)?$": r"input\1"})
RERANKS = FieldNames(
    {r"pairs\[\d+\]\.first$": "query", r"pairs((?:\[\d+\])?)(\.second)?$": r"documents\1"}
)
SCORES = FieldNames(
    {
        r"pairs(\[\d+\])?\.first$": lambda body, _: score_fields(body)[0],
        r"pairs(\[\d+\])?(\.second)?$": lambda body, _: score_fields(body)[1],
    }
)
