"""APIs of the router: what clients send, in their own words, and what they get back.

`grpc/` has the services of `protos/baton/v1`. `routes.py` is the HTTP API: `openai/` completions,
chats and embeddings; `responses/` and `anthropic/`, whose conversations become chats; `page/` the
web page, and the timeline of an answer that it shows. `answers/` writes an answer, whole or as
server-sent events, in the format of any of them. `edge/` is the HTTP server itself: connections,
TLS, bodies read within bounds, errors.
"""
