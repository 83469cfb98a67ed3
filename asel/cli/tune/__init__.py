"""`asel tune`: finds configs before there is traffic."""
