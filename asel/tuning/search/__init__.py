"""Which candidates to compile, if there are too many to compile them all."""
