"""Event loop, threads and task-local state; knows nothing of kernels."""
