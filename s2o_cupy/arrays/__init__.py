"""Arrays of any framework: what they are, where they lie, and how results become arrays again."""
