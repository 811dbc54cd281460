"""Text of a request: from a conversation to tokens, and from tokens to text and tool calls.

`intake.py` validates every field and tokenizes (`chat.py`, `control_tokens.py`, `token_cache.py`,
`model_card.py`); `conversation/` normalises the conversations of all APIs before a chat template
(`template/`) renders them, `prompt_images.py` puts images in place, `pooled_intake.py` makes one
request of each input of `Inference.Embed` and `Inference.Score`. The text of users never becomes a
special token.
Bodies and messages above 64 KiB share a budget of bytes and are parsed in threads
(`baton/serving/grpc/large_requests.py`), once a count of their elements is within the bounds
(`baton/serving/bounds.py`), in the bytes (`baton_router/apis/edge/body/structure.py`,
`baton/serving/grpc/message_bounds.py`).

`images/` fetches, decodes and preprocesses images and clips. `output_parsing/` finds reasoning and
tool calls in the text that `baton/models/detokenizer.py` makes of tokens, or forces them by
grammars.
"""
