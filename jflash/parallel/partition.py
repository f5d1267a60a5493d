"""How one call is spread over a mesh: batch and heads are split, lengths and head dims are not.

Each device computes its own batch rows and query heads. Key/value heads follow the query heads where the devices divide
them. Where they are fewer than the devices and divide these, every device holds all of them and takes its own one, and
their cotangents are summed.

Two ways in. Under `jax.jit` with automatic axes, `partitioned` wraps a kernel in `custom_partitioning` with a Shardy
rule, so that XLA does not gather q, k and v around it. On a mesh with explicit axes the types say how arrays are split,
and `over_explicit_mesh` wraps the whole call in `jax.shard_map`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jflash.errors import UnsupportedError

type MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """How the batch and the heads of one call lie on a mesh.

    Attributes:
      batch: mesh axes that split B.
      heads: mesh axes that split N.
      head_shards: devices along `heads`.
      K: key/value heads of the whole call.
    """

    batch: MeshAxes
    heads: MeshAxes
    head_shards: int
    K: int

    @property
    def splits_kv_heads(self) -> bool:
        """Key/value heads are split like query heads; otherwise each device holds all K and takes its own one."""
        return self.K % self.head_shards == 0

    def spec(self, axes: str, shape: Sequence[int]) -> PartitionSpec:
        """The partition of an array whose axes are these letters; an axis of size 1 broadcasts and is not split."""
        split = {"B": self.batch, "N": self.heads, "K": self.heads if self.splits_kv_heads else ()}
        return PartitionSpec(*((split.get(axis, ()) or None) if size > 1 else None for axis, size in zip(axes, shape)))

    def own_kv_head(self, x: jax.Array, axes: str) -> jax.Array:
        """On one device: the key/value head of this device's query heads, from an array of all of them."""
        if self.splits_kv_heads or self.K == 1 or "K" not in axes:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self._own_index(), 1, axes.index("K"))

    def sum_kv_heads(self, x: jax.Array, axes: str) -> jax.Array:
        """On one device: cotangents of all key/value heads, from those of this device's own."""
        if self.splits_kv_heads or "K" not in axes:
            return x
        if self.K > 1:
            shape = tuple(self.K if axis == "K" else size for axis, size in zip(axes, x.shape))
            x = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, self._own_index(), axes.index("K"))
        return jax.lax.psum(x, self.heads)

    def sum_shared(self, x: jax.Array, axes: str) -> jax.Array:
        """The sum over the devices whose batch rows or heads an axis of `x`, a small letter, has been summed over."""
        over = ("b" in axes) * self.batch + ("n" in axes) * self.heads
        return jax.lax.psum(x, over) if over else x

    def _own_index(self) -> jax.Array:
        return jax.lax.axis_index(self.heads) // (self.head_shards // self.K)


def placement_of(
    mesh_shape: Mapping[str, int], *, batch: MeshAxes, heads: MeshAxes, B: int, N: int, K: int
) -> Placement | str:
    """The placement, or the reason why a call cannot be split so."""
    batch_shards = math.prod(mesh_shape[axis] for axis in batch)
    head_shards = math.prod(mesh_shape[axis] for axis in heads)
    if B % batch_shards:
        return f"B={B} does not divide over the {batch_shards} devices of mesh axes {batch}"
    if N % head_shards:
        return f"N={N} does not divide over the {head_shards} devices of mesh axes {heads}"
    if K % head_shards and head_shards % K:
        return f"K={K} key/value heads and the {head_shards} devices of mesh axes {heads} do not divide one another"
    return Placement(batch=batch, heads=heads, head_shards=head_shards, K=K)


