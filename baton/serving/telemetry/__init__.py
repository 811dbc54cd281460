"""Telemetry of a process: metrics, traces and their endpoints.

Metrics are collected when scraped, from counters that exist anyway; requests and transfers are
counted when they end. `tracing.py` has a process make spans where `OTEL_*` variables ask for
them, after it was forked; `propagation.py` takes a caller's context in and passes it on as
metadata; `stages.py` makes a span of a block of code. A worker's spans are made of what its
engine says of its steps (`baton/worker/request_spans.py`), so that the engine knows nothing of
traces.
"""
