"""Which part of each module a tensor-parallel rank holds, and which numbers of ranks are possible: pure layout.

Whole heads, whole experts and whole FP8 scale blocks only. Rows are no measure of heads: 20 heads of 448 rows divide
by 8, and would give 2.5 heads a rank. How each module is cut is data (``names``); here is what follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import gcd

from mla_convert.errors import BadInputError, CannotError
from mla_convert.names import Naming, Place, Sharding
from mla_convert.quant import FP8_DTYPES, SCALE_FIELDS, SHARED_FIELDS
from mla_convert.tensors import TensorSpec


class Experts(StrEnum):
    """How routed experts are dealt out: whole experts, in order (DeepSeek's rule), or a slice of each."""

    EP = "ep"
    TP = "tp"


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of one module, and how they are dealt out.

    Attributes:
        place: The module's role.
        fields: Its tensors by field name.
        block: Rows and columns that one FP8 scale covers, where scales come in blocks.
    """

    place: Place
    fields: Mapping[str, TensorSpec]
    block: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """Full name."""
        return self.place.module

    @property
    def scale_field(self) -> str | None:
        """Field of the FP8 scale, where there is one."""
        return next((field for field in SCALE_FIELDS if field in self.fields), None)

    def is_whole(self, experts: Experts) -> bool:
        """True if each of its tensors lies whole on every rank, or on one rank alone."""
        return self.place.sharding.dimension is None or self.has_owner(experts)

    def has_owner(self, experts: Experts) -> bool:
        """True for an expert that lies whole on one rank."""
        return self.place.expert is not None and experts is Experts.EP

    def dimension(self, field: str) -> int | None:
        """The dimension along which one of its tensors is cut; None if every rank holds all of it.

        A bias of a projection that is cut along its inputs stays whole: it must be added once, after the sum over
        ranks.

        Raises:
            CannotError: The tensor belongs to a packed format, which these rules do not cut.
        """
        along = self.place.sharding.dimension
        if along is None:
            return None
        spec = self.fields[field]
        if self.place.sharding is Sharding.STACKED:
            if not spec.shape:
                raise CannotError(f"{spec.name} is one value for all experts, which cannot be dealt out")
            return 0
        if field in SHARED_FIELDS or (field in SCALE_FIELDS and spec.numel == 1 and self.block is None):
            return None
        if field == "bias" or (field in SCALE_FIELDS and self.block is None):
            return 0 if along == 0 else None
        if (field == "weight" or field in SCALE_FIELDS) and len(spec.shape) == 2:
            return along
        raise CannotError(
            f"{spec.name} {spec.dtype} {list(spec.shape)}: no rule says how to cut it over ranks",
            hint="packed low-bit formats cannot be resharded; start from a BF16 or FP8 release of the model",
        )


def modules_of(
    specs: Mapping[str, TensorSpec],
    naming: Naming,
    blocks: Mapping[str, tuple[int, int]],
    block: tuple[int, int],
) -> dict[str, Module]:
    """Group tensors by module, in their order.

    Args:
        specs: Tensors by name.
        naming: What their names have in common.
        blocks: FP8 block sizes by module name, where they differ from ``block``.
        block: FP8 block size of all others.

    Raises:
        BadInputError: A scale does not fit its weight.
    """
    places: dict[str, Place] = {}
    fields: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in specs.items():
        place = naming.place(name)
        places.setdefault(place.module, place)
        fields.setdefault(place.module, {})[place.field] = spec
    found = {}
    for name, place in places.items():
        module = Module(place, fields[name])
        found[name] = replace(module, block=_block(module, blocks.get(name, block)))
    return found


def _block(module: Module, block: tuple[int, int]) -> tuple[int, int] | None:
    weight = module.fields.get("weight")
    scale = module.fields.get(module.scale_field or "")
    if weight is None or scale is None or len(weight.shape) != 2 or weight.dtype not in FP8_DTYPES:
        return None
    rows, columns = weight.shape
    if scale.numel == 1 and len(scale.shape) < 2:
        return None
    fitting = (-(-rows // block[0]), -(-columns // block[1]))
    if scale.shape in ((rows,), (rows, 1)) and (block[0] != 1 or len(scale.shape) == 1):
        return None
    if scale.shape == fitting:
        return block
    if module.place.sharding.dimension is None:
        return None  # stays whole: its scales need not be understood
    raise BadInputError(
        f"{scale.name} has shape {list(scale.shape)}; {weight.name} {list(weight.shape)} needs {list(fitting)} in "
        f"blocks of {block[0]}x{block[1]}",
        hint="the scale is of another weight, or the configuration states another block size",
    )


# What a number of ranks must divide


@dataclass(frozen=True, slots=True)
class Demand:
    """A count that must divide by the number of ranks, into whole blocks where it has some.

    Attributes:
        count: What is dealt out.
        what: What it counts: heads, experts, rows, columns.
        name: Whose it is, for messages.
        block: Rows or columns that one FP8 scale covers; each rank must get whole blocks. 1 without scales.
        otherwise: What could be asked for instead.
    """

    count: int
    what: str
    name: str
    block: int = 1
    otherwise: str = ""

    def why_not(self, ranks: int) -> str | None:
        """Why it cannot be dealt out to ``ranks`` ranks; None if it can."""
        if ranks == 1:
            return None
        each, rest = divmod(self.count, ranks)
        if rest and self.block == 1:
            return f"{self.count} {self.what} of {self.name} do not divide by {ranks}{self.otherwise}"
        if rest or each % self.block:
            return (
                f"{self.count} {self.what} of {self.name} over {ranks} ranks are {self.count / ranks:g} each, not "
                f"whole FP8 blocks of {self.block}"
            )
        return None


def demands(
    modules: Iterable[Module],
    heads: Mapping[str, int],
    experts: Experts,
    *,
    reblock: bool = False,
    pad_vocabulary: bool = False,
) -> tuple[Demand, ...]:
    """What a checkpoint demands of a number of ranks, each demand once, heads before all else.

    Args:
        modules: The checkpoint's modules.
        heads: Heads of each attention block by its prefix.
        experts: How routed experts are dealt out.
        reblock: Scale blocks may become finer, so that they are always whole.
        pad_vocabulary: Rows may be added to the vocabulary.
    """
    found = [Demand(count, "heads", prefix.rstrip(".")) for prefix, count in heads.items()]
    dealt: list[Demand] = []
    numbers: dict[str, int] = {}
    for module in modules:
        place, sharding = module.place, module.place.sharding
        if module.has_owner(experts):
            group = module.name.partition(".experts.")[0] + ".experts"
            numbers[group] = max(numbers.get(group, 0), (place.expert or 0) + 1)
        elif sharding is Sharding.STACKED:
            count = max((spec.shape[0] for spec in module.fields.values() if spec.shape), default=1)
            dealt.append(Demand(count, "experts", module.name))
        elif sharding.dimension is not None:
            dealt += _module_demands(module, reblock, pad_vocabulary)
    found += [Demand(count, "experts", name) for name, count in numbers.items()]
    kept: dict[tuple[int, str, int], Demand] = {}
    for demand in (*found, *dealt):
        kept.setdefault((demand.count, demand.what, demand.block), demand)
    return tuple(kept.values())


def _module_demands(module: Module, reblock: bool, pad_vocabulary: bool) -> Iterator[Demand]:
    for field, spec in module.fields.items():
        along = module.dimension(field)
        if along is None or field in SCALE_FIELDS:
            continue
        what = "columns" if along else "rows"
        if module.place.sharding is Sharding.VOCABULARY:
            if not pad_vocabulary:
                yield Demand(
                    spec.shape[along], what, module.name, otherwise="; --pad-vocabulary adds rows of zeros"
                )
            continue
        block = module.block[along] if module.block and field == "weight" and not reblock else 1
        yield Demand(spec.shape[along], what, module.name, block)


def why_not(wanted: Iterable[Demand], ranks: int) -> list[str]:
    """Every reason against a number of ranks, in the order of the demands."""
    return [reason for demand in wanted if (reason := demand.why_not(ranks))]


def candidate_sizes(heads: Iterable[int], also: Iterable[int] = ()) -> list[int]:
    """Numbers of ranks worth judging: divisors of some block's heads, powers of two up to the largest, and ``also``."""
    counts = set(heads)
    largest = max(counts, default=1)
    sizes = {size for count in counts for size in range(1, count + 1) if count % size == 0}
    sizes |= {1 << bit for bit in range(largest.bit_length()) if 1 << bit <= largest}
    return sorted(sizes | set(also))


# Slices


def rank_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The part of ``size`` that one rank holds, where each holds the same (the last may get less)."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


def owner_of(expert: int, count: int, ranks: int) -> int:
    """The rank that holds a whole expert: experts are dealt out in order, equally many to each."""
    return expert // (count // ranks)


def finer_block(module: Module, along: int, ranks: int) -> tuple[int, int] | None:
    """The block size that a module's scales need over ``ranks`` ranks; None if they can stay as they are."""
    if module.block is None:
        return None
    each = module.fields["weight"].shape[along] // ranks
    size = gcd(each, module.block[along])
    if size == module.block[along]:
        return None
    return (size, module.block[1]) if along == 0 else (module.block[0], size)
