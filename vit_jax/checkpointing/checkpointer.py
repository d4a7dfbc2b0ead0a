"""Checkpoints of a run, written by Orbax in the background.

Each step's folder holds three items: `params` (what evaluation uses; loads
alone into other Flax code), `train` (step, optimizer, and the raw parameters
where `params` is their running average) and `metadata` (JSON: config, patch
grid, preprocessing, class names, versions); and `digests.json`, see
`layout`. Orbax is used here and in `saving` alone.
"""

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vit_jax import digests as digests_lib
from vit_jax.checkpointing import layout, retention, structure
from vit_jax.checkpointing.layout import FOLDER, DamagedError, find
from vit_jax.checkpointing.saving import AsyncSaver, SaveError, StepWriter
from vit_jax.config import CheckpointConfig, ConfigError
from vit_jax.digests import Digest
from vit_jax.paths import absolute, file_size, kind

__all__ = ("FOLDER", "Checkpointer", "DamagedError", "SaveError", "find")

# Bytes of arrays beyond twice their files: a head of zeros compresses well.
ALWAYS_ALLOWED = 2**27
MAX_LOST = 5  # checkpoints removed by a training run while they are read
T = TypeVar("T")


class Checkpointer:
  """Writes and reads the checkpoints of one run.

  Args:
    workdir: Folder of the run; checkpoints go to its `checkpoints/<step>/`.
    config: How often to write, and what to keep.
  """

  def __init__(self, workdir: str, config: CheckpointConfig):
    self._folder = absolute(epath.Path(workdir) / FOLDER)
    self._saver = AsyncSaver(self._folder, config)

  def steps(self) -> list[int]:
    """Returns the steps on disk that seem whole, the oldest first."""
    return sorted(layout.whole(self._folder)[0])

  def newest(self) -> int | None:
    """Returns the newest step whose checkpoint is whole; None: there is none.

    Waits for the save that runs. All processes must call it, and get the same.
    """
    self._saver.wait()
    return self._saver.newest or None

  def save(self, step: int, state, metadata: dict[str, Any]) -> None:
    """Starts to write; returns as soon as the arrays are copied.

    What fails is told on stderr, and tried again when `retry_due` says so.

    Args:
      step: Updates applied so far; nothing happens if its checkpoint exists.
      state: A `step.TrainState`; may be donated afterwards.
      metadata: A dict for JSON.
    """
    self._saver.start(step, _items(state), metadata)

  def retry_due(self, step: int) -> bool:
    """Whether a save has failed and should be tried again after this step.

    All processes must call it after every step, and get the same answer.
    """
    return self._saver.retry_due(step)

  def is_idle(self) -> bool:
    """Whether no save is running in this process."""
    return self._saver.is_idle()

  def save_now(self, step: int, state, metadata: dict[str, Any]) -> None:
    """Writes, and waits until the checkpoint is whole on disk.

    Args:
      step: As for `save`.
      state: As for `save`.
      metadata: As for `save`.

    Raises:
      SaveError: It could not be written, several times.
    """
    self._saver.finish(step, lambda: _items(state), metadata)

  def restore(self, step: int, state, form_of: Callable | None = None):
    """Returns the state of a step, exactly, on the devices given.

    Args:
      step: A step that has a checkpoint.
      state: `jax.ShapeDtypeStruct` of each array with its sharding, which may
        differ from that of the run that wrote it.
      form_of: See `checkpointing.convert_state.form_of`; None: it is like
      `state`.

    Raises:
      ConfigError: The checkpoint is of another model or optimizer, or cannot be
        read for a reason that is not its own.
      DamagedError: It is not what was written; the same in all processes.
    """
    folder = self._folder / str(step)
    found, why, is_damage, convert = None, None, True, None
    try:
      if why := layout.damage(folder):
        raise DamagedError(why)
      if form_of is not None:
        state, convert = form_of(layout.metadata(folder))
      items = _items(state)
      kept = layout.read_digests(folder)
      if errors := structure.errors(folder, kept, items):
        raise ConfigError(errors)
      found = {
        name: ocp.StandardCheckpointHandler().restore(
          folder / name, args=ocp.args.StandardRestore(like)
        )
        for name, like in items.items()
      }
    except ConfigError:
      raise
    except Exception as e:
      why = layout.reason(e)
      is_damage = why is not None
      why = why or f"{type(e).__name__}: {e}"
    outcome = retention.agreed(0 if found else 1 + is_damage)
    if outcome == 1:
      raise ConfigError(
        [
          f"{folder}: cannot be read now"
          f" ({why or 'by another process'}); see to it, and start the same"
          " command again."
        ]
      )
    if outcome:
      raise DamagedError(why or "another process could not read it")
    _compare({k: digests_lib.of_state(v).get() for k, v in found.items()}, kept)
    restored = _join(found["params"], found["train"], state)
    return convert(restored) if convert else restored

  def _check_room(self, state) -> None:
    """Raises ConfigError if the disk has no room for one checkpoint."""
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    free = retention.free_bytes(self._folder)
    if free is not None and free < needed:
      raise ConfigError(
        [
          f"--workdir: got a disk with {free / 1e9:,.2f} GB free, expected the"
          f" {needed / 1e9:,.2f} GB of a checkpoint; make room, or take"
          " a folder on another disk."
        ]
      )

  def restore_newest(
    self, start: int, state, form_of: Callable | None = None
  ) -> tuple[int, Any]:
    """Restores a step, or the newest one before it that is whole.

    Damaged newer ones are named, and renamed (`70.damaged`), so that they can
    be written again. Nothing is removed.

    Args:
      start: Step to begin with; 0: a new run.
      state: As for `restore`.
      form_of: As for `restore`.

    Returns:
      The step and its state; (0, None) for a new run.

    Raises:
      ConfigError: As `restore`; or none is whole, or the disk has no room for
        another one.
    """
    self._check_room(state)
    if not start:
      return 0, None
    step, restored = start, None
    while restored is None:
      try:
        restored = self.restore(step, state, form_of)
      except DamagedError as e:
        layout.tell(self._folder / str(step), str(e))
        older = [s for s in layout.whole(self._folder)[0] if s < step]
        step = retention.agreed(max(older, default=0))
        if not step:
          raise ConfigError(
            [retention.gone(self._folder, layout.NONE_WHOLE)]
          ) from e
    retention.go_on_from(self._folder, step)
    self._saver.newest = step
    return step, restored

  def close(self) -> None:
    """Waits for what is being written; a failure is told, not raised."""
    self._saver.close()


