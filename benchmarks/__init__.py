"""Measurements that are run by hand: ``python -m benchmarks.NAME --help``. Results are kept in ``results/``."""
