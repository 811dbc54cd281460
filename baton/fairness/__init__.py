"""Fairness between the holders of a shared resource: tenants, or the addresses of clients.

`fair_bound.py`: which holder gives way at a limit. `fair_queue.py`: which one is served next.
`fair_threads.py`: threads at which holders take turns. `fair_slots.py`: the same in an event loop.
`client_address.py`: the holder that an address is. They know of no request, no connection and no
clock; all but the threads and slots are pure.
"""
