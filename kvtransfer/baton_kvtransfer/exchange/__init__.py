"""Exchange of one content between workers: KV blocks, or outputs of the encoder.

`exchange.py` is made once for each content, with its pools, leases, transports and metrics, and
served as `KvTransfer` or `EncoderTransfer` (ADR 0047). The worker that computes a prompt is told
the leases on its images (`encoder_sources`) and fetches all of them at once (`encoder_fetch.py`),
while its engine computes the text before the image. A fetch that fails or takes longer than 10 s
is given up, and the worker encodes the image itself: it has the tensors, too. A source whose
lease has not opened within the silence bound of 2 s refuses the fetch: the router has called both
workers at once, and does not reach the source.
"""
