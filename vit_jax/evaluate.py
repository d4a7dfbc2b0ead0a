"""Scores a checkpoint: `python -m vit_jax.evaluate --checkpoint=RUN`.

Runs the evaluators of the config that wrote it, or of --config, which
published weights need: --checkpoint=B_16.npz --config=configs/finetune.py:...
"""

from vit_jax import cli

if __name__ == "__main__":  # before the heavy imports, to answer --help at once
  ARGS = cli.parse(
    "vit_jax.evaluate",
    {
      "checkpoint": "run, one of its checkpoints, or published weights",
      **cli.PROCESS_FLAGS,
    },
  )

# ruff: noqa: E402
import sys

import jax

from vit_jax import (
  distributed,
  evaluators,
  host_memory,
  overview,
  preflight,
  sharding,
  startup,
  weights,
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
    path: Weights with a head, as `vit_jax.load` takes them: the folder of a
      run or of one step, or a published file.

  Returns:
    All metrics by name, as in training, baselines included.

  Raises:
    ConfigError: The checkpoint is missing or is of another model, or a
      data set is missing.
  """
  try:
    found = weights.read(path)
    num_classes = weights.num_classes(found.params)
    if not num_classes:
      raise ValueError(f"got {path!r}, which has no head; expected one.")
  except (FileNotFoundError, ValueError) as e:
    raise ConfigError([f"--checkpoint: {e}"]) from None
  preflight.check(config, num_classes=num_classes)
  mesh = sharding.make_mesh(config.mesh)
  size = image_size(config.data.ops)
  model = build(config.model, num_classes)

  def init(rng):
    return model.init(rng, jax.numpy.zeros((1, *size, 3)))["params"]

  shapes = jax.eval_shape(init, jax.random.key(config.seed))
  try:
    params, report = weights.adapt(found, shapes, config.model, size)
    if report.reinitialised:
      raise ValueError(
        f"got a head other than {', '.join(report.reinitialised)}; set"
        " config.model.pre_logits as it was trained."
      )
  except ValueError as e:
    raise ConfigError([f"--checkpoint: {e}"]) from None
  if jax.process_index() == 0 and found.format != "checkpoint":
    print(weights.format_report(report))
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
  results, step = {}, found.metadata.get("step", 0)
  for judge in judges:
    scores = judge.run(params)
    if jax.process_index() == 0:
      print(overview.format_scores(step, scores), flush=True)
    results |= scores
  return results


def main(args: cli.Args) -> None:
  """Joins the other processes, looks for faults, evaluates."""
  try:
    distributed.initialise(args.flags, args.faults)
    host_memory.keep()
    startup.use_cache()
    if not args.flags["checkpoint"]:
      args.faults.append("--checkpoint: got none, expected --checkpoint=<run>.")
    if args.faults:
      raise ConfigError(args.faults)
    evaluate(args.config, args.flags["checkpoint"])
  except (ConfigError, DataError) as e:
    sys.exit(str(e))


if __name__ == "__main__":
  main(ARGS)
