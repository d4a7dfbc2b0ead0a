"""Checkpoints of a run, written by Orbax in the background.

Each step's folder holds three items: `params` (what evaluation uses; loads
alone into other Flax code), `train` (step, optimizer, and the raw parameters
where `params` is their running average) and `metadata` (JSON: config, patch
grid, preprocessing, class names, versions). All use of Orbax is here.
"""

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.config import CheckpointConfig, ConfigError
from vit_jax.sharding import path_of

FOLDER = "checkpoints"
MAX_DIFFERENCES = 6  # listed one by one


class Checkpointer:
  """Writes and reads the checkpoints of one run.

  Args:
    workdir: Folder of the run; checkpoints go to its `checkpoints/<step>/`.
    config: How often to write, and what to keep.
  """

  def __init__(self, workdir: str, config: CheckpointConfig):
    self._manager = ocp.CheckpointManager(
      (epath.Path(workdir) / FOLDER).resolve(),
      item_names=("params", "train", "metadata"),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=config.keep_last,
        keep_period=config.keep_every_steps,
        enable_async_checkpointing=True,
      ),
    )

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint, None if none."""
    return self._manager.latest_step()

  def save(self, step: int, state, metadata: dict[str, Any]) -> None:
    """Starts to write; returns as soon as the arrays are copied.

    Args:
      step: Updates applied so far; nothing happens if its checkpoint exists.
      state: A `step.TrainState`.
      metadata: A dict for JSON.
    """
    if step == self.latest_step():
      return
    params, train = _split(state)
    self._manager.save(
      step,
      args=ocp.args.Composite(
        params=ocp.args.StandardSave(params),
        train=ocp.args.StandardSave(train),
        metadata=ocp.args.JsonSave(metadata),
      ),
    )

  def restore(self, step: int, state):
    """Returns the state of a step, exactly, on the devices given.

    Args:
      step: A step that has a checkpoint.
      state: `jax.ShapeDtypeStruct` of each array with its sharding, which may
        differ from that of the run that wrote it.

    Raises:
      ConfigError: The checkpoint is of another model or optimizer.
    """
    params, train = _split(state)
    folder = self._manager.directory / str(step)
    advice = (
      "resume with the config that wrote it"
      f" ({folder.parent.parent}/config.json), or choose another --workdir."
    )
    if faults := shape_faults(_shapes(folder), params, str(folder), advice):
      raise ConfigError(faults)
    try:
      items = self._manager.restore(
        step,
        args=ocp.args.Composite(
          params=ocp.args.StandardRestore(params),
          train=ocp.args.StandardRestore(train),
        ),
      )
    except (KeyError, TypeError, ValueError):
      raise ConfigError(
        [
          f"{folder}: the optimizer's state does not fit config.optim (name,"
          f" ema_decay, accumulator_dtype); {advice}"
        ]
      ) from None
    return _join(items.params, items.train, state)

  def close(self) -> None:
    """Waits until everything is on disk."""
    self._manager.wait_until_finished()
    self._manager.close()


def find(path: str) -> epath.Path:
  """Returns the folder of one step, given it, its run, or `checkpoints/`.

  Raises:
    FileNotFoundError: There is no checkpoint.
  """
  base = epath.Path(path)
  if (base / "params").is_dir():
    return base.resolve()
  for parent in (base, base / FOLDER):
    if parent.is_dir():
      steps = [
        p
        for p in parent.iterdir()
        if p.name.isdigit()
        and (p / "params").is_dir()
        and ocp.utils.is_checkpoint_finalized(p)  # else incomplete
      ]
      if steps:
        return max(steps, key=lambda p: int(p.name)).resolve()
  is_there = "has no checkpoint in it" if base.exists() else "does not exist"
  runs = [p.parent.name for p in sorted(base.glob(f"*/{FOLDER}"))[:5]]
  raise FileNotFoundError(
    f"got {path!r}, which {is_there}; expected the folder of a run (it holds"
    f" {FOLDER}/<step>/params), or of one step."
    + (f" Runs in it: {', '.join(runs)}." if runs else "")
  )


def load_metadata(path: str) -> dict[str, Any]:
  """Returns the JSON written beside the parameters; `path` as for `find`."""
  return ocp.JsonCheckpointHandler().restore(find(path) / "metadata")


def load_params(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads only the parameters, as numpy, whatever devices wrote them.

  Args:
    path: Folder of a run, of its checkpoints, or of one step.

  Returns:
    Nested dict of numpy arrays, and the metadata.

  Raises:
    FileNotFoundError: As `find`.
  """
  return _restore(find(path) / "params"), load_metadata(path)


