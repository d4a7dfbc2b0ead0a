"""How much each step of preprocessing and of numerics changes a score.

Each step is exchanged alone, the others staying as they are, and the answers
are compared image by image. Where a score changes by chance, about as many
answers become right as wrong. The changes of single steps need not add up to
that of all of them together.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.config import Config
from vit_jax.data.sources import Sources
from vit_jax.scoring import evaluate
from vit_jax.scoring.ablation import STEPS, swaps


def explain(
  config: Config,
  path: str,
  opened: Sources | None = None,
  steps: Sequence[str] = STEPS,
) -> list[dict[str, Any]]:
  """Scores a file once for each swap, and compares the answers.

  Args:
    config: Its model and evaluators, which are of kind "classification" or
      "subset".
    path: The file, as for `evaluate.record`.
    opened: Splits that are open already; None: none.
    steps: The steps, of `STEPS`, that are exchanged.

  Returns:
    A row for each evaluator and swap: on (its name), step, was, value, images
    (their number), top1 (percent) and change (percentage points), error (the
    change's standard error, from the number of answers that differ), gained and
    lost (images answered right only with, or without, the swap) and other
    (images with another answer).

  Raises:
    ConfigError: As `evaluate.evaluate`.
  """
  base = _hits(config, path, opened)
  rows = []
  for swap in swaps(config):
    if swap.step not in steps:
      continue
    if jax.process_index() == 0:
      print(f"swap        {swap.step}: {swap.value}", flush=True)
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
  """Compares two sets of answers to the same images; see `explain`.

  With a images gained and b lost of n, the difference of the two scores is
  (a - b) / n, and its standard error sqrt(a + b - (a - b)^2 / n) / n: images
  answered alike do not enter it (McNemar's test).

  Args:
    one: Answers of the base, as `Classification.hits` returns them.
    other: With the swap.
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
