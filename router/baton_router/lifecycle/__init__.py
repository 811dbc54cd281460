"""Request lifecycle: attempts from admission to the end, recovery, and the client's answer.

`inference.py` serves `Inference.Generate`, `pooled_inference.py` embeddings and scores, with the
model's `services.py`. `request_lifecycle.py` makes `attempts/`, one after another, of what a
request still lacks: if a worker dies, falls silent or is cut off, the attempt fails, `recovery.py`
decides about the next one, and the stream resumes after the tokens that the client has. `answers/`
makes the client's events of the workers' events.

What workers say crosses the router as plain data (`worker_events.py`; tokens in columns,
`call/output_delta.py`), which `worker_wire.py` makes of messages. Of what clients get
(`events.py`), each API makes its own form at its edge, gRPC in `apis/grpc/client_wire.py`.

However a request ends, all calls are cancelled, and a cancelled call gives back blocks, lease and
promise. One `RequestOutcome` is made, for limits, admission, metrics, trace and recorder. A
pooled request ends with one call of one worker (`pooled_lifecycle.py`): no lease, no handoff.
"""
