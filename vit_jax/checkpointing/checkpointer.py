"""Checkpoints of a run, written by Orbax in the background.

The folder of a step has three items: `params` (used for evaluation; can be
loaded alone into other Flax code), `train` (step, optimizer state, and the raw
parameters if `params` is their running average) and `metadata` (JSON: config,
patch grid, preprocessing, class names, versions). `train` may also have the
running mean of a teacher (`averages`), and what objective and callbacks keep
(`memory`). `digests.json` is beside them, see `layout`.
"""

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import unflatten_dict

from vit_jax import digests as digests_lib
from vit_jax.checkpointing import layout, orbax_files, retention
from vit_jax.checkpointing.layout import FOLDER, DamagedError, find
from vit_jax.checkpointing.orbax_files import StepWriter
from vit_jax.checkpointing.saving import AsyncSaver, SaveError
from vit_jax.config import CheckpointConfig, ConfigError
from vit_jax.digests import Digest
from vit_jax.options import unexpected
from vit_jax.param_groups import path_of
from vit_jax.paths import absolute, file_size, is_remote, kind, run_path
from vit_jax.step import EMA, OBJECTIVE, TrainState
from vit_jax.trainable import FROZEN, saved_params, selected

__all__ = ("FOLDER", "Checkpointer", "DamagedError", "SaveError", "find")

# Bytes that arrays may have beyond twice their files: a head of zeros
# compresses well.
ALWAYS_ALLOWED = 2**27
TREES = ("default", "state")  # a tree's folder in Orbax's two APIs
MAX_DIFFERENCES = 6  # arrays that differ, listed one by one
MAX_REMOVED = 5  # checkpoints that a run may remove while they are read
FormOf = Callable[
  [dict[str, Any]], tuple[TrainState, Callable[[TrainState], TrainState]]
]
T = TypeVar("T")


