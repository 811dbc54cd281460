"""Leases: the blocks that a source keeps for one claimant, and what ends that."""
