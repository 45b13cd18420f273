"""Which keys a tile of queries visits, and in which order. orders/ has a file for each way to score keys."""
