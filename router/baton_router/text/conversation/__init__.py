"""Conversations as chat templates read them, whichever API they came by.

`normalising.py` is the one step between a conversation as its client gave it and its rendering: it
makes the turns that the model's template takes, and the variables (`docs/guides/conversations.md`
has its rules in a table). `instructions.py` places what is said to the model as its system,
`items.py` makes turns of the items of the Responses API, `merging.py` makes one turn of several,
and `template_messages.py` puts turns and tools in the terms of templates. What a template takes is
known by `baton_router/text/template/template_probe.py`, which renders short conversations with it.
"""
