"""How unchanged files reach an output: shared with the source where the file system can, and where they may be."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mla_convert import storage
from mla_convert.catalogue import Catalogue
from mla_convert.errors import LocalIOError
from mla_convert.plan import CarriedFile, RewrittenFile
from mla_convert.storage import LinkMode, Way

#: Files smaller than this that are no weights are copied, so that editing one cannot change the source.
LINK_THRESHOLD = 16 << 20
#: What a file system hands out space in, as a rule.
_BLOCK = 4096


def may_link(file: CarriedFile) -> bool:
    """True for a file that nobody edits in place."""
    return file.is_weights or file.size >= LINK_THRESHOLD


def best_way(catalogue: Catalogue, probe: Path, asked: LinkMode) -> Way:
    """How weights can be shared between source and output: tried, on the smallest weight file.

    Args:
        catalogue: The source.
        probe: A file to make and remove, where the output grows.
        asked: What the user wants.

    Raises:
        LocalIOError: The way that was asked for does not exist here.
    """
    smallest = min(catalogue.files.values(), key=lambda file: file.identity.size)
    for mode in (LinkMode.REFLINK, LinkMode.HARD):
        if asked not in (mode, LinkMode.AUTO):
            continue
        try:
            way = storage.clone_file(smallest.path, probe, mode, on_bytes=lambda _: None)
        except LocalIOError:
            if asked is mode:
                raise
            continue
        probe.unlink()
        return way
    return "copy"


def space_needed(files: Iterable[RewrittenFile | CarriedFile], generated: Iterable[int], way: Way) -> int:
    """Bytes that will take new space, in whole blocks: of ``files``, shared by ``way``, and of ``generated`` sizes."""
    sizes = [*(_new_space(file, way) for file in files), *generated]
    return sum(-(-size // _BLOCK) * _BLOCK for size in sizes)


def _new_space(file: RewrittenFile | CarriedFile, way: Way) -> int:
    if isinstance(file, RewrittenFile):
        changed = sum(target.spec.nbytes for target in file.tensors if not target.is_carried)
        return changed if way == "reflink" else file.size
    return 0 if way != "copy" and may_link(file) else file.size
