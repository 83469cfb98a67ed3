"""`asel demo`: a small service on a few real tunable kernels."""
