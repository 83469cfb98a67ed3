"""Runs kernels with chosen configs, tunes before traffic, serves code without `await`."""
