"""Benchmarks of the kernels: one part a module, which says its rows; ``__main__`` is the command that runs them."""
