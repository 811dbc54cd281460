"""Transfer of blocks between workers, under leases and by one of several connectors.

A claimant asks a source once what its connectors offer (`Describe`), and attaches by the first in
order of preference (`sources.py`). Each connector is one class (`connector.py`), and `registry.py`
alone knows which there are (ADR 0054). `client.py` opens `KvTransfer.Fetch`, whose stream is
the heartbeat of the lease. Blocks flow as chunks finish; those that the claimant holds are
skipped. Threads read and write them, never the event loop: the source's ahead of what it sends
(`stream/send_ahead.py`), the claimant's while more arrives (`stream/arrivals.py`); on a GPU on a
CUDA stream beside the engine's, which waits for no step (`stream/transfer_stream.py`). What follows
from an event in each state of a lease is a table (`lease/machine.py`).
"""
