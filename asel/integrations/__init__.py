"""Other people's software: each module needs its extra, and is imported by its name."""