class Checkpointer:
  """Writes and reads the checkpoints of one run.

  Args:
    workdir: Folder of the run; checkpoints are in its `checkpoints/<step>/`.
    config: How often to save, and what to keep.
    total_steps: The step after which the run ends; None if it does not train.
  """

  def __init__(
    self, workdir: str, config: CheckpointConfig, total_steps: int | None = None
  ):
    self._folder = absolute(run_path(workdir) / FOLDER)
    self._saver = AsyncSaver(self._folder, config)
    self._config, self._total_steps = config, total_steps

  def steps(self) -> list[int]:
    """Returns the steps on disk that seem complete, the oldest first."""
    return sorted(layout.whole(self._folder)[0])

  def newest(self) -> int | None:
    """Returns the newest step with a complete checkpoint, or None. Collective.

    It waits for the running save.
    """
    self._saver.wait()
    return self._saver.newest or None

  def save(
    self, step: int, state: TrainState, metadata: dict[str, Any]
  ) -> None:
    """Starts a save; returns as soon as the arrays are copied.

    A failure is logged, and `due` then says when to try again.

    Args:
      step: Updates applied so far; nothing happens if its checkpoint exists.
      state: The state; may be donated afterwards.
      metadata: A dict for JSON.
    """
    self._saver.start(step, _items(state), metadata)

  def is_periodic(self, step: int) -> bool:
    """Whether a step has a checkpoint by its number: also the last one."""
    every = self._config.every_steps
    return (every > 0 and step % every == 0) or step == self._total_steps

  def due(self, step: int) -> bool:
    """Whether to save after this step, also because a save has failed.

    All processes must call it after every step; all get the same result.
    """
    retries = self.retry_due(step)
    return retries or self.is_periodic(step)

  def retry_due(self, step: int) -> bool:
    """Whether a failed save should be tried again; called as `due`."""
    return self._saver.retry_due(step)

  def is_idle(self) -> bool:
    """Whether no save is running in this process."""
    return self._saver.is_idle()

  def save_now(
    self, step: int, state: TrainState, metadata: dict[str, Any]
  ) -> None:
    """Saves, and waits until the checkpoint is complete on disk.

    It removes no old checkpoints: the next `save` or `restore_newest` does.

    Args:
      step: As for `save`.
      state: As for `save`.
      metadata: As for `save`.

    Raises:
      SaveError: It could not be written, several times.
    """
    self._saver.finish(step, lambda: _items(state), metadata)

  def restore(
    self, step: int, state: TrainState, form_of: FormOf | None = None
  ) -> TrainState:
    """Returns the exact state of a step, on the given devices.

    Parameters that are read from other files are missing in `fixed`, and so is
    the memory of a callback that the run did not have.

    Args:
      step: A step that has a checkpoint.
      state: `jax.ShapeDtypeStruct` of each array with its sharding, which may
        differ from the sharding in the run that wrote it.
      form_of: See `checkpointing.convert_state.form_of`; None if the checkpoint
        has the form of `state`.

    Raises:
      ConfigError: The checkpoint is of another model or optimizer, or cannot be
        read although it may be complete.
      DamagedError: It differs from what was written; raised in all processes.
    """
    folder, owners = self._folder / str(step), state.memory.keys()
    arrays, error, is_damaged, convert = None, None, True, None
    jax.devices()  # its errors are not the checkpoint's
    try:
      if error := layout.damage(folder):
        raise DamagedError(error)
      if form_of is not None:
        state, convert = form_of(layout.metadata(folder))
      stored = layout.read_digests(folder)
      state = _with_memory_of(state, stored["train"])
      items = _items(state)
      if error := _structure_error(folder, stored, items):
        raise ConfigError([error])
      arrays = {
        name: orbax_files.read(folder / name, like)
        for name, like in items.items()
      }
    except ConfigError:
      raise
    except Exception as e:
      error = layout.damage_of(e)
      is_damaged = error is not None
      error = error or f"{type(e).__name__}: {e}"
    outcome = retention.max_of_processes(0 if arrays else 1 + is_damaged)
    if outcome == 1:
      raise ConfigError(
        [f"{folder}: cannot be read now ({error or 'by another process'})."]
      )
    if outcome:
      raise DamagedError(error or "another process could not read it")
    sums = {k: digests_lib.of_state(v).get() for k, v in arrays.items()}
    _compare(sums, stored)
    restored = _join(arrays["params"], arrays["train"], state)
    memory = {k: v for k, v in restored.memory.items() if k in owners}
    restored = restored.replace(memory=memory)
    return convert(restored) if convert else restored

  def _check_room(self, state: TrainState) -> None:
    """Raises ConfigError if the disk has no room for one checkpoint."""
    arrays = jax.tree.leaves(_items(state))
    needed = sum(x.size * x.dtype.itemsize for x in arrays)
    free = retention.free_bytes(self._folder)
    if free is not None and free < needed:
      got = f"a disk with {free / 1e9:,.2f} GB free"
      expected = f"the {needed / 1e9:,.2f} GB of a checkpoint"
      raise ConfigError([unexpected("--workdir", got, expected)])

  def restore_newest(
    self, start: int, state: TrainState, form_of: FormOf | None = None
  ) -> tuple[int, TrainState | None, dict[str, Any]]:
    """Restores a step, or the newest complete one before it.

    Damaged steps are logged and renamed (`70.damaged`), so that they can be
    written again. Steps that the run does not keep are removed in the
    background: `save_now` of an earlier run has left them.

    Args:
      start: Step to begin with; 0 for a new run.
      state: As for `restore`.
      form_of: As for `restore`.

    Returns:
      The step, its state and its metadata; (0, None, {}) for a new run.

    Raises:
      ConfigError: As `restore`; or no step is complete, or the disk has no room
        for another checkpoint.
    """
    self._check_room(state)
    if not start:
      return 0, None, {}
    step, restored = start, None
    while restored is None:
      try:
        restored = self.restore(step, state, form_of)
      except DamagedError as e:
        layout.log_damage(self._folder / str(step), str(e))
        older = [s for s in layout.whole(self._folder)[0] if s < step]
        step = retention.max_of_processes(max(older, default=0))
        if not step:
          raise ConfigError(
            [retention.no_checkpoint(self._folder, layout.NONE_WHOLE)]
          ) from e
    retention.set_aside_after(self._folder, step)
    self._saver.resume(step)
    return step, restored, layout.metadata(self._folder / str(step))

  def close(self) -> None:
    """Waits for the running save; a failure is logged, not raised."""
    self._saver.close()


def digests(path: str) -> dict[str, dict[str, Digest]]:
  """Returns item ("params", "train") -> path -> digest, as they were written.

  It reads no arrays.

  Args:
    path: As for `find`.

  Raises:
    DamagedError: The digests differ from what was written.
    FileNotFoundError: As `find`.
  """
  return layout.read_digests(find(path))


def load_metadata(path: str) -> dict[str, Any]:
  """Returns the JSON written beside the parameters; `path` as for `find`."""
  return _read(path, layout.metadata)


