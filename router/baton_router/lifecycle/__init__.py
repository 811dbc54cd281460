"""Request lifecycle: attempts from admission to the end, recovery, and the client's answer.

`inference.py` serves `Inference.Generate`, `pooled_inference.py` embeddings and scores, with the
model's `services.py`. `request_lifecycle.py` mints a lease id and opens `Decode.Generate` with a
handle; a decode worker promises capacity, or it refuses and the next one is asked. Then
`Prefill.Prefill` is called, and the client is told `accepted`. Where another worker has a longer
prefix cached that is cheaper to move than to compute, that worker keeps it under a lease
(`prefix_lease.py`); images that other workers compute or have cached are requested at the same
time (`encoder_lease.py`). The prefill worker waits for neither call: if one fails, it computes
the prefix or encodes the image itself.

`answer.py` makes the client's events of both workers' events: one `output.py` per sequence puts
tokens in order by position and drops duplicates (`reorder_buffer.py`), makes text of them and
applies stop strings (`detokenizer.py`). Tokens cross the router as plain data, in columns
(`chunk.py`, `tokens.py`), which `worker_wire.py` makes of messages; each API makes its own form
at its edge, gRPC's in `client_wire.py`.

If a worker dies, falls silent or is cut off, the attempt fails: `attempt.py` is one attempt,
`recovery.py` decides about the next, and the stream resumes after the tokens that the client has.
What follows from a message or the end of a call in each state is a table, as for leases
(`attempt_machine.py`, ADR 0032); the attempt makes the calls (`worker_call.py`) and acts by it. A
decode worker that drains says so: the attempt has it stop the request (`Decode.HandOver`), whose
KV another one fetches as it would a prompt's (ADR 0018). With each request goes what placing it
again would cost (`return_cost.py`), by which a full decode worker decides about preemption.

However a request ends, all calls are cancelled, and a cancelled call gives back blocks, lease and
promise. One `RequestOutcome` is made, for limits, admission, metrics, trace and recorder. A
pooled request ends with one call of a prefill worker (`pooled_lifecycle.py`): no lease, no decode
worker.
"""