def load_tree(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
  """Reads parameters as `load_params` does, also those of other programs.

  Args:
    path: As for `load_params`; or the folder of a tree of arrays, directly or
      in a sub-folder `default`.

  Returns:
    Nested dict of numpy arrays; and the metadata, {} if it is not ours.

  Raises:
    FileNotFoundError: There is no checkpoint.
    ValueError: Orbax cannot read it.
  """
  base = epath.Path(path)
  trees = [f for f in (base, base / "default") if (f / "_METADATA").exists()]
  folder = trees[0].resolve() if trees else find(path) / "params"
  try:
    params = _restore(folder)
    is_ours = not trees and (folder.parent / "metadata").is_dir()
    return params, load_metadata(path) if is_ours else {}
  except (KeyError, OSError, TypeError, ValueError) as e:
    reason = str(e).partition("\n")[0][:200]
    raise ValueError(
      f"got {str(folder)!r}, which Orbax cannot read"
      f" ({type(e).__name__}: {reason}); copy it again."
    ) from None


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
  folder = epath.Path(path).resolve()
  if folder.exists():
    raise FileExistsError(f"got {path!r}, which exists; expected a new folder.")
  with ocp.Checkpointer(
    ocp.CompositeCheckpointHandler("params", "metadata")
  ) as writer:
    writer.save(
      folder,
      ocp.args.Composite(
        params=ocp.args.StandardSave(params),
        metadata=ocp.args.JsonSave(metadata),
      ),
    )


def _restore(folder: epath.Path) -> dict[str, Any]:
  """Reads a tree as numpy."""
  handler = ocp.PyTreeCheckpointHandler()
  as_numpy = jax.tree.map(
    lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
    handler.metadata(folder).tree,
  )
  return handler.restore(
    folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy)
  )


def shape_faults(got, want, where: str, advice: str) -> list[str]:
  """Returns which parameters are missing, extra, or of another shape.

  Returns:
    One text, or none.

  Args:
    got: Nested dict of arrays or shapes, as written.
    want: The same of the model.
    where: What was read, for the text.
    advice: What to do.
  """
  got, want = (
    {
      path_of(path): tuple(x.shape)
      for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    for tree in (got, want)
  )
  differences = [
    f"{key} has {_shape(got.get(key))}, expected {_shape(want.get(key))}"
    for key in sorted(got.keys() | want.keys())
    if got.get(key) != want.get(key)
  ]
  if not differences:
    return []
  more = len(differences) - MAX_DIFFERENCES
  told = "; ".join(differences[:MAX_DIFFERENCES])
  told += f"; and {more} more" * (more > 0)
  return [f"{where} does not fit config.model: {told}; {advice}"]


def _shape(shape: tuple[int, ...] | None) -> str:
  return "no such parameter" if shape is None else f"shape {shape}"


def _shapes(folder: epath.Path):
  """Returns shapes of the parameters, without reading them."""
  return ocp.PyTreeCheckpointHandler().metadata(folder / "params").tree


def _split(state) -> tuple[Any, dict[str, Any]]:
  train = {"step": state.step, "opt_state": state.opt_state}
  if state.ema is None:
    return state.params, train
  return state.ema, {**train, "raw_params": state.params}


def _join(params, train: dict[str, Any], like):
  if like.ema is None:
    raw, ema = params, None
  else:
    raw, ema = train["raw_params"], params
  return like.replace(
    step=train["step"], params=raw, opt_state=train["opt_state"], ema=ema
  )
