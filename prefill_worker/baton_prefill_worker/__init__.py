"""Prefill role: computes prompts, keeps their blocks under leases; and the encode role.

`Prefill.Prefill` computes a prompt chunk by chunk; its first token goes straight to the router. A
longer prefix of another worker is fetched first (`prefix_fetch.py`). The call that a lease
belongs to lives exactly as long as the lease, so that blocks always have an owner (ADR 0002).
Where prompts wait for blocks on both sides at once, a finished lease that no claimant has taken
is reclaimed, and its prompt computed again (`lease_retention.py`, ADR 0011).

`encode_service.py` opens a lease on the output of one image, and computes it unless it is cached
(ADR 0047).
"""
