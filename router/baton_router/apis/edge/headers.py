"""Names of headers in which answers tell of fields that are not followed as they were given."""

IGNORED = "x-baton-ignored"
"""Names of fields that change nothing."""

CLAMPED = "x-baton-clamped"
"""Bound of an answer that is lower than the client asked for, with the name of its field."""
