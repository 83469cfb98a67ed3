"""Places that keep records: a directory, a document, Redis."""
