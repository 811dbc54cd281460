"""Executor: computes the plans of a scheduler on a device. Decides nothing."""
