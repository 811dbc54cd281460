"""GGUF models: their files described as a checkpoint's folder, in a cache.

A GGUF file has everything in it: configuration, tokenizer, chat template and weights. Baton writes
the first three once as the JSON files of a checkpoint, beside links to the GGUF files; from then on
that folder is the checkpoint for routers and workers alike (ADR 0058). Read `header` and
`description` first. Knows neither torch nor how values are stored.
"""
