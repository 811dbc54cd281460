"""Preload of transformers: what the first model of a process imports and compiles, by an import.

Forks of a process that has imported this share it, and load their models faster.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.llama import modeling_llama

get_checkpoint_conversion_mapping(modeling_llama.LlamaConfig.model_type)
