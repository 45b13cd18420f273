"""NSA: its configuration, the rules of a call, and what is launched. No array and no GPU."""
