"""Pages about the records of a cache, for people."""
