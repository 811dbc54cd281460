"""State that processes share over Redis, which holds only what may be lost.

Redis says which workers exist (renewed each second) and holds, for each incarnation of a worker,
a snapshot of its cached blocks and the tail of its KV events, from which a router starts (ADR
0021). An epoch, the start time in milliseconds, tells the incarnations apart: a handle of an
earlier one is refused.
"""
