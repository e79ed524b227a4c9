"""Weights: model files, their tensors, and the ways to bring them into memory."""
