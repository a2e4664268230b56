"""Megatron's older ``torch`` checkpoints: what is in each rank's file, read without PyTorch and without Megatron.

An iteration (``iter_0001000`` or ``release``) has a folder for each rank, ``mp_rank_TT``, then ``_PPP`` if there are
pipeline stages, then ``_EEE`` if there are expert ranks, each with one archive of ``torch.save``::

    model_optim_rng.pt      {"args", "iteration", "model" or "model0", "model1", …, "optimizer", "rng_state", …}
    distrib_optim.pt        state of a distributed optimizer

``model`` is the module's own state dict: slices of weights, and layers counted from the stage's first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_convert import storage
from mla_convert.catalogue import OtherFile, SourceFile, SourceTensor
from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.huggingface import MANIFEST_NAME
from mla_convert.formats.pickles import Allowed, Instance
from mla_convert.formats.torch_dist import COMMON_GLOBALS, TRACKER, no_header
from mla_convert.formats.torch_save import Archive, open_archive
from mla_convert.storage import identify, os_errors
from mla_convert.strict_json import open_regular, read_up_to
from mla_convert.tensors import TensorSpec

MODEL_FILE = "model_optim_rng.pt"
#: What a rank's file may name: what the common state of a torch_dist checkpoint may, and classes of optimizers.
RANK_GLOBALS: Allowed = {
    **COMMON_GLOBALS,
    "transformer_engine": frozenset({"*"}),
    "torch.storage": frozenset({"UntypedStorage", "_load_from_bytes"}),
    "collections": frozenset({"OrderedDict", "defaultdict"}),
    "builtins": frozenset({"dict", "set", "frozenset"}),
}
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_ITERATION = re.compile(r"iter_\d{7,}|release")
_RANK_FILE = re.compile(rf"(?:(?:{_ITERATION.pattern})/)?{_RANK.pattern}/")
_MODEL = re.compile(r"model(\d*)")
_HINT = "copy the whole iteration; every rank holds a part of every layer"


@dataclass(frozen=True, slots=True)
class RankModel:
    """What one rank's file holds.

    Attributes:
        tp, pp, ep: Its tensor, pipeline and expert rank.
        chunks: Its tensors by the module's names, for each virtual pipeline stage (one if there are none).
        states: Modules that have an extra state, for each of those.
        rest: Everything in the file but models, optimizer and random states.
        has_optimizer: True if the optimizer's state is in it, or beside it.
    """

    tp: int
    pp: int
    ep: int
    chunks: tuple[Mapping[str, SourceTensor], ...]
    states: tuple[frozenset[str], ...]
    rest: Mapping[str, Any]
    has_optimizer: bool

    @property
    def label(self) -> str:
        """The rank in keys and messages."""
        return f"{self.tp}.{self.pp}.{self.ep}"


@dataclass(frozen=True, slots=True)
class TorchCheckpoint:
    """A checkpoint in the older format.

    Attributes:
        root: The folder that was given: a save folder, or one iteration.
        prefix: What stands before the names of the iteration's files: ``iter_0001000/``, or nothing.
        files: The ranks' files, by name relative to ``root``.
        others: Every other file.
        ranks: What they hold.
        arguments: Megatron's arguments, as rank 0 has them.
        warnings: Sentences worth showing the user.
        origin: ``hf://org/name@commit`` if ``root`` is a commit's place in the Hub's cache.
    """

    root: Path
    prefix: str
    files: Mapping[str, SourceFile]
    others: tuple[OtherFile, ...]
    ranks: tuple[RankModel, ...]
    arguments: Mapping[str, Any]
    warnings: tuple[str, ...]
    origin: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of the iteration."""
        return self.root / self.prefix


def is_torch(path: Path) -> bool:
    """True for an iteration with ``mp_rank_*`` folders, and for a save folder whose iteration has some."""
    if not path.is_dir():
        return False
    if _rank_folders(path):
        return True
    name = _tracked(path)
    if name is not None:
        return _ITERATION.fullmatch(name) is not None and bool(_rank_folders(path / name))
    with os_errors(path, "list"):
        return any(
            _ITERATION.fullmatch(e.name) and bool(_rank_folders(e)) for e in path.iterdir() if e.is_dir()
        )


def lists_torch(names: Iterable[str]) -> bool:
    """True if files of these names are such a checkpoint."""
    return any(_RANK_FILE.match(name) for name in names)


def open_torch(path: Path, origin: str | None = None, notes: tuple[str, ...] = ()) -> TorchCheckpoint:
    """Read what the ranks' files say about themselves; of their weights nothing.

    Raises:
        BadInputError: A file is missing or damaged, or asks for what no checkpoint needs.
        CannotError: It is stored in a way this version does not read.
    """
    prefix, warnings = _iteration(path)
    folder = path / prefix
    names = _rank_folders(folder)
    files: dict[str, SourceFile] = {}
    opened: list[tuple[tuple[int, ...], str, dict[str, Any]]] = []
    for name, numbers in sorted(names.items()):
        file = f"{prefix}{name}/{MODEL_FILE}"
        if not (path / file).exists():
            raise BadInputError(f"{path / file} is missing", hint=_HINT)
        identity = identify(path / file)
        files[file] = SourceFile(file, path / file, no_header(identity.size), identity)
        opened.append((numbers, file, {}))
    arguments: Mapping[str, Any] = {}
    ranks: list[RankModel] = []
    for numbers, file, _ in opened:
        found = _read_rank(path, file)
        if not ranks:
            args = found[2].get("args")
            arguments = args.state if isinstance(args, Instance) and isinstance(args.state, dict) else {}
        tp, pp, ep = _which(numbers, arguments, [n for n, _, _ in opened])
        ranks.append(RankModel(tp, pp, ep, *found))
    taken = {*files, MANIFEST_NAME}
    others = tuple(
        OtherFile(name, path / name, identify(path / name))
        for name in sorted(_walk(path, prefix))
        if name not in taken
    )
    said = (*notes, *warnings)
    return TorchCheckpoint(path, prefix, files, others, tuple(ranks), arguments, said, origin)


