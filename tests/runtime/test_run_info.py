"""The first lines of a run: what the averaged parameters will be."""

import types

import pytest
import tiny

from vit_jax.runtime import run_info

SOURCE = types.SimpleNamespace(
  num_examples=100, num_classes=10, note=lambda: ""
)


@pytest.mark.parametrize(
  "decay, total_steps, line",
  [
    (
      0.9999,
      500,
      "average     of the parameters of about the last 57 steps;"
      " config.optim.ema_decay=0.9999 is for runs of 89,990 steps or more, and"
      " rises to 0.9823 in this one",
    ),
    (
      0.999,
      10_000,
      "average     of the parameters of about the last 1,000 steps",
    ),
  ],
)
def test_average_is_told(decay, total_steps, line):
  parts = tiny.Parts(tiny.config(optim__ema_decay=decay))
  text = run_info.text(
    parts.config, parts.mesh, SOURCE, parts.shapes.params, total_steps, "runs/x"
  )
  assert line in text.splitlines()


def test_no_average_no_line():
  parts = tiny.Parts(tiny.config())
  text = run_info.text(
    parts.config, parts.mesh, SOURCE, parts.shapes.params, 500, "runs/x"
  )
  assert "average" not in text


def test_a_note_on_the_data_is_shown():
  parts = tiny.Parts(tiny.config())
  source = types.SimpleNamespace(**{**vars(SOURCE), "note": lambda: "in order"})
  text = run_info.text(
    parts.config, parts.mesh, source, parts.shapes.params, 500, "runs/x"
  )
  assert "note        in order" in text.splitlines()
