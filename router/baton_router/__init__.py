"""Router: the process in front of all workers. Never imports torch.

A call arrives in `apis/`, over gRPC or HTTP, becomes a request in `text/`, is admitted and placed
in `routing/`, and is served by `lifecycle/`; what these four hand on to each other is in `call/`.
Each model that a router serves has these parts of its own (`served/`).
"""
