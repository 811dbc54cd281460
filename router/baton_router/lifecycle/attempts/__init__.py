"""Attempts at a request: the calls of its workers, and what follows from what they say.

`attempt.py` mints a lease id and opens `Decode.Generate` with a handle; a decode worker promises
capacity, or it refuses and the next one is asked. Then `Prefill.Prefill` is called, and the client
is told `accepted`. Where another worker has a longer prefix cached that is cheaper to move than to
compute, that worker keeps it under a lease (`prefix_lease.py`); images that other workers compute
or have cached are requested at the same time (`encoder_lease.py`). The prefill worker waits for
neither call: if one fails, it computes the prefix or encodes the image itself.

What follows from a message or the end of a call in each state is a table, as for leases
(`attempt_machine.py`, ADR 0032); the attempt makes the calls (`worker_call.py`) and acts by it. A
decode worker that drains says so: the attempt has it stop the request (`Decode.HandOver`), whose
KV another one fetches as it would a prompt's (ADR 0018). With each request goes what placing it
again would cost (`return_cost.py`), by which a full decode worker decides about preemption.
"""
