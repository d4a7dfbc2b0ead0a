"""Scores a checkpoint: `python -m vit_jax.evaluate --checkpoint=RUN`.

Runs the evaluators of the config that wrote it, or of --config.
"""

from vit_jax import cli

if __name__ == "__main__":  # before the heavy imports, to answer --help at once
  ARGS = cli.parse(
    "vit_jax.evaluate",
    {"checkpoint": "folder of a run, or of one step in its checkpoints/"},
  )

# ruff: noqa: E402
import sys

import jax

from vit_jax import (
  checkpoint,
  distributed,
  evaluators,
  overview,
  preflight,
  sharding,
)
from vit_jax import step as step_lib
from vit_jax.batch import DataError
from vit_jax.config import Config, ConfigError
from vit_jax.models import build
from vit_jax.opstring import image_size


def evaluate(config: Config, path: str) -> dict[str, float]:
  """Runs every evaluator of a config on a checkpoint's parameters.

  Args:
    config: Gives the model and the evaluators.
    path: Folder of a run, or of one step.

  Returns:
    All metrics by name, as in training, baselines included.

  Raises:
    ConfigError: The checkpoint is missing or is of another model, or a
      data set is missing.
  """
  try:
    params, metadata = checkpoint.load_params(path)
  except FileNotFoundError as e:
    raise ConfigError([f"--checkpoint: {e}"]) from None
  preflight.check(config, num_classes=metadata["num_classes"])
  mesh = sharding.make_mesh(config.mesh)
  size = image_size(config.data.ops)
  model = build(config.model, metadata["num_classes"])

  def init(rng):
    return model.init(rng, jax.numpy.zeros((1, *size, 3)))["params"]

  shapes = jax.eval_shape(init, jax.random.key(config.seed))
  faults = checkpoint.shape_faults(
    params,
    shapes,
    f"--checkpoint={path}",
    "evaluate it with the config that wrote it (leave out --config and"
    " --config.model...).",
  )
  if faults:
    raise ConfigError(faults)
  shardings = sharding.infer(shapes, mesh)
  params = jax.tree.map(jax.device_put, params, shardings)
  if config.fake_data and jax.process_index() == 0:
    print("data made up (fake_data); --fake_data=false takes the real ones")
  judges = evaluators.build(
    config,
    step_lib.make_predict(model),
    mesh,
    random_params=lambda: jax.jit(init, out_shardings=shardings)(
      jax.random.key(config.seed)
    ),
  )
  found = {}
  for judge in judges:
    scores = judge.run(params)
    if jax.process_index() == 0:
      print(overview.format_scores(metadata["step"], scores), flush=True)
    found |= scores
  return found


def main(args: cli.Args) -> None:
  """Joins the other processes, looks for faults, evaluates."""
  distributed.initialise()
  try:
    if not args.flags["checkpoint"]:
      args.faults.append("--checkpoint: got none, expected --checkpoint=<run>.")
    if args.faults:
      raise ConfigError(args.faults)
    evaluate(args.config, args.flags["checkpoint"])
  except (ConfigError, DataError) as e:
    sys.exit(str(e))


if __name__ == "__main__":
  main(ARGS)
