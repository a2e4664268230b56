"""TileLang kernels for Hopper (compute capability 9.0), one family a file.

- ``sparse_mla``: attention of absorbed queries to the tokens listed for each.
- ``sparse_mla_backward``: its gradients, added up with atomics or in a fixed order.
- ``dense_mla``: attention of absorbed queries to spans of the tokens.
- ``decode_mla``: new tokens against the latent cache, contiguous or paged, bfloat16 or FP8, dense or sparse.
- ``indexer_logits``: scores of every key for every query, from which the lists are chosen.
- ``topk``: the keys with the highest scores.
- ``indexer_select``: the two together, without the scores of all queries at once.
- ``indexer_loss``: the loss that trains an indexer, with its gradients.

Each public function has a reference of the same name and signature in ``mla_convert.runtime.reference`` (that of
``decode_mla`` in ``mla_convert.runtime.decode``, of gradients in ``mla_convert.runtime.backward``, of
``indexer_loss`` in ``mla_convert.runtime.indexer_loss``), and ``mla_convert.runtime.dispatch`` picks between the two.
Importing a kernel module imports torch and TileLang and needs no GPU; a kernel is compiled when it is first called,
or by its module's ``compile_for``.
"""
