"""The mesh of devices, and the sharding rules for parameters.

Batches are split over `data` and `fsdp`. Parameters and their optimizer state
are split over `fsdp` and `tensor`. If TPU slices are joined by the data
centre's network, each slice has a whole copy of the state: only `data` spans
several slices.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.batch import Batch
from vit_jax.config import Config, MeshConfig
from vit_jax.devices import (
  SPLIT_BY_HEADS,
  generation,
)
from vit_jax.families import ModelConfig
from vit_jax.microbatch import fast_microbatch, microbatches_of, rows_of
from vit_jax.param_groups import path_of

Device = Any  # a jax.Device, or a description with its attributes
Rules = tuple[tuple[str, tuple], ...]

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
BATCH_SPEC = P(BATCH_AXES)

# One side of a v5e or v6e pod: the state is then small, and the parts are large
# enough for a TPU to scatter what it reduces
# (benchmarks/notes/performance_log.md).
MAX_FSDP = 16

# Rules of every family, for the ends of paths.
# Means of adafactor's second moments over rows and columns: small, and with
# fewer dimensions than their parameters.
_MEANS = (r"v_(row|col)/.*", ())
# Factors of adapters, with the inputs or the outputs of their kernels.
_FACTORS = ((r"lora_a", ("fsdp", None)), (r"lora_b", (None, "fsdp")))


def param_rules(
  model: ModelConfig, is_by_heads: bool = False, own: Rules = ()
) -> tuple[tuple[str, tuple], ...]:
  """Returns the sharding rules of a model: the first that matches counts.

  They match the ends of paths, such as "block_0/mlp/fc1/kernel", so that the
  optimizer's moments are split like their parameters.

  Args:
    model: The model, with the rules of its family.
    is_by_heads: Whether the chip is one of `SPLIT_BY_HEADS`.
    own: Rules of the objective, which come first.
  """
  first = model.BY_HEADS if is_by_heads else ()
  return (*first, _MEANS, *own, *model.SHARDING, *_FACTORS, (r".*", ()))


def slices(devices: list[Device] | None = None) -> list[list[Device]]:
  """Returns the devices of each TPU slice; a single list without slices.

  Args:
    devices: None for all devices of all processes.
  """
  by_slice: dict[int, list[Device]] = {}
  for device in jax.devices() if devices is None else devices:
    by_slice.setdefault(slice_of(device), []).append(device)
  return list(by_slice.values())


def slice_of(device: Device) -> int:
  """Returns the number of a TPU's slice; 0 for other devices."""
  # On GPUs jax numbers the hosts by this attribute.
  is_tpu = device.platform == "tpu"
  return getattr(device, "slice_index", 0) if is_tpu else 0


def _num_nodes(devices: list[Device] | None) -> int:
  """Returns the number of GPU nodes, each with fast links inside."""
  devices = jax.devices() if devices is None else devices
  gpus = [device for device in devices if device.platform == "gpu"]
  return len({getattr(gpu, "slice_index", 0) for gpu in gpus}) or 1


def mesh_shape(
  mesh: MeshConfig, num_devices: int, num_slices: int = 1, num_nodes: int = 1
) -> dict[str, int]:
  """Returns the devices along each axis, -1 resolved.

  If only one axis is -1, it gets all remaining devices. If data and fsdp are
  both -1, fsdp gets the largest divisor, up to `MAX_FSDP`, of the remaining
  devices of a slice or GPU node, and data gets the rest.

  Args:
    mesh: Devices along each axis.
    num_devices: Devices of all slices.
    num_slices: Slices of equal size; only the axis data may span several.
    num_nodes: Nodes of equal size; any axis may span several.

  Raises:
    ValueError: The product of the axes is not the number of devices, or an axis
      other than data would span several slices.
  """
  shape = {axis: getattr(mesh, axis) for axis in AXES}
  fixed = math.prod(n for n in shape.values() if n != -1)
  if num_devices % fixed == 0:
    rest = num_devices // fixed
    if shape["data"] == shape["fsdp"] == -1:
      # A number that is not divisible is an error below.
      parts = math.lcm(num_slices, num_nodes)
      near = rest // parts if rest % parts == 0 else rest
      shape["fsdp"] = max(n for n in range(1, MAX_FSDP + 1) if near % n == 0)
      rest //= shape["fsdp"]
    shape = {axis: rest if n == -1 else n for axis, n in shape.items()}
    fixed = math.prod(shape.values())
  if fixed != num_devices:
    raise ValueError(
      f"config.mesh: got {shape}, which does not fit {num_devices} device(s);"
      f" the axes must multiply to {num_devices} (-1 stands for the rest)."
    )
  if shape["data"] % num_slices:
    raise ValueError(
      f"config.mesh: got {shape} on {num_slices} TPU slices; data must be a"
      f" multiple of {num_slices}, because fsdp and tensor stay within a slice"
      f" of {num_devices // num_slices} devices."
    )
  return shape


