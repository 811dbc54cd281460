"""Router: the process in front of all workers. Never imports torch.

A request passes `service.py` (gRPC) or `http/`, then `intake/`, `admission/` and `placement/`,
and is served by `lifecycle/`. Each model that a router serves has these parts of its own
(`models/`). `fleet/` is what the router knows of workers, `roles/` what it proposes or changes of
their roles. `endpoint_picker/` is the router's other mode: placement for an Envoy-based gateway,
on model servers of others (ADR 0034).
"""
