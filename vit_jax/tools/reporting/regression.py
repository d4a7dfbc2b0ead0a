"""Predicted numbers of a run: against the true ones, and the worst images."""

import functools
from collections.abc import Sequence

import numpy as np

from vit_jax.callbacks.predictions import FILE
from vit_jax.tools.reporting import charts
from vit_jax.tools.reporting.charts import ChartFiles
from vit_jax.tools.reporting.page import breakable, cards, error_text, missing
from vit_jax.tools.reporting.runs import R2, Run, short_name
from vit_jax.weights.npz_file import open_npz

MOST_NUMBERS = 6  # charts of a run


def section(runs: Sequence[Run], chart_files: ChartFiles) -> str:
  """Returns a chart of each number of a run, and the worst images.

  Returns "" if no run predicts numbers.

  Args:
    runs: The runs.
    chart_files: The charts of the page; the new ones are added.
  """
  parts, left_out = [], []
  for run in runs:
    if not run.evaluators(R2):
      continue
    try:
      parts.append(_of_run(run, chart_files))
    except FileNotFoundError:
      left_out.append(f"{FILE} of {run.name}")
    except Exception as e:  # a damaged file may raise anything
      left_out.append(f"{FILE} of {run.name}: {error_text(e)}")
  if not parts and not left_out:
    return ""
  return f"<h2>Numbers</h2>\n{''.join(parts)}{missing('; '.join(left_out))}"


def _of_run(run: Run, chart_files: ChartFiles) -> str:
  path = run.path / FILE
  if not path.exists():
    raise FileNotFoundError(path)
  data = {k: np.asarray(v) for k, v in open_npz(path).items()}
  number, output = data["number"], data["output"]
  names = [*map(str, data["names"])] or [
    f"number {i}" for i in range(number.shape[1])
  ]
  drawn = []
  for i, name in enumerate(names[:MOST_NUMBERS]):
    draw = functools.partial(charts.scatter, number[:, i], output[:, i], name)
    alt = f"predicted against true {name}: {run.name}"
    drawn.append(chart_files.add(f"numbers_{run.name}_{name}", draw, alt))
  text = lambda row: ", ".join(
    f"{value:.4g}" if len(names) == 1 else f"{name} {value:.4g}"
    for name, value in zip(names, row, strict=True)
  )
  worst = [
    (image, text(true), text(predicted), 0.0)
    for image, true, predicted in zip(
      data["worst_image"],
      data["worst_number"],
      data["worst_output"],
      strict=True,
    )
  ]
  fake = ", fake" * run.is_fake
  of = f"{short_name(str(data['dataset']))} {data['split']}{fake}"
  return (
    f"<h3>{breakable(of)}: {breakable(run.name)}</h3>"
    f'<div class="grid">{"".join(drawn)}</div>'
    f'<p class="soft">The {len(worst)} images with the largest errors, of'
    f" {int(data['num_images']):,}. An image counts by the largest error of its"
    " numbers, in units of their deviation. Under each image, what the model"
    " predicts, and the truth.</p>"
    f"{cards(worst, number=lambda _: '')}"
  )