def shape_here(mesh: MeshConfig) -> dict[str, int]:
  """Returns `mesh_shape` on all devices of all processes."""
  counts = jax.device_count(), len(slices()), _num_nodes(None)
  return mesh_shape(mesh, *counts)


def make_mesh(mesh: MeshConfig, devices: list[Device] | None = None) -> Mesh:
  """Returns the mesh of data, fsdp and tensor; only data spans slices.

  Args:
    mesh: Devices along each axis.
    devices: None for all devices of all processes.

  Raises:
    ValueError: As `mesh_shape`.
  """
  of_slices = slices(devices)
  number = len(of_slices)
  num_devices = sum(map(len, of_slices))
  shape = mesh_shape(mesh, num_devices, number, _num_nodes(devices))
  data, *others = shape.values()
  sizes = (data // number, *others)
  within = [_laid_out(sizes, slice_) for slice_ in of_slices]
  types = (AxisType.Auto,) * len(AXES)
  return Mesh(np.concatenate(within), AXES, axis_types=types)


def _laid_out(sizes: tuple[int, ...], devices: list[Device]) -> np.ndarray:
  """Returns the devices of a slice in the order of a mesh."""
  # jax chooses the order by the links between the chips. An axis may be a part
  # of a side of the slice, such as fsdp=16 of v6e:8x8; jax.make_mesh allows
  # that on v5e only.
  grid = mesh_utils.create_device_mesh(
    sizes, devices, allow_split_physical_axes=True
  )
  process = np.vectorize(lambda device: device.process_index)
  if (process(grid) == process(grid[..., :1])).all():
    return grid
  # Along a side of the slice, tensor would join chips of several hosts, which
  # would need the same rows (`row_errors`). The chips of a host are a square.
  devices = sorted(devices, key=lambda device: device.process_index)
  return np.array(devices, object).reshape(sizes)


def mesh_errors(
  config: Config, devices: list[Device] | None = None
) -> list[str]:
  """Returns errors of mesh and devices, and of batch sizes and mesh.

  It returns none if the axes themselves are wrong; `config.checks` reports
  these.

  Args:
    config: The run.
    devices: None for all devices of all processes.
  """
  axes = [getattr(config.mesh, axis) for axis in AXES]
  are_two_open = axes.count(-1) > 1 and config.mesh.tensor == -1
  if are_two_open or any(n < 1 and n != -1 for n in axes):
    return []
  of_slices = slices(devices)
  number = sum(map(len, of_slices))
  try:
    counts = number, len(of_slices), _num_nodes(devices)
    shape = mesh_shape(config.mesh, *counts)
  except ValueError as e:
    return [str(e)]
  batches = {"config.data.batch_size": config.data.batch_size}
  for e in config.evals:
    if e.batch_size is not None:
      batches[f"config.evals.{e.name}.batch_size"] = e.batch_size
  errors = []
  for key, size in batches.items():
    if size > 0:
      errors += batch_errors(key, size, shape)
  return errors


def row_errors(mesh: Mesh) -> list[str]:
  """Returns an error if two processes have the same rows of a batch.

  A process reads the rows of its own devices. With tensor > 1, several devices
  have the same rows; these devices must belong to one process.
  """
  rows: dict[int, set] = {}
  for (data, fsdp, _), device in np.ndenumerate(mesh.devices):
    rows.setdefault(device.process_index, set()).add((data, fsdp))
  shape = dict(mesh.shape)
  if sum(map(len, rows.values())) == shape["data"] * shape["fsdp"]:
    return []
  return [
    f"config.mesh: got {shape} on {len(rows)} processes, some of which would"
    " have the same rows of a batch; each must have its own rows. Use a smaller"
    " config.mesh.tensor, or 1."
  ]


def batch_errors(key: str, batch_size: int, shape: dict[str, int]) -> list[str]:
  """Returns an error unless every device gets the same number of rows."""
  parts = shape["data"] * shape["fsdp"]
  if batch_size % parts == 0:
    return []
  near = max(1, round(batch_size / parts)) * parts
  return [
    f"{key}: got {batch_size}, which does not split over data*fsdp ="
    f" {parts} devices; use a multiple of {parts} such as {near},"
    " or set config.mesh."
  ]


def infer(tree, mesh: Mesh | AbstractMesh, model: ModelConfig, own: Rules = ()):
  """Returns a NamedSharding for every leaf, by its path and the kind of chip.

  The rules are `param_rules`.

  Blocks stacked for a scan have one more dimension in front, which is not
  split. If fsdp does not divide the dimension that a rule names, it splits the
  largest dimension that it divides. If tensor does not divide it, tensor splits
  none (see `left_whole`).

  Args:
    tree: Parameters, or a state that has them; arrays or shapes.
    mesh: A mesh with the axes `AXES`.
    model: The model of the parameters.
    own: Rules of the objective, see `Objective.SHARDING`.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: NamedSharding(
      mesh, _spec(path_of(path), leaf.shape, mesh, model, own)
    ),
    tree,
  )


def left_whole(
  tree, mesh: Mesh | AbstractMesh, model: ModelConfig, own: Rules = ()
) -> tuple[float, dict[str, list[str]]]:
  """Returns what the mesh does not split.

  Returns:
    The share of the bytes that every device along fsdp has whole, 0 to 1; axis
    -> paths of the leaves that a rule would split along it but whose size it
    does not divide.
  """
  whole, total = 0, 0
  indivisible: dict[str, list[str]] = {"fsdp": [], "tensor": []}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = path_of(path)
    size = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
    got = _names(_spec(name, leaf.shape, mesh, model, own))
    total += size
    whole += size * ("fsdp" not in got)
    for axis in _names(_rule(name, len(leaf.shape), mesh, model, own)):
      if axis not in got and mesh.shape[axis] > 1:
        indivisible[axis].append(name)
  return whole / max(total, 1), {k: v for k, v in indivisible.items() if v}


def describe(config: Config, params, mesh: Mesh) -> str:
  """Returns a text on microbatches, and on arrays that are not split."""
  number = microbatches_of(config, mesh)
  text = f"{number} microbatch{'es' * (number > 1)} a step"
  rows = rows_of(config, mesh)
  few, fast = rows // number, fast_microbatch(config, mesh)
  if fast and 2 * few < min(rows, fast):
    text += (
      f" of {few} image{'s' * (few > 1)}, which is slow: the {rows} of a device"
      f" have no divisor nearer to {fast} and within config.optim.microbatch ="
      f" {config.optim.microbatch}; choose another config.data.batch_size"
    )
  share, indivisible = left_whole(
    params, mesh, config.model, config.objective.SHARDING
  )
  if mesh.shape["fsdp"] > 1:
    text += f"; every device holds {100 * share:.2f} % of the parameters whole"
  for axis, names in indivisible.items():
    text += (
      f"; {axis}={mesh.shape[axis]} does not divide {len(names)} leaves such as"
      f" {names[0]}, which are not split"
    )
  return text


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding in which every device has all of an array."""
  return NamedSharding(mesh, P())


def to_global(batch: Batch, mesh: Mesh) -> dict[str, jax.Array]:
  """Makes a global array of the rows that each process has read.

  Args:
    batch: The rows of this process; images are transferred as uint8.
    mesh: Rows are split over its axes data and fsdp. Every process must have
      whole rows (see `row_errors`).
  """
  sharding = NamedSharding(mesh, BATCH_SPEC)
  rows = len(batch["mask"]) * jax.process_count()
  # With several processes jax takes this transfer for an implicit one.
  with jax.transfer_guard_host_to_device("allow"):
    return {
      key: jax.make_array_from_process_local_data(
        # jax has no int64 by default, and no data set has 2**31 records.
        sharding,
        value.astype(np.int32) if key == "index" else value,
        (rows, *value.shape[1:]),
      )
      for key, value in batch.items()
    }


def abstract_batch(
  num_rows: int,
  images: Mapping[str, tuple[int, ...]],
  label: tuple[int, ...],
  mesh: Mesh,
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of what `to_global` returns, without arrays.

  Args:
    num_rows: Rows of all devices.
    images: Shape of what each view has of a record, such as {"image": (224,
      224, 3)}.
    label: Shape of a label: () for a class, (classes,) for a vector.
    mesh: The mesh.
  """
  rows = NamedSharding(mesh, BATCH_SPEC)
  return {
    key: jax.ShapeDtypeStruct((num_rows, *shape), dtype, sharding=rows)
    for key, shape, dtype in (
      *((name, shape, np.uint8) for name, shape in images.items()),
      ("label", label, np.float32 if label else np.int32),
      ("mask", (), np.bool_),
      ("index", (), np.int32),
    )
  }


def _rule(
  name: str,
  num_dims: int,
  mesh: Mesh | AbstractMesh,
  model: ModelConfig,
  own: Rules,
) -> P:
  device = mesh.abstract_mesh.abstract_device
  kind = device and generation(device.device_kind)
  rules = param_rules(model, kind in SPLIT_BY_HEADS, own)
  spec = next(spec for rule, spec in rules if re.search(rf"(^|/){rule}$", name))
  if num_dims < len(spec):  # e.g. a placeholder of the optimizer
    return P()
  return P(*(None,) * (num_dims - len(spec)), *spec)


def _spec(
  name: str,
  shape: tuple[int, ...],
  mesh: Mesh | AbstractMesh,
  model: ModelConfig,
  own: Rules,
) -> P:
  rule = _rule(name, len(shape), mesh, model, own)
  axes = [
    _dividing(axes, size, mesh)
    for axes, size in zip(rule, shape[: len(rule)], strict=True)
  ]
  if "fsdp" in _names(rule) - _names(axes) and mesh.shape["fsdp"] > 1:
    free = [
      i
      for i, size in enumerate(shape)
      if (i > 0 or not model.is_scanned(name))
      and axes[i] is None
      and size % mesh.shape["fsdp"] == 0
    ]
    if free:
      axes[max(free, key=lambda i: shape[i])] = "fsdp"
  return P(*axes)


def _dividing(axes, size: int, mesh: Mesh | AbstractMesh):
  """Returns the axes that divide a dimension, from the left.

  On one dimension, fsdp comes before tensor, so that gathering along fsdp
  leaves the parts of tensor.
  """
  names = (axes,) if isinstance(axes, str) else axes or ()
  axes = ()
  for name in names:
    if (
      mesh.shape[name] > 1
      and not (axes and name == "fsdp")
      and size % math.prod(mesh.shape[a] for a in (*axes, name)) == 0
    ):
      axes += (name,)
  return axes[0] if len(axes) == 1 else axes or None


def _names(spec) -> set[str]:
  """Returns the axes that a spec names."""
  return {
    name
    for axes in spec
    for name in ((axes,) if isinstance(axes, str) else axes or ())
  }


def shardings_of(tree):
  """Returns the sharding of every leaf of an abstract tree."""
  return jax.tree.map(lambda x: x.sharding, tree)
