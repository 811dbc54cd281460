"""`baton top`: live view of a cluster."""
