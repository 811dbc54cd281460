"""Admission of requests: quotas, a weighted-fair queue, and a forecast of their TTFT.

`controller.py` admits a request in fair order (`admission_queue.py`, `quotas.py`) if workers will
have room for it (`forecast.py`, `policy.py`); else it is rejected with a retry-after.
`rate_limit.py` has the rate limits of tenants. The placement that admission decides on is handed on
with the request. All but the controller is pure, and decides in the simulator too.
"""
