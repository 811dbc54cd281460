"""Images of vision-language models: what their encoders take, as plain data of every family.

Knows nothing of torch or transformers. `families.py` chooses a checkpoint's format, and
`encoder_input.py` is an image in a prompt.
"""
