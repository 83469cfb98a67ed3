"""Records in Redis: the store that a fleet shares."""
