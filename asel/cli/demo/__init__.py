"""A few real tunable kernels, and the story that `asel demo` tells with them."""
