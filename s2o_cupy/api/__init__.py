"""The public calls: what came is checked and described once, and a backend runs it."""
