"""Fairness between the holders of a shared resource: tenants, or the addresses of clients.

`fair_bound.py`: which holder gives way at a limit. `fair_queue.py`: which one is served next.
`client_address.py`: the holder that an address is. All are pure: they know of no request, no
connection and no clock.
"""
