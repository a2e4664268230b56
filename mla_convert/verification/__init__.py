"""The checks behind ``verify``, one level a module; each reads weights through the official safetensors library.

``weights`` loads layers, ``structure`` compares inventories, ``rows`` compares bytes, ``numbers`` runs attention.
"""
