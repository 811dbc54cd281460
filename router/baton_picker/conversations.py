"""Conversations in the bodies of requests, as the router's APIs read them."""

from collections.abc import Callable, Mapping
from typing import Any

from baton_router.apis.anthropic import conversion as anthropic
from baton_router.apis.anthropic.schemas import MessagesRequest
from baton_router.apis.edge.body.bodies import request_of
from baton_router.apis.openai.conversation import conversation_of
from baton_router.apis.openai.schemas import ChatRequest
from baton_router.apis.responses import conversion as responses
from baton_router.apis.responses.functions import Functions
from baton_router.apis.responses.schemas import ResponsesRequest
from baton_router.call.generate_call import Conversation

_Fields = Mapping[str, Any]


def conversation_in(fields: _Fields, path: str) -> Conversation | None:
    """Returns the conversation in the body of a request.

    Args:
        path: of the request; one that ends as no API's is that of chat completions if the body has
            messages.

    Returns:
        None: the body has none.

    Raises:
        InvalidArgumentError: a router would refuse the body.
    """
    path = path.partition("?")[0].rstrip("/")
    for end, read in _OF_PATH.items():
        if path.endswith(end):
            return read(fields)
    return _of_chat(fields) if isinstance(fields.get("messages"), list) else None


def _of_chat(fields: _Fields) -> Conversation:
    return conversation_of(request_of(fields, ChatRequest, []))


def _of_messages(fields: _Fields) -> Conversation:
    body = request_of(fields, MessagesRequest, [])
    return anthropic.conversation_of(body, anthropic.options_of(body))


def _of_responses(fields: _Fields) -> Conversation:
    """Returns the conversation, without what the server has stored of it."""
    body = request_of(fields, ResponsesRequest, [])
    functions = Functions(body.tools)
    options = responses.options_of(body, functions)
    return responses.conversation_of(options, body, functions, (), responses.items_of(body))


_OF_PATH: Mapping[str, Callable[[_Fields], Conversation]] = {
    "/chat/completions": _of_chat,
    "/messages": _of_messages,
    "/responses": _of_responses,
}
