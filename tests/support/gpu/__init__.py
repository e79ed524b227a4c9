"""A GPU, or what stands in for it."""
