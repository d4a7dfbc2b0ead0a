"""Which device holds what: the mesh, and one table for all parameters.

Batches are split over `data` and `fsdp`; parameters, and whatever the
optimizer keeps for each of them, over `fsdp` and `tensor`.
"""

import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.batch import Batch
from vit_jax.config import MeshConfig

AXES = ("data", "fsdp", "tensor")
BATCH_SPEC = P(("data", "fsdp"))

# First match wins; matched at the end of a path such as
# "Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel", so that the
# optimizer's moments go where their parameters are.
PARAM_RULES: tuple[tuple[str, P], ...] = (
  (r"(query|key|value)/kernel", P("fsdp", "tensor", None)),
  (r"(query|key|value)/bias", P("tensor", None)),
  (r"out/kernel", P("tensor", None, "fsdp")),
  (r"MlpBlock_0/Dense_0/kernel", P("fsdp", "tensor")),
  (r"MlpBlock_0/Dense_0/bias", P("tensor")),
  (r"MlpBlock_0/Dense_1/kernel", P("tensor", "fsdp")),
  (r"embedding/kernel", P(None, None, None, ("fsdp", "tensor"))),
  (r"conv\w*/kernel", P(None, None, None, ("fsdp", "tensor"))),
  (r"pos_embedding(_[xy])?", P(None, None, "fsdp")),
  (r"offsets", P(None, "tensor", None)),
  (r"pre_logits/kernel", P("fsdp", "tensor")),
  (r"head/kernel", P("fsdp", "tensor")),
  (r"head/bias", P("tensor")),
  (r".*", P()),
)


def mesh_shape(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
  """Returns the devices along each axis, -1 resolved.

  Raises:
    ValueError: The axes do not multiply to the number of devices.
  """
  shape = {axis: getattr(mesh, axis) for axis in AXES}
  fixed = int(np.prod([n for n in shape.values() if n != -1]))
  if -1 in shape.values() and num_devices % fixed == 0:
    rest = num_devices // fixed
    return {axis: rest if n == -1 else n for axis, n in shape.items()}
  if fixed != num_devices:
    raise ValueError(
      f"config.mesh: got {shape}, which does not fit {num_devices} device(s);"
      f" the axes must multiply to {num_devices} (-1 stands for the rest)."
    )
  return shape


def make_mesh(mesh: MeshConfig, devices: list | None = None) -> Mesh:
  """Returns the mesh with the axes data, fsdp, tensor.

  Args:
    mesh: Devices along each axis.
    devices: None: all of them, on all processes.

  Raises:
    ValueError: As `mesh_shape`.
  """
  devices = jax.devices() if devices is None else devices
  shape = mesh_shape(mesh, len(devices))
  return jax.make_mesh(
    tuple(shape.values()),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices,
  )


def batch_faults(
  key: str, batch_size: int, accum_steps: int, shape: dict[str, int]
) -> list[str]:
  """Every device must get the same number of rows of every microbatch."""
  parts = shape["data"] * shape["fsdp"]
  micro = batch_size // accum_steps
  if micro % parts == 0:
    return []
  near = max(1, round(micro / parts)) * parts * accum_steps
  of = f" in {accum_steps} microbatches" * (accum_steps > 1)
  return [
    f"{key}: got {batch_size}{of}, which does not split over data*fsdp ="
    f" {parts} devices; use a multiple of {parts * accum_steps} such as {near},"
    " or set config.mesh."
  ]


def infer(tree, mesh: Mesh):
  """Returns a NamedSharding for every leaf, by `PARAM_RULES`.

  Blocks stacked for a scan have one more dimension in front, which is left
  whole. A dimension that the devices do not divide is left whole as well.

  Args:
    tree: Parameters, or a state that holds such; arrays or shapes.
    mesh: Its axes are those of `AXES`.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, mesh)), tree
  )


def replicated(mesh: Mesh) -> NamedSharding:
  """Every device holds all of it."""
  return NamedSharding(mesh, P())


def to_global(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
  """Makes one global array of the parts that the processes read.

  Args:
    batch: The rows of this process; the image stays uint8 on its way.
    mesh: Rows are split over its axes data and fsdp; every process must hold
      whole rows (see `batch_faults`).
  """
  sharding = NamedSharding(mesh, BATCH_SPEC)
  rows = len(batch["mask"]) * jax.process_count()
  return {
    key: jax.make_array_from_process_local_data(
      # jax has no int64 by default, and no data set 2**31 records.
      sharding,
      value.astype(np.int32) if key == "index" else value,
      (rows, *value.shape[1:]),
    )
    for key, value in batch.items()
  }


def path_of(path) -> str:
  """Joins a key path of jax.tree_util to "a/b/c"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _spec(path, shape: tuple[int, ...], mesh: Mesh) -> P:
  name = path_of(path)
  spec = next(
    spec for rule, spec in PARAM_RULES if re.search(rf"(^|/){rule}$", name)
  )
  if len(shape) < len(spec):  # e.g. a placeholder of the optimizer
    return P()
  axes = (None,) * (len(shape) - len(spec)) + tuple(spec)
  return P(*(_divides(a, n, mesh) for a, n in zip(axes, shape, strict=True)))


def _divides(axes, size: int, mesh: Mesh):
  names = (axes,) if isinstance(axes, str) else axes or ()
  devices = int(np.prod([mesh.shape[a] for a in names]))
  return axes if size % devices == 0 else None
