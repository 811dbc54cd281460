"""Encoder of images in an engine, and positions of three dimensions.

`vision_encoder.py` encodes the images that a plan names into their blocks before the forward.
Where rotary positions have three dimensions, `rope_positions.py` computes them from the images
(ADR 0045). `prompt_processor.py` makes prompts of text and images; which tensors a family takes
and which tokens stand for an image, its format says (`baton/models/images/families.py`). Between
processes images are `EncoderInput` (`baton/models/images/encoder_input.py`).
"""
