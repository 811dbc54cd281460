"""What a process tells of itself to those who watch it."""
