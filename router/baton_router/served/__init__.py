"""Models that a router serves, each with all that belongs to it alone, and their aliases."""
