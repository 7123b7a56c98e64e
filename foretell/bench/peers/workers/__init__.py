"""Scripts that run in the peers' own processes, and import nothing of foretell."""
