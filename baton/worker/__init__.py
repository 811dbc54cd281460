"""Worker in any role: one engine behind a server that already answers while the model loads.

`process.py` adds the installed roles (`roles.py`), of which a worker has one at a time (ADR
0023). Requests of a role become requests of its `EngineClient`; each stream's spans are made here
(`request_spans.py`), and the worker's metrics (`metrics.py`).
"""
