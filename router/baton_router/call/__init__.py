"""Plain data of one call, which the rooms of the router hand on to each other.

`generate_call.py` is a call as an API read it, with its conversation. `request.py` is the validated
request, its demand, the work left of it and its outcome; `prompt.py` its tokens with their chain
hashes, computed once. `output_delta.py` and `tokens.py` are what a client gets of a sequence,
`parts.py` what a parser makes of it, `ending.py` why it ended. `usage.py` counts while the request
runs, and `failure.py` is the failure of one attempt. Knows nothing of workers, placements or
connections.
"""
