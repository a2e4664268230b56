"""Checkpoint formats: one module each, and one module for each kind of file they are made of."""
