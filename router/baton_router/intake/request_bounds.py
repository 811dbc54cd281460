"""Bounds of what one request may hold, over gRPC and HTTP."""

from baton.sampling import (
    MAX_BAD_TOKEN_SEQUENCE_LENGTH,
    MAX_BAD_TOKEN_SEQUENCES,
    MAX_SEQUENCES,
)
from baton.serving.message_bounds import MessageBounds

DEFAULT_MAX_MESSAGES = 4096
# Of HTTP bodies.
DEFAULT_MAX_ELEMENTS = 65_536
DEFAULT_MAX_PROMPT_IDS = 262_144
DEFAULT_MAX_TOOLS = 512


def message_bounds(max_model_len: int, max_prompt_bytes: int, max_messages: int) -> MessageBounds:
    """Returns the bounds of messages for a model of this length in tokens."""
    num_messages = min(max_messages, max_model_len)
    counts = {
        "TokenIds.ids": max_model_len,
        "ReceivedTokens.ids": MAX_SEQUENCES * max_model_len,
        "GenerateRequest.continue_from": MAX_SEQUENCES,
        "Chat.messages": num_messages,
        "ChatMessage.role": num_messages,
        "ChatMessage.content": num_messages,
        "BadTokens.token_ids": MAX_BAD_TOKEN_SEQUENCES * MAX_BAD_TOKEN_SEQUENCE_LENGTH,
    }
    return MessageBounds(
        {f"baton.v1.{name}": most for name, most in counts.items()},
        max_text_bytes=max_prompt_bytes,
    )
