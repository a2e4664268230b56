"""The commands: options in, one library call, one result out. Nothing here touches a tensor.

Heavy modules are imported inside the commands, so that ``--help`` and shell completion stay quick and ``split``
and ``combine`` never load PyTorch.
"""
