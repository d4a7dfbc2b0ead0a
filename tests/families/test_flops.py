"""Counting arithmetic, against the table of published models."""

import pytest

from vit_jax.config import model_config


@pytest.mark.parametrize(
  "variant, gmacs",
  [
    ("Ti/16", 1.25),
    ("S/32", 1.14),
    ("S/16", 4.60),
    ("B/32", 4.41),
    ("B/16", 17.56),
    ("L/32", 15.38),
    ("L/16", 61.55),
    ("H/14", 167.29),
  ],
)
def test_forward_macs(variant, gmacs):
  macs = model_config(variant=variant).forward_macs((224, 224), 1000)
  assert macs / 1e9 == pytest.approx(gmacs, abs=0.011)


def test_three_passes_of_two_operations():
  model = model_config(variant="B/16", pool="map", pre_logits=True)
  assert model.train_flops((32, 64), 7) == 6 * model.forward_macs((32, 64), 7)
