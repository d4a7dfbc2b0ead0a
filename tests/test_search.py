"""The planner's search, with a made-up compiler."""

import pytest
import tiny

from vit_jax.config import Config, ConfigError
from vit_jax.search import choices, search

CONFIG = tiny.config(data__batch_size=128, data__dataset="cifar10")


def fake(choice: Config) -> dict:
  """Fast with microbatches of 16 and in a loop; a batch of 256 does not fit."""
  speed = 100.0 + 50.0 * (choice.optim.microbatch == 16)
  speed += 20.0 * (not choice.model.scan)
  return {
    "mesh": {"data": choice.mesh.data},
    "batch_size": choice.data.batch_size,
    "accum_steps": choice.optim.microbatch,
    "remat": choice.model.remat,
    "scan": choice.model.scan,
    "fits": choice.data.batch_size < 256,
    "peak_bytes": 2**30,
    "price_seconds": choice.data.batch_size / speed,
    "images_per_second": speed,
  }


def test_choices_keep_the_recipe():
  tried = list(choices(CONFIG, 4))
  assert tried[0] == CONFIG
  assert {c.data.batch_size for c in tried} == {128}
  assert {c.optim.microbatch for c in tried} == {None, 16, 8}  # of 32 rows
  assert {c.mesh.fsdp for c in tried} == {1, -1}
  assert len(set(tried)) == len(tried)


def test_the_best_is_tried_in_a_loop_and_with_other_batches():
  lines = []
  best = search(CONFIG, 4, fake, lines.append)
  assert (best["accum_steps"], best["scan"], best["batch_size"]) == (
    16,
    False,
    128,
  )
  # One line a choice, the loop, two batches, and the two conclusions.
  assert len(lines) == len(list(choices(CONFIG, 4))) + 5
  assert "batch=256" in lines[-2] and "does not fit: 1.00 GiB" in lines[-2]
  assert lines[-1].startswith("fastest: ") and "170 images/s" in lines[-1]


def test_a_smaller_batch_where_nothing_else_fits():
  fits_small = lambda c: fake(c) | {"fits": c.data.batch_size < 128}
  assert search(CONFIG, 4, fits_small, lambda _: None)["batch_size"] == 64
  nothing = lambda c: fake(c) | {"fits": False}
  with pytest.raises(ConfigError, match="got 128, which fits in none of"):
    search(CONFIG, 4, nothing, lambda _: None)
