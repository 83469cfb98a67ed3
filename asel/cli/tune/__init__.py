"""`asel tune`: find configs before there is traffic."""
