"""Rendering of normalised conversations by the chat template of a model."""

from collections.abc import Sequence

from baton_router.call.generate_call import Conversation
from baton_router.text.chat import ChatTokenizer, RenderedChat
from baton_router.text.conversation.template_messages import (
    template_tools,
    template_turns,
    with_frames,
)
from baton_router.text.template.chat_template import ChatTemplate


def rendered(
    chat: Conversation,
    tokenizer: ChatTokenizer,
    template: ChatTemplate | None,
    num_frames: Sequence[int] = (),
) -> RenderedChat:
    """Returns a conversation as text.

    Args:
        chat: what `normalised` returned for this template.
        num_frames: of each image and clip, in order; empty: they are one each.

    Raises:
        InvalidArgumentError: the template refuses it.
    """
    turns = template_turns(chat, template)
    return tokenizer.render(
        with_frames(turns, num_frames) if num_frames else turns,
        template_tools(chat),
        chat.variables,
        continues_answer=chat.continues_answer,
        begins_answer=chat.begins_answer,
    )
