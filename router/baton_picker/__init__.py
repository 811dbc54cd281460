"""Endpoint picker: the router's placement for an Envoy-based gateway, on model servers of others.

`service.py` is the ext_proc service, and `envoy_call.py` one request on it. `prompt.py` reads the
prompt of a body, `picker.py` places it on one of the `endpoints.py` by the policies of
`baton_router.routing`, and `probe.py` reads their load. Needs neither Redis nor workers (ADR 0034).
"""