def digests(path: str) -> dict[str, dict[str, Digest]]:
  """Returns item ("params", "train") -> path -> digest, as they were written.

  Reads no arrays.

  Args:
    path: As for `find`.

  Raises:
    DamagedError: They are not what was written.
    FileNotFoundError: As `find`.
  """
  return layout.read_digests(find(path))


def load_metadata(path: str) -> dict[str, Any]:
  """Returns the JSON written beside the parameters; `path` as for `find`."""
  return _read(path, layout.metadata)


def load_params(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads only the parameters, as numpy, whatever devices wrote them.

  Args:
    path: Folder of a run, of its checkpoints, or of one step. Of a run it is
      the newest that is whole, also while the run writes and removes them.

  Returns:
    Nested dict of numpy arrays, and the metadata.

  Raises:
    FileNotFoundError: As `find`.
    DamagedError: The step, or all of them, are not what was written.
  """
  return _read(path, lambda f: (_checked(f / "params"), layout.metadata(f)))


def load_tree(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads parameters as `load_params` does, also those of other programs.

  Args:
    path: As for `load_params`; or the folder of a tree of arrays, directly or
      in a sub-folder `default`; or the item `params` of a step, which is read
      with the metadata beside it.

  Returns:
    Nested dict of numpy arrays; and the metadata, {} if it is not ours.

  Raises:
    FileNotFoundError: There is no checkpoint.
    ValueError: Orbax cannot read it, or it is damaged.
  """
  base = epath.Path(path)
  if base.name == "params" and (base.parent / "metadata").is_dir():
    base, path = base.parent, os.fspath(base.parent)  # what it is the item of
  trees = [f for f in (base, base / "default") if (f / "_METADATA").exists()]

  def read(folder: epath.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    is_ours = (folder / "metadata").is_dir()
    metadata = layout.metadata(folder) if is_ours else {}
    return _checked(folder / "params"), metadata

  if not trees:
    return _read(path, read)
  try:
    return _checked(absolute(trees[0])), {}
  except Exception as e:
    if layout.OF_THE_DEVICE in str(e):
      raise
    raise DamagedError(
      f"got {str(trees[0])!r}, which Orbax cannot read"
      f" ({layout.reason(e) or e}); copy it again."
    ) from None


def _read(path: str, read: Callable[[epath.Path], T]) -> T:
  """Reads a step; where a run is given, the newest that can be read."""
  damaged: set[str] = set()
  lost = 0
  while True:
    folder = find(path, damaged)
    try:
      return read(folder)
    except Exception as e:
      is_given = folder == absolute(epath.Path(path))
      if not is_given and not folder.is_dir() and lost < MAX_LOST:
        lost += 1  # a training run has removed it meanwhile, and has newer ones
        continue
      if (why := layout.reason(e)) is None:
        raise
      if is_given:
        raise DamagedError(f"{folder} is damaged: {why}; copy it again.") from e
      layout.tell(folder, why)
      damaged.add(folder.name)


def verify(folder: epath.Path) -> str | None:
  """Reads all of a step's folder, and compares all digests.

  Args:
    folder: Of one step.

  Returns:
    What is wrong with it, in words; None: nothing is.

  Raises:
    OSError: It cannot be read, for a reason that is none of its files'.
  """
  if why := layout.damage(folder):
    return why
  for item in layout.ITEMS:
    # `convert` writes parameters alone.
    if item == "params" or (folder / item).is_dir():
      try:
        _checked(folder / item)
      except Exception as e:
        if (why := layout.reason(e)) is None:
          raise
        return why if why.startswith(f"{item}/") else f"{item}: {why}"
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
  folder = absolute(epath.Path(path))
  if folder.exists():
    raise FileExistsError(f"got {path!r}, which exists; expected a new folder.")
  writer = StepWriter(folder)
  writer.start({"params": jax.tree.map(jnp.asarray, params)}, metadata)
  writer.wait()


def _checked(folder: epath.Path) -> dict[str, Any]:
  """Reads an item as numpy, and compares its digests where it has some."""
  handler = ocp.PyTreeCheckpointHandler()
  described = _described(folder)
  _check_size(folder, described)
  as_numpy = jax.tree.map(
    lambda _: ocp.RestoreArgs(restore_type=np.ndarray), described
  )
  found = handler.restore(
    folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy)
  )
  step = folder.parent
  if kind(step / layout.DIGESTS):
    kept = layout.read_digests(step)
    if folder.name in kept:
      item = folder.name
      _compare({item: digests_lib.of_numpy(found)}, {item: kept[item]})
  return found


def _described(folder: epath.Path) -> Any:
  """Returns shapes and types of an item, without reading its arrays."""
  return ocp.PyTreeCheckpointHandler().metadata(folder).tree


def _check_size(folder: epath.Path, described: Any) -> None:
  """Raises ValueError if arrays would take far more memory than their files.

  TensorStore fills what no file holds with zeros, whatever shape is stated.
  """
  stated = sum(
    math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
    for leaf in jax.tree.leaves(described)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
  )
  stored = sum(map(file_size, layout.files_in(folder)))
  if stated > 2 * stored + ALWAYS_ALLOWED:
    raise ValueError(
      f"{folder}: got {stored:,} bytes for arrays of {stated:,}, expected at"
      " least half as many: weights hardly compress. Copy the folder again."
    )


def _compare(
  got: dict[str, dict[str, Digest]], kept: dict[str, dict[str, Digest]]
) -> None:
  """Raises DamagedError unless all digests agree."""
  if differing := [
    f"{item}/{text}"
    for item, want in kept.items()
    for text in digests_lib.differences(got[item], want)
  ]:
    raise DamagedError(structure.listed(differing, 1))


def _items(state) -> dict[str, Any]:
  """Returns the items of a `step.TrainState`."""
  train = {"step": state.step, "opt_state": state.opt_state}
  if state.ema is None:
    return {"params": state.params, "train": train}
  return {"params": state.ema, "train": {**train, "raw_params": state.params}}


def _join(params, train: dict[str, Any], like):
  if like.ema is None:
    raw, ema = params, None
  else:
    raw, ema = train["raw_params"], params
  return like.replace(
    step=train["step"], params=raw, opt_state=train["opt_state"], ema=ema
  )
