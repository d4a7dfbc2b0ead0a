"""How much each step of the preprocessing or the numerics changes a score.

One step at a time is replaced, and the predictions are compared image by image.
If a score changes by chance, about as many predictions become right as wrong.
The changes of the single steps need not add up to the change of all of them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import evaluate
from vit_jax.config import Config
from vit_jax.data.sources import Sources
from vit_jax.tools.scoring.ablation import STEPS, swaps


def explain(
  config: Config,
  path: str,
  opened: Sources | None = None,
  steps: Sequence[str] = STEPS,
) -> list[dict[str, Any]]:
  """Scores a file once for each replaced step, and compares the predictions.

  Args:
    config: Model and evaluators of kind "classification" or "subset".
    path: The file, as for `evaluate.record`.
    opened: Splits that are already open; None: none.
    steps: Names of `STEPS` to replace.

  Returns:
    A row for each evaluator and replaced step: on, name of the evaluator; step;
    was, the original value; value, the new one; images, their number; top1,
    percent; change, percentage points; error, standard error of the change,
    from the number of changed predictions; gained and lost, images that became
    right or wrong; other, images with another prediction.

  Raises:
    ConfigError: See `evaluate.evaluate`.
  """
  base = _hits(config, path, opened)
  rows = []
  for swap in swaps(config):
    if swap.step not in steps:
      continue
    if jax.process_index() == 0:
      print(f"scores with {swap.step}: {swap.value}", flush=True)
    for name, hits in _hits(swap.config, path, opened).items():
      facts = {"on": name, **swap._asdict(), **compared(base[name], hits)}
      del facts["config"]
      rows.append(facts)
  return sorted(rows, key=lambda row: list(base).index(row["on"]))


def _hits(
  config: Config, path: str, opened: Sources | None
) -> dict[str, dict[str, np.ndarray]]:
  ready = evaluate.open_checkpoint(config, path, opened=opened)
  return {e.config.name: e.hits(ready.params) for e in ready.evaluators}


def compared(
  one: dict[str, np.ndarray], other: dict[str, np.ndarray]
) -> dict[str, Any]:
  """Compares two sets of predictions for the same images; see `explain`.

  If a of n images became right and b became wrong, the scores differ by
  (a - b) / n, with a standard error of sqrt(a + b - (a - b)^2 / n) / n (as in
  McNemar's test, images that are right or wrong in both do not matter).

  Args:
    one: Predictions of the original, from `Classification.hits`.
    other: Predictions with the replaced step.
  """
  was, now, num = one["is_right"], other["is_right"], len(one["index"])
  gained, lost = int((now & ~was).sum()), int((was & ~now).sum())
  change = (gained - lost) / num
  return {
    "images": num,
    "top1": 100 * float(now.mean()),
    "change": 100 * change,
    "error": 100 * float(np.sqrt(gained + lost - num * change**2)) / num,
    "gained": gained,
    "lost": lost,
    "other": int((one["prediction"] != other["prediction"]).sum()),
  }
