"""Stores the common state where a release keeps it, with the order of the indexer's rows noted in it.

Rows in another order look the same, so a checkpoint must go on telling which it has: else it might be migrated twice.
Releases to 0.18 keep the common state in ``common.pt``, later ones in the checkpoint itself, and these have an argument
for the indexer's rotary pairs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from mla_convert import storage
from mla_convert.errors import BadInputError
from mla_convert.formats.pickle_writing import write_pickle
from mla_convert.formats.pickles import Instance
from mla_convert.formats.torch_dist import BACKEND, COMMON, COMMON_KEY, TorchDist
from mla_convert.formats.torch_save import Archive, open_archive
from mla_convert.formats.torch_save_writing import write_archive
from mla_convert.megatron.changes import Changes
from mla_convert.megatron.eras import INTERLEAVED, IndexerRows
from mla_convert.plan import GeneratedFile
from mla_convert.strict_json import dump_json, read_json

_MAX_RECORD = 64 << 20


def store_common_state(changes: Changes, rows: IndexerRows) -> None:
    """Put the common state where the release that has ``rows`` keeps it, and note them in the arguments."""
    source = changes.model.source
    if not source.common:
        changes.warn(
            "there is no common state to note the order of the indexer's rows in; only the manifest has it"
        )
        return
    noted = _noted(source, rows)
    if not isinstance(source.common.get("args"), Instance):
        changes.warn(
            "the common state has no arguments to note the order of the indexer's rows in; keep the manifest"
        )
    is_file = rows is IndexerRows.ROPE_LAST
    data = write_archive(_pickle(noted if is_file else [noted]), _storages(source))
    backend = read_json(source.folder / BACKEND)
    backend = {name: value for name, value in backend.items() if not name.startswith("common_")}
    if is_file:
        backend |= {"common_backend": "torch", "common_backend_version": 1}
        changes.generated.append(GeneratedFile(source.prefix + COMMON, data))
    else:
        anchor = COMMON_KEY if COMMON_KEY in changes.metadata.objects else next(iter(changes.model.keys))
        changes.edits.objects.setdefault(anchor, {})[COMMON_KEY] = changes.rearranger.add_bytes(
            COMMON_KEY, data
        )
        if source.has_common_file:
            changes.absent.add(source.prefix + COMMON)
    if COMMON_KEY in changes.metadata.objects:
        changes.edits.removed.add(COMMON_KEY)
    changes.generated.append(GeneratedFile(source.prefix + BACKEND, dump_json(backend)))


def _noted(source: TorchDist, rows: IndexerRows) -> dict[str, Any]:
    common = dict(source.common)
    args = common.get("args")
    if isinstance(args, Instance) and isinstance(args.state, dict):
        state = {name: value for name, value in args.state.items() if name != INTERLEAVED}
        if rows is not IndexerRows.ROPE_LAST:
            state[INTERLEAVED] = rows is IndexerRows.ROPE_FIRST_INTERLEAVED
        common["args"] = replace(args, state=state)
    return common


def _pickle(value: Any) -> bytes:
    return write_pickle(value, "the common state", protocol=2)


def _storages(source: TorchDist) -> dict[str, bytes]:
    """The raw bytes of tensors in the common state."""
    item = None if source.has_common_file else source.metadata.objects[COMMON_KEY]
    path = source.folder / (item.file if item else COMMON)
    fd = storage.open_source(path)
    try:
        offset, length = (item.offset, item.length) if item else (0, os.fstat(fd).st_size)
        archive: Archive = open_archive(fd, offset, length, str(path))
        names = [name for name in archive.records if name.startswith("data/")]
        if sum(archive.records[name].size for name in names) > _MAX_RECORD:
            raise BadInputError(f"{path}: the common state has tensors of more than {_MAX_RECORD} bytes")
        return {name: archive.read(name) for name in names}
    finally:
        os.close(fd)
