"""Networks that an engine runs: decoders of transformers, or fused forms of known ones.

Llama-shaped models run in `fused_model.py`, with products (`linear.py`) and row-wise operations
(`rowwise.py`) in C, recorded for short steps (`recorded_layers.py`), or, on kernels and with
experts too, in `triton/triton_model.py`. Every other decoder of transformers runs as it is
(`transformers_model.py`), with our attention in its attention interface and, on kernels, norms,
residuals and gated MLPs that a probe has found alike (`triton/kernel_modules.py`). What the
load-time probe cannot describe is refused by name, and so is a model whose logits depend on its
neighbours in a batch or on chunks (`baton/engine/executor/self_check.py`, ADR 0031). On a GPU
decode steps are replayed (`cuda_graphs.py`, ADR 0043). The language model of a vision-language
model runs as any other (`vision_model.py`); the model takes rows of encoder blocks in place of
embeddings (`encoder_features.py`).
Quantized checkpoints become plain models as they are loaded (`quantized/`, ADR 0059), or keep their
weights in codes for products in C (ADR 0061).
"""
