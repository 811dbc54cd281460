"""Worker in any role: a server (`server.py`) that answers while the model loads, a membership in
the cluster (`membership.py`), and a host of one model (`model_host.py`).

`worker.py` puts them together, and `process.py` adds the installed roles (`roles.py`), of which a
worker has one at a time (ADR 0023). Requests of a role become requests of the model's
`EngineClient`; each stream's spans are made here (`request_spans.py`), and the worker's metrics
(`metrics.py`).
"""
