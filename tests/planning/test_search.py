"""The planner's search, with a fake compiler."""

import pytest
import tiny

from vit_jax.config import Config, ConfigError, cli
from vit_jax.tools.planning.search import Search, choices, options

CONFIG = tiny.config(data__batch_size=128, data__dataset="cifar10")


def fake(choice: Config) -> dict:
  """Fast with microbatches of 16 and in a loop; a batch of 256 does not fit."""
  speed = 100.0 + 50.0 * (choice.optim.microbatch == 16)
  speed += 20.0 * (not choice.model.scan)
  return {
    "batch_size": choice.data.batch_size,
    "scan": choice.model.scan,
    "fits": choice.data.batch_size < 256,
    "peak_bytes": 2**30,
    "price_seconds": choice.data.batch_size / speed,
    "images_per_second": speed,
  }


def search(config, plan):
  """Returns the search, done, and what it reported."""
  texts = []
  searched = Search(config, 4, plan, texts.append)
  searched.run()
  return searched, "".join(texts).splitlines()


def test_choices_keep_the_recipe():
  tried = list(choices(CONFIG, 4))
  assert tried[0] == CONFIG
  assert {c.data.batch_size for c in tried} == {128}
  assert {c.optim.microbatch for c in tried} == {None, 16, 8}  # of 32 rows
  assert {c.mesh.fsdp for c in tried} == {1, -1}
  assert len(set(tried)) == len(tried)
  again = list(choices(tried[5], 4))  # itself one of the others
  assert len(set(again)) == len(again) == len(tried) - 1
  # They are options of the command line.
  flags = [f"--config.{x}" for x in options(tried[3]).split()]
  args = cli.parse("x", {}, ["--config=configs/vit_b16.py", *flags])
  assert not args.errors and args.config.model.remat == tried[3].model.remat


@pytest.mark.parametrize("evaluators, size", [({}, 4), ({"few": 4}, 128)])
def test_choices_split_their_batches(evaluators, size):
  """Over 8 devices a batch of 4 splits with tensor=2 alone."""
  evals = {
    name: {"kind": "fewshot", "dataset": "digits", "batch_size": n}
    for name, n in evaluators.items()
  }
  changes = {"data__batch_size": size, "mesh__tensor": 2, "evals": evals}
  config = tiny.config(**changes)
  assert list(choices(config, 8)) == [config]
  assert len(list(choices(config, 4))) > 1


def test_the_best_is_tried_in_a_loop_and_with_other_batches():
  searched, lines = search(CONFIG, fake)
  best, choice = searched.fastest
  assert (choice.optim.microbatch, choice.model.scan) == (16, False)
  assert choice.data.batch_size == 128 and best == fake(choice)
  # Three choices come later: the best in a loop, and with other batches.
  total = len(list(choices(CONFIG, 4))) + 3
  assert searched.number == searched.total == total
  first, *numbered, last = lines  # a line each, and the fastest
  assert f"{total} choices" in first and len(numbered) == total
  assert "data.batch_size=256" in numbered[-1]
  assert "does not fit" in numbered[-1] and "170 images/s" in numbered[-1]
  assert last.endswith("remat=none --config.model.scan=false")


def test_a_smaller_batch_where_nothing_else_fits():
  fits_small = lambda c: fake(c) | {"fits": c.data.batch_size < 128}
  searched, lines = search(CONFIG, fits_small)
  assert searched.fastest[0]["batch_size"] == 64
  assert "does not fit" in lines[1] and lines[1].endswith("none")
  nothing = lambda c: fake(c) | {"fits": False}
  with pytest.raises(ConfigError, match="config.data.batch_size: got 128"):
    search(CONFIG, nothing)


def test_a_choice_that_cannot_work_is_reported_and_left_out():
  def plan(choice):
    if choice.data.batch_size > refused:
      raise ConfigError(["config.optim.warmup_steps: got 7"])
    return fake(choice) | {"fits": True}

  refused = 128
  searched, lines = search(CONFIG, plan)
  assert searched.fastest[1].data.batch_size == 128
  assert lines[-2].endswith("config.optim.warmup_steps: got 7")
  refused = 0  # the config itself
  with pytest.raises(ConfigError, match="got 7"):
    search(CONFIG, plan)
