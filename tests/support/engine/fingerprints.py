"""Fingerprints of checkpoints, without an engine."""

from pathlib import Path

import torch

from baton.engine.executor.models import loader
from baton.models import DESCRIPTION, checkpoint_folder
from baton.models.digests import digesting
from baton.models.weights import weight_files


def fingerprint_of(path: str | Path) -> bytes:
    """Returns the fingerprint of a checkpoint that is computed in float32."""
    folder = checkpoint_folder(str(path), DESCRIPTION)
    with digesting(weight_files(folder)) as digests:
        return loader.fingerprint(
            loader.load_config(str(folder)), torch.float32, digests.combined()
        )
