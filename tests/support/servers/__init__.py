"""Servers, clusters and engines of others, in small."""
