"""`baton top`: what a cluster does at this moment."""
