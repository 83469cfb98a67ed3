"""Helpers that tests share: kernels, servers, fleets, hostile candidates."""
