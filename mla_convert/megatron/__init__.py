"""Megatron's torch_dist checkpoints as models: what is in them, and plans that convert them."""
