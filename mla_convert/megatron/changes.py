"""What a conversion changes in a torch_dist checkpoint, collected step by step."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from mla_convert.errors import BadInputError, CannotError
from mla_convert.formats.torch_dist_edit import Edits, NewTensor
from mla_convert.formats.torch_dist_metadata import DistMetadata, Item
from mla_convert.geometry import AttentionBlock, Layout
from mla_convert.megatron.eras import IndexerRows, Norms
from mla_convert.megatron.fp8_states import Fp8State, read_fp8_state
from mla_convert.megatron.model import Key, MegatronModel, layer_names, refuse_buckets
from mla_convert.megatron.rearranging import Rearranger
from mla_convert.names import MEGATRON, Part
from mla_convert.plan import EqualTensors, GeneratedFile

_STATE = re.compile(r"(.*\.)([^.]+)\._extra_state(/.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """What a conversion of a torch_dist checkpoint may be asked for, beside its direction.

    Attributes:
        norms: Where the norms of the latents shall be; None leaves them.
        indexer: The order of the indexer's rows that is wanted; None leaves it.
        indexer_from: The order that they have, where the checkpoint does not tell.
        drop_optimizer: Leave the optimizer's state out.
        drop_fp8_state: Replace FP8 states with histories, of the projections that change, by empty ones.
    """

    norms: Norms | None = None
    indexer: IndexerRows | None = None
    indexer_from: IndexerRows | None = None
    drop_optimizer: bool = False
    drop_fp8_state: bool = False

    def described(self) -> dict[str, Any]:
        """The options that change bytes."""
        return {
            "norms": self.norms,
            "indexer": self.indexer,
            "indexer_from": self.indexer_from,
            "drop_optimizer": self.drop_optimizer,
            "drop_fp8_state": self.drop_fp8_state,
        }


@dataclass(frozen=True, slots=True)
class StateKey:
    """The key of an extra state, taken apart: ``BASE`` ``MODULE`` ``._extra_state`` ``SHARD``."""

    base: str
    module: str
    shard: str

    def of(self, module: str) -> str:
        """The key of another module's state, for the same layer."""
        return f"{self.base}{module}._extra_state{self.shard}"


def parse_state_key(key: str) -> StateKey | None:
    """Take the key of an extra state apart; None for any other object."""
    found = _STATE.fullmatch(key)
    return StateKey(found[1], found[2], found[3] or "") if found else None


@dataclass(slots=True)
class Changes:
    """The changes collected so far.

    Attributes:
        model: The checkpoint.
        blocks: Its attention blocks.
        options: What was asked for.
        layout: How the up-projections will be stored.
        edits: What changes in ``.metadata``.
        rearranger: The new tensors and objects.
        guards: What must hold of the stored bytes.
        hashed: Stored chunks whose sha256 goes into the manifest.
        generated: Small files that are written anew, beside ``.metadata``.
        absent: Files of the source that the output does without.
        warnings: Sentences worth showing the user.
    """

    model: MegatronModel
    blocks: tuple[AttentionBlock, ...]
    options: MegatronOptions
    layout: Layout | None
    edits: Edits = field(default_factory=Edits)
    guards: list[EqualTensors] = field(default_factory=list)
    hashed: list[str] = field(default_factory=list)
    generated: list[GeneratedFile] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    rearranger: Rearranger = field(init=False)

    def __post_init__(self) -> None:
        """Leave the optimizer out, or make sure that it can come along."""
        self.rearranger = Rearranger(self.model.source)
        dropped = self.model.optimizer_keys
        if not self.options.drop_optimizer:
            refuse_buckets(self.model)
        elif dropped:
            self.edits.removed.update(dropped)
            self.warn(
                f"{len(dropped)} tensors and objects of the optimizer are left out; load with --no-load-optim"
            )

    @property
    def metadata(self) -> DistMetadata:
        """What ``.metadata`` says."""
        return self.model.source.metadata

    def warn(self, sentence: str) -> None:
        """Add a warning, once."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def stored(self) -> list[Key]:
        """The tensors that are not left out."""
        return [self.model.keys[text] for text in self.metadata.tensors if text not in self.edits.removed]

    def first_layer(self, key: Key) -> str:
        """A weight's name in the first layer that a tensor holds; it has the same shape in all of them."""
        name, _ = layer_names(key, self.metadata.tensors[key.text].spec.shape)[0]
        return name

    def block(self, key: Key, prefix: str) -> AttentionBlock:
        """The attention block with this prefix, which a tensor belongs to."""
        found = next((block for block in self.blocks if block.prefix == prefix), None)
        if found is None:
            raise BadInputError(f"{key.text} belongs to {prefix!r}, which has no weights")
        return found

    def beside(self, key: Key, part: Part) -> str:
        """The key of another part of the block, for the same layers and the same state."""
        base, _, _ = key.module.rpartition(".")
        return key.renamed(f"{base}.{MEGATRON.module(part)}")

    def replace(self, key: str, new: list[NewTensor], *, keep: bool = False) -> None:
        """Put new tensors in the place of a stored one, or after it."""
        self.edits.tensors[key] = new
        self.hashed += self.rearranger.chunk_names(key)
        if not keep:
            self.edits.removed.add(key)

    def shared_state(self, key: str) -> Item:
        """An extra state that fits another projection: the same one, or an empty one if the user lets it go.

        Raises:
            CannotError: It holds what fits one tensor alone, and may not be dropped.
        """
        item = self.metadata.objects[key]
        meaning = read_fp8_state(self.model.source.folder, key, item)
        if meaning in (Fp8State.EMPTY, Fp8State.RECIPE):
            return item
        if not self.options.drop_fp8_state:
            raise CannotError(
                f"{key} holds an FP8 state ({meaning}): scales and histories of one tensor, which fit no other",
                hint="give --drop-fp8-state to replace it by an empty one; FP8 then calibrates anew",
            )
        self.warn("FP8 states of the projections that change are replaced by empty ones; FP8 calibrates anew")
        return self.rearranger.add_empty_state(key)