# The folder


def _rank_folders(folder: Path) -> dict[str, tuple[int, ...]]:
    """Numbers in the names of the ranks' folders."""
    if not folder.is_dir():
        return {}
    with os_errors(folder, "list"):
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    return {
        name: tuple(int(n) for n in found.groups() if n is not None)
        for name in names
        if (found := _RANK.fullmatch(name))
    }


def _tracked(path: Path) -> str | None:
    """The folder that the tracker names; None without a tracker."""
    tracker = path / TRACKER
    if not tracker.exists():
        return None
    with open_regular(tracker) as file:
        text = read_up_to(file, 64, where=str(tracker)).decode("utf-8", "replace").strip()
    return f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,18}", text) else text


def _iteration(path: Path) -> tuple[str, list[str]]:
    if _rank_folders(path):
        return "", []
    with os_errors(path, "list"):
        found = sorted(e.name for e in path.iterdir() if e.is_dir() and _ITERATION.fullmatch(e.name))
    name = _tracked(path)
    if name is None or name not in found:
        raise BadInputError(
            f"{path} has no {TRACKER}"
            if name is None
            else f"{path / TRACKER} names {name}, which is not there",
            hint="give the folder of one iteration",
            details=found,
        )
    left = len(found) - 1
    return f"{name}/", [f"only {name} is read; {left} other iterations stay behind"] if left else []


def _which(
    numbers: tuple[int, ...], arguments: Mapping[str, Any], every: list[tuple[int, ...]]
) -> tuple[int, int, int]:
    """(tensor, pipeline, expert) rank. A second number alone is the one or the other: the arguments tell."""
    if len({len(other) for other in every}) > 1:
        raise BadInputError("the names of mp_rank folders have different numbers of parts", hint=_HINT)
    if len(numbers) != 2:
        return numbers if len(numbers) == 3 else (numbers[0], 0, 0)
    pipeline, expert = (arguments.get(f"{n}_model_parallel_size") for n in ("pipeline", "expert"))
    if type(expert) is int and expert > 1 and not (type(pipeline) is int and pipeline > 1):
        return numbers[0], 0, numbers[1]
    if type(pipeline) is int and pipeline > 1:
        return numbers[0], numbers[1], 0
    raise CannotError(
        "the second number of mp_rank folders is a pipeline or an expert rank, and the arguments do not say which",
        details=[f"mp_rank_{'_'.join(map(str, other))}" for other in every],
    )


def _walk(root: Path, prefix: str) -> Iterator[str]:
    if prefix:
        with os_errors(root, "list"):
            yield from sorted(entry.name for entry in root.iterdir() if not entry.is_dir())
    for parent, folders, names in os.walk(root / prefix):
        folders.sort()
        for name in names:
            yield (Path(parent) / name).relative_to(root).as_posix()


# A rank's file


def model_names(state: Mapping[Any, Any]) -> list[str]:
    """The keys of the models in a rank's file, in the order of virtual pipeline stages."""
    found = {name: m[1] for name in state if type(name) is str and (m := _MODEL.fullmatch(name))}
    return sorted(found, key=lambda name: int(found[name] or 0))


def _read_rank(
    root: Path, file: str
) -> tuple[tuple[Mapping[str, SourceTensor], ...], tuple[frozenset[str], ...], Mapping[str, Any], bool]:
    path = root / file
    fd = storage.open_source(path)
    try:
        archive = open_archive(fd, 0, os.fstat(fd).st_size, str(path))
        value = archive.value(RANK_GLOBALS)
        if type(value) is not dict:
            raise BadInputError(f"{path} is no dictionary, as a rank's file must be")
        models = model_names(value)
        if not models:
            raise BadInputError(f"{path} holds no model, only {', '.join(map(str, value))[:200]}")
        chunks, states = [], []
        for name in models:
            tensors, with_state = _model(archive, value[name], file, path)
            chunks.append(tensors)
            states.append(with_state)
    finally:
        os.close(fd)
    has_optimizer = bool(value.get("optimizer")) or (path.parent / "distrib_optim.pt").exists()
    rest = {
        name: value[name] for name in value if name not in models and name not in ("optimizer", "rng_state")
    }
    return tuple(chunks), tuple(states), rest, has_optimizer


def _model(
    archive: Archive, state: Any, file: str, path: Path
) -> tuple[dict[str, SourceTensor], frozenset[str]]:
    """A module's state dict: its tensors, and the modules with an extra state."""
    if type(state) is not dict:
        raise BadInputError(f"{path}: a model is no dictionary of tensors")
    tensors: dict[str, SourceTensor] = {}
    states = set()
    for name, value in state.items():
        if type(name) is not str:
            raise BadInputError(f"{path}: a tensor's name is {name!r}")
        if name.endswith("._extra_state"):
            states.add(name.removesuffix("._extra_state"))
            continue
        if value is None:
            continue
        found = archive.tensor(value, name)
        spec = TensorSpec(name, found.spec.dtype, found.spec.shape)
        tensors[name] = SourceTensor(spec, file, found.start, found.stop)
    return tensors, frozenset(states)
