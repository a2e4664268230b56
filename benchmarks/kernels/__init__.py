"""Benchmarks of the kernels, one part a module."""
