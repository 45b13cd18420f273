"""Which keys a tile of queries visits, and in which order: one file a method."""
