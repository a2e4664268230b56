"""Split, combine and verify the KV up-projection of Multi-head Latent Attention checkpoints."""

__version__ = "0.1.0"
