"""Groundwork of calls on both sides: messages, statuses, certificates, cancellation."""
