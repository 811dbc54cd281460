"""Validation and tokenization of requests, with their images in place.

`intake.py` validates every field and tokenizes, `prompt_images.py` puts images in place,
`pooled_intake.py` makes one request of each input of `Inference.Embed` and `Inference.Score`. The
text of users never becomes a special token. Bodies and messages above 64 KiB share a budget of
bytes and are parsed in threads (`baton/serving/large_requests.py`), once a count of their
elements has passed, in the bytes (`baton_router/http/structure.py`,
`baton/serving/message_bounds.py`).
"""
