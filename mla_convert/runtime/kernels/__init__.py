"""TileLang kernels for Hopper (compute capability 9.0), one family a file.

- ``sparse_mla``: attention of absorbed queries to the tokens listed for each.
- ``indexer_logits``: scores of every key for every query, from which the lists are chosen.

Each public function has a reference of the same name and signature in ``mla_convert.runtime.reference``, and
``mla_convert.runtime.dispatch`` picks between the two. Importing a kernel module imports torch and TileLang and
needs no GPU; a kernel is compiled when it is first called, or by its module's ``compile_for``.
"""
