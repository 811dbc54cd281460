"""Small random checkpoints with quantized weights, in the formats in which they are published.

Know nothing of ours: weights are packed here by the formats' descriptions, or by their packages.
"""
