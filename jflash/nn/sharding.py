"""Projections on meshes with explicit axes, where JAX asks how a product lies, instead of choosing."""

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jflash.parallel.partition import mesh_axes_of


def projected(projection: nnx.Linear | nnx.LinearGeneral, x: Array) -> Array:
    """`projection(x)`, split as `product_sharding` says."""
    contracted = 1 if isinstance(projection, nnx.Linear) else len(projection.in_features)
    return projection(x, out_sharding=product_sharding(x, projection.kernel[...], contracted=contracted))


def product_sharding(x: Array, kernel: Array, *, contracted: int) -> PartitionSpec | None:
    """How the product of the last axes of x with the first ones of a kernel lies on the mesh.

    Its leading axes are split as those of x, the others as those of the kernel, but not along mesh axes that split the
    leading ones already: a kernel that is split over the devices of the batch (fully sharded data parallelism) is
    gathered for its product. Sums over split axes are made whole.

    Args:
      x: tokens, or what comes of them.
      kernel: of a projection, or an embedding with its axes exchanged.
      contracted: over how many axes the product sums.

    Returns:
      None on a mesh without explicit axes, where XLA chooses.
    """
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes:
        return None
    return joined(sharding.spec[: x.ndim - contracted], jax.typeof(kernel).sharding.spec[contracted:])


def joined(leading: tuple, trailing: tuple) -> PartitionSpec:
    """The spec of both, the trailing axes without the mesh axes that split the leading ones.

    Example:
      >>> import jax
      >>> from jflash.nn.sharding import joined
      >>> joined(("data", None), ("model", ("data", "expert"))) == jax.P("data", None, "model", "expert")
      True
    """
    used = {axis for entry in leading for axis in mesh_axes_of(entry)}
    free = [tuple(axis for axis in mesh_axes_of(entry) if axis not in used) for entry in trailing]
    return PartitionSpec(*leading, *(axes or None for axes in free))