def load_params(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads only the parameters, as numpy, whatever devices wrote them.

  Args:
    path: Folder of a run, of its checkpoints, or of one step. For a run, the
      newest complete step is read, also while the run writes and removes steps.

  Returns:
    Nested dict of numpy arrays; the metadata.

  Raises:
    FileNotFoundError: As `find`.
    DamagedError: The step, or every step, differs from what was written.
  """
  jax.devices()  # its errors are not the checkpoint's
  return _read(path, lambda f: (_checked(f / "params"), layout.metadata(f)))


def load_tree(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads parameters as `load_params` does, also if another program wrote them.

  Args:
    path: As for `load_params`; or the folder of a tree of arrays, directly or
      in a sub-folder of `TREES`; or the item `params` of a step, which is read
      with the metadata beside it.

  Returns:
    Nested dict of numpy arrays; the metadata, {} if vit_jax did not write it.

  Raises:
    FileNotFoundError: There is no checkpoint.
    ValueError: Orbax cannot read it, or it is damaged; or it has several items
      of another program, which the error names.
  """
  jax.devices()  # its errors are not the checkpoint's
  base = run_path(path)
  if base.name == "params" and (base.parent / "metadata").is_dir():
    base, path = base.parent, os.fspath(base.parent)
  trees = [base, *(base / name for name in TREES)]
  trees = [folder for folder in trees if (folder / "_METADATA").exists()]

  def read(folder: epath.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    is_ours = (folder / "metadata").is_dir()
    metadata = layout.metadata(folder) if is_ours else {}
    return _checked(folder / "params"), metadata

  if not trees:
    steps = layout.step_folders(base) or layout.step_folders(base / FOLDER)
    step = next(iter(steps.values()), base)
    own = (base / "params", step / "metadata", step / layout.DIGESTS)
    others = [p.parent for p in sorted(step.glob("*/_METADATA"))]
    if others and not any(map(kind, own)):
      raise ValueError(
        f"got {path!r}, expected one tree in it, such as {str(others[0])!r}."
      )
    return _read(path, read)
  try:
    return _checked(absolute(trees[0])), {}
  except Exception as e:
    raise DamagedError(
      f"{trees[0]} cannot be read: {layout.damage_of(e) or e}."
    ) from None


def _read(path: str, read: Callable[[epath.Path], T]) -> T:
  """Reads a step; for a run, the newest step that can be read."""
  damaged: set[str] = set()
  num_removed = 0
  while True:
    folder = find(path, damaged)
    try:
      return read(folder)
    except Exception as e:
      is_given = folder == absolute(run_path(path))
      if not is_given and not folder.is_dir() and num_removed < MAX_REMOVED:
        num_removed += 1  # by a training run, which has newer ones
        continue
      if (error := layout.damage_of(e)) is None:
        raise
      if is_given:
        raise DamagedError(f"{folder} is damaged: {error}.") from e
      layout.log_damage(folder, error)
      damaged.add(folder.name)


def verify(folder: epath.Path) -> str | None:
  """Reads everything in a step's folder, and compares all digests.

  Args:
    folder: Folder of one step.

  Returns:
    The damage, or None.

  Raises:
    OSError: It cannot be read, for a reason other than its files.
  """
  jax.devices()  # its errors are not the checkpoint's
  if error := layout.damage(folder):
    return error
  for item in layout.ITEMS:
    # `convert` writes parameters alone.
    if item == "params" or (folder / item).is_dir():
      try:
        _checked(folder / item)
      except Exception as e:
        if (error := layout.damage_of(e)) is None:
          raise
        return error if error.startswith(f"{item}/") else f"{item}: {error}"
  return None


def write_params(
  path: str, params: dict[str, Any], metadata: dict[str, Any]
) -> None:
  """Writes a folder that `load_params` reads, as one step of a run.

  Args:
    path: A folder that does not exist yet.
    params: Nested dict of arrays.
    metadata: A dict for JSON.

  Raises:
    FileExistsError: The path exists.
  """
  folder = absolute(run_path(path))
  if folder.exists():
    raise FileExistsError(f"got {path!r}, expected a new folder.")
  writer = StepWriter(folder)
  writer.start({"params": jax.tree.map(jnp.asarray, params)}, metadata)
  writer.wait()


def _checked(folder: epath.Path) -> dict[str, Any]:
  """Reads an item as numpy, and compares its digests if it has some."""
  if not is_remote(folder):
    _check_size(folder, orbax_files.shapes(folder))
  arrays = orbax_files.read_as_numpy(folder)
  step, item = folder.parent, folder.name
  if kind(step / layout.DIGESTS):
    stored = layout.read_digests(step)
    if item in stored:
      _compare({item: digests_lib.of_numpy(arrays)}, {item: stored[item]})
  return arrays


def _check_size(folder: epath.Path, shapes: Any) -> None:
  """Raises ValueError if arrays would need far more memory than their files.

  TensorStore fills missing files with zeros, for any shape.
  """
  stated = sum(
    math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
    for leaf in jax.tree.leaves(shapes)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
  )
  stored = sum(map(file_size, layout.files_in(folder)))
  if stated > 2 * stored + ALWAYS_ALLOWED:
    raise ValueError(
      f"{folder}: got {stored:,} bytes for arrays of {stated:,} bytes"
    )


def _compare(
  got: dict[str, dict[str, Digest]], stored: dict[str, dict[str, Digest]]
) -> None:
  """Raises DamagedError unless all digests agree."""
  if differing := [
    f"{item}/{text}"
    for item, want in stored.items()
    for text in digests_lib.differences(got[item], want)
  ]:
    raise DamagedError(_listed(differing, 1))


def _structure_error(
  folder: epath.Path,
  stored: dict[str, dict[str, Digest]],
  items: dict[str, Any],
) -> str:
  """Returns how the arrays of a config differ from those in a checkpoint.

  Such a difference means another model or optimizer, not a damaged checkpoint.

  Args:
    folder: Folder of the step.
    stored: "params" and "train" -> path -> digest, as written.
    items: "params" and "train" -> tree of `jax.ShapeDtypeStruct`, of the
      config.

  Returns:
    One text, or "".
  """
  for item, options, most in (
    ("params", "config.model", MAX_DIFFERENCES),
    ("train", "config.optim (name, ema_decay, accumulator_dtype)", 1),
  ):
    want = {
      path_of(path): Digest(np.dtype(x.dtype).name, x.shape, "")
      for path, x in jax.tree_util.tree_leaves_with_path(items[item])
    }
    got = {path: x._replace(sums="") for path, x in stored[item].items()}
    if differences := digests_lib.differences(got, want):
      return (
        f"{folder / item} does not fit {options}: {_listed(differences, most)};"
        " resume with the config that wrote it"
        f" ({folder.parent.parent}/config.json), or choose another --workdir."
      )
  return ""


def _listed(texts: list[str], most: int) -> str:
  """Joins the first texts, and counts the others."""
  more = len(texts) - most
  return "; ".join(texts[:most]) + f"; and {more} more" * (more > 0)


def _items(state: TrainState) -> dict[str, Any]:
  """Returns a state as items of a checkpoint.

  It has no parameters that are read from other files: see `TrainState.fixed`.
  """
  params, averages = saved_params(state.params, state.fixed), state.averages
  train = {"step": state.step, "opt_state": state.opt_state}
  if EMA in averages:
    train["raw_params"] = params
    params = saved_params(averages[EMA], state.fixed)
  others = {k: v for k, v in averages.items() if k != EMA}
  for name, tree in (("averages", others), ("memory", state.memory)):
    if tree:
      train[name] = tree
  return {"params": params, "train": train}


def _join(
  params: dict[str, Any], train: dict[str, Any], like: TrainState
) -> TrainState:
  """Returns the state of these items; the inverse of `_items`."""
  saved, averages = train.get("raw_params", params), {}
  if EMA in like.averages:
    averages[EMA] = selected(params, like.params)
  fixed = {k: selected(saved, v) for k, v in like.fixed.items() if k == FROZEN}
  return TrainState(
    step=train["step"],
    params=selected(saved, like.params),
    opt_state=train["opt_state"],
    fixed=fixed,
    averages=averages | train.get("averages", {}),
    memory=train.get("memory", {}),
  )


def _with_memory_of(state: TrainState, stored: dict[str, Digest]) -> TrainState:
  """Returns an abstract state with the memory that a checkpoint has.

  A new callback has no memory yet. The memory of a callback that the run no
  longer has is read, because Orbax reads whole items, and then left out.

  Args:
    state: The state of the run.
    stored: Path -> digest of the item `train`.
  """
  known = state.memory.keys()
  written: dict[str, Any] = {}
  for path, array in stored.items():
    top, *names = path.split("/")
    if top == "memory" and names[0] not in known:
      sharding = jax.tree.leaves(state.step)[0].sharding
      like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
      written["/".join(names)] = like
  memory = {
    name: tree
    for name, tree in state.memory.items()
    if name == OBJECTIVE
    or any(path.startswith(f"memory/{name}/") for path in stored)
    or f"memory/{name}" in stored
  }
  return state.replace(memory=memory | unflatten_dict(written, sep="/"))
