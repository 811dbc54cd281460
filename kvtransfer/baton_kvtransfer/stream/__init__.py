"""Stream of block batches from a source to a claimant."""