def mesh_axes_of(entry: Any) -> MeshAxes:
    """The mesh axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def partitioned(
    function: Callable[..., tuple[jax.Array, ...]],
    operands: tuple[jax.Array, ...],
    *,
    axes: tuple[str, ...],
    result_axes: tuple[str, ...],
) -> tuple[jax.Array, ...]:
    """`function(*operands)`, with the rule that XLA needs to split it over batch and heads.

    Args:
      function: takes the operands, or one device's part of them, and gives a tuple of arrays.
      operands: the first three are q, k and v.
      axes: for each operand a letter for each axis: B, T, S, N, K, H, D (for Hv), another where every device has all of
        the axis; an axis of size 1 broadcasts.
      result_axes: the same for each result. A result with K is a cotangent, summed over devices that share a head; a
        small letter stands for an axis of size 1, and for a sum over B or N, of all devices in the end.
    """
    q, k, v = operands[:3]
    sizes = {"B": q.shape[0], "N": q.shape[2], "K": k.shape[2]}

    # A function that holds constants, the lists of a static TileMap say, is none for `custom_partitioning` (JAX 0.11.2:
    # "assert not closed_call.consts"); inside `jax.jit` they are constants of its own.
    function = jax.jit(function)

    def whole(*arrays):
        return function(*arrays)

    call = custom_partitioning(whole)

    def partition(mesh, arguments, results):
        spec = arguments[0].sharding.spec
        spec = (*spec, *(None,) * (4 - len(spec)))
        wanted = {"batch": mesh_axes_of(spec[0]), "heads": mesh_axes_of(spec[2])}
        placement = placement_of(mesh.shape, **wanted, **sizes)
        if isinstance(placement, str):
            # XLA asked for a split that the heads do not allow: still right with all heads on every device.
            placement = placement_of(mesh.shape, batch=(), heads=(), **sizes)

        def on_device(*arrays):
            own = (placement.own_kv_head(array, letters) for array, letters in zip(arrays, axes))
            found = function(*own)
            summed = (placement.sum_kv_heads(array, letters) for array, letters in zip(found, result_axes))
            return tuple(placement.sum_shared(array, letters) for array, letters in zip(summed, result_axes))

        def shardings(structs, letters):
            return tuple(
                NamedSharding(mesh, placement.spec(own, struct.shape)) for struct, own in zip(structs, letters)
            )

        return mesh, on_device, shardings(results, result_axes), shardings(arguments, axes)

    lengths = {"T": q.shape[1], "S": k.shape[1], "H": q.shape[3], "D": v.shape[3]}
    rule = _sharding_rule(axes, operands, result_axes, sizes | lengths)
    # In the order in which the rule names them, q before k before v: Shardy takes no other.
    call.def_partition(partition, sharding_rule=rule, need_replication_factors=("t", "h", "s", "d"))
    return call(*operands)


def _sharding_rule(
    axes: Sequence[str], operands: Sequence[jax.Array], result_axes: Sequence[str], sizes: Mapping[str, int]
) -> str:
    """The Shardy rule: a factor for each letter, and one of its own for each axis that broadcasts.

    N and K are factors of their own, not a compound (k g) and k: for a mesh axis larger than K Shardy would split the
    axis itself between k and g, which no NamedSharding can say. `partition` makes K follow N.
    """
    fresh = (f"u{index}" for index in itertools.count())

    def term(letters: str, shape: Sequence[int]) -> str:
        return " ".join(
            letter.lower() if size == sizes.get(letter) else next(fresh) for letter, size in zip(letters, shape)
        )

    left = ", ".join(term(letters, operand.shape) for letters, operand in zip(axes, operands))
    right = ", ".join(term(letters, [sizes.get(letter, 1) for letter in letters]) for letters in result_axes)
    return f"{left} -> {right}"


def over_explicit_mesh(
    function: Callable[..., tuple[jax.Array, ...]],
    operands: tuple[jax.Array, ...],
    *,
    axes: tuple[str, ...],
    result_axes: tuple[str, ...],
    check_vma: bool,
) -> tuple[jax.Array, ...]:
    """`function(*operands)`, on a mesh with explicit axes in a `jax.shard_map` over them, split as q is.

    Arguments as of `partitioned`, and `check_vma` as of `jax.shard_map`. Results carry the split of q. The other
    operands are brought to fit. Along axes that split nothing, every device computes the same.

    Raises:
      UnsupportedError: q is split along its length or its head dim, or the heads cannot be split so.
    """
    q, k = operands[:2]
    sharding = jax.typeof(q).sharding
    spec = (*sharding.spec, *(None,) * (4 - len(sharding.spec)))
    explicit = set(sharding.mesh.explicit_axes)
    split = [tuple(axis for axis in mesh_axes_of(entry) if axis in explicit) for entry in spec]
    if not explicit:
        return function(*operands)
    for name, mesh_axes in (("its length T", split[1]), ("its head dim H", split[3])):
        if mesh_axes:
            reason = f"q is split along {name} over mesh axes {mesh_axes}; split the batch B or the heads N instead"
            raise UnsupportedError({"explicit mesh": reason}, hint="jax.sharding.reshard(q, ...) moves the split.")
    sizes = {"B": q.shape[0], "N": q.shape[2], "K": k.shape[2]}
    placement = placement_of(sharding.mesh.shape, batch=split[0], heads=split[2], **sizes)
    if isinstance(placement, str):
        raise UnsupportedError({"explicit mesh": placement})

    def on_device(*arrays):
        return tuple(function(*(placement.own_kv_head(array, letters) for array, letters in zip(arrays, axes))))

    specs = tuple(placement.spec(letters, operand.shape) for letters, operand in zip(axes, operands))
    result_sizes = sizes | {"T": q.shape[1], "D": operands[2].shape[3]}
    out_specs = tuple(placement.spec(letters, [result_sizes[letter] for letter in letters]) for letters in result_axes)
    on_mesh = jax.shard_map(
        on_device,
        mesh=sharding.mesh,
        in_specs=specs,
        out_specs=out_specs,
        axis_names=frozenset(explicit),
        check_vma=check_vma,
    )
    shardings = [NamedSharding(sharding.mesh, spec) for spec in specs]
    return on_mesh(*(jax.sharding.reshard(operand, own) for operand, own in zip(operands, shardings)))
