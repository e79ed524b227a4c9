"""Tests on several NUMA nodes, and the virtual machine that has them."""
