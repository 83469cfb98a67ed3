"""What tests share: kernels, servers, fleets, hostile candidates."""
