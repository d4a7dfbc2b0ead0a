"""Runs of which the frozen part is computed once, against ordinary ones."""

import contextlib
import io

import jax
import numpy as np
import pytest
import shared_runs
import tiny
from faults import runs

from vit_jax import run_checks, sharding
from vit_jax.config import defaults, freeze, to_dict
from vit_jax.data import pipeline, sources
from vit_jax.finetune import activations, frozen
from vit_jax.inputs import Inputs
from vit_jax.train import train_and_evaluate

STEM = ("embedding/*", "cls", "Transformer/pos*")
HALF = (*STEM, "Transformer/encoderblock_0/*")
HEAD = (*STEM, "Transformer/*")
SCORE = {"kind": "classification", "ops": "decode|resize(16)", "split": "val"}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """12 images of two classes, of which one of `train` is broken."""
  folder = tmp_path_factory.mktemp("images")
  for split, number in (("train", 6), ("val", 3)):
    colours = {"blue": "blue", "red": "red"}
    shared_runs.folder(folder / split, colours, number)
  broken = folder / "train/blue/3.png"
  broken.write_bytes(broken.read_bytes()[:100])

  def make(**changes):
    c = defaults()
    c.update(to_dict(tiny.config(total_steps=8, log_steps=1)))
    c.data.dataset, c.data.split = f"folder:{folder}", "train"
    c.data.ops, c.data.batch_size = "decode|resize(16)|flip_lr", 8
    c.checkpoint.every_steps = 3
    c.optim.name, c.optim.momentum = "sgd", 0.9
    c.optim.freeze, c.optim.weight_decay, c.optim.ema_decay = HALF, 0.1, 0.9
    c.evals = {"val": {**SCORE, "every_steps": 4}, "last": SCORE}
    tiny.apply(c, changes)
    return freeze(c)

  return make


def given(config):
  """The data of the run, passed to it: it computes every step as a whole."""
  source = sources.Sources().open(config.data.dataset, config.data.split)
  return pipeline.TrainingData(source, config)


@pytest.fixture(scope="module")
def once(config, tmp_path_factory):
  """A run whose frozen part is computed once: state, folder, and its lines."""
  folder, err = tmp_path_factory.mktemp("once"), io.StringIO()
  with contextlib.redirect_stderr(err):
    state = train_and_evaluate(config(), str(folder))
  return state, folder, err.getvalue()


@pytest.mark.nightly
def test_a_run_is_the_ordinary_one(once, config, tmp_path, capfd):
  state, folder, err = once
  assert (
    "all before Transformer/encoderblock_1, computed once: 12 images" in err
  )
  c = config()
  ordinary = train_and_evaluate(c, str(tmp_path / "each"), given(c))
  assert (
    "computed in every step: the data were passed" in capfd.readouterr().err
  )
  # Rounding of float32, see tests/test_frozen.py, in eight steps.
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, state, ordinary)
  one, other = (runs.rows(path) for path in (folder, tmp_path / "each"))
  for key in ("train/loss", "train/grad_norm", "train/undecodable", "val/loss"):
    values = [[r[key] for r in rows if key in r] for rows in (one, other)]
    assert len(values[0]) >= 2
    np.testing.assert_allclose(*values, rtol=1e-5)
  assert max(r.get("train/undecodable", 0) for r in one) > 0
  # `last` is scored once, from images, in the same step as `val` at the end.
  scores = {k: v for row in one for k, v in row.items()}
  assert scores["val/top1"] == scores["last/top1"]
  assert scores["val/loss"] == pytest.approx(scores["last/loss"], rel=1e-6)


@pytest.mark.nightly
def test_a_resumed_run_ends_in_the_same_bits(once, config, tmp_path, capfd):
  c, cut = config(), str(tmp_path / "cut")
  with pytest.raises(shared_runs.Stopped):
    train_and_evaluate(c, cut, callbacks=[shared_runs.StopAfter(5)])
  resumed = train_and_evaluate(c, cut)
  assert "resumes     step 3" in capfd.readouterr().err
  jax.tree.map(np.testing.assert_array_equal, once[0], resumed)


def inputs_of(config, start=0):
  """The inputs of a run, and why each step computes the frozen part."""
  e = run_checks.setup(config)
  e.start = start
  mesh = sharding.make_mesh(config.mesh)
  trainer = e.trainer(mesh)
  inputs = Inputs(e, trainer, mesh)
  return inputs, lambda: inputs.batches(0, {}, trainer.state)[1]


def test_a_run_resumed_near_its_end_computes_as_before(config):
  """In other roundings it would not end in the same bits."""
  inputs, _ = inputs_of(config(), start=7)
  assert inputs.abstract_batch()["image"].ndim == 3  # activations


@pytest.mark.parametrize(
  ("changes", "memory", "expected"),
  [
    ({"data__ops": "decode|resize(20)|random_crop(16)"}, 2**40, "random op"),
    ({"objective__mixup": 0.2}, 2**40, "config.objective"),
    ({"model__stochastic_depth": 0.1}, 2**40, "random in training"),
    ({"total_steps": 3}, 2**40, "only 24 images"),
    ({}, 4 * 3000, "24 images take 0.0 GiB"),
  ],
)
def test_why_a_part_is_computed_in_every_step(
  config, changes, memory, expected, monkeypatch
):
  monkeypatch.setattr(frozen, "memory", lambda: memory)
  inputs, reason = inputs_of(config(optim__freeze=HEAD, **changes))
  assert inputs.abstract_batch()["image"].ndim == 4  # images
  assert "all before head, computed in every step: " in reason()
  assert expected in reason()


@pytest.mark.slow
def test_batches_are_those_of_the_pipeline(config):
  """Records, labels, masks and mirrored images of the same steps."""
  c = config(data__repeats=2)
  data = given(c)
  (every,) = pipeline.eval_batches(
    data.source, data.unflipped_ops, batch_size=12
  )
  mirrored = []
  for step, batch in zip(range(6), data.batches(0, 0, 1), strict=False):
    index, is_mirrored = data.rows(step)
    numbers = data.row_numbers(step, 0, index)
    np.testing.assert_array_equal(numbers, batch["index"])
    assert len({*numbers}) == len(numbers)  # each copy draws for itself
    np.testing.assert_array_equal(index, batch["index"] % data.num_examples)
    image = every["image"][index]
    image = np.where(is_mirrored[:, None, None, None], image[:, :, ::-1], image)
    np.testing.assert_array_equal(image, batch["image"])
    np.testing.assert_array_equal(every["label"][index], batch["label"])
    np.testing.assert_array_equal(every["mask"][index], batch["mask"])
    mirrored += is_mirrored.tolist()
  none = np.zeros((data.num_examples, 2, 1))
  computed = activations.Activations(
    data, none, every["label"], every["mask"], ""
  )
  np.testing.assert_array_equal(next(computed.batches(5))["index"], numbers)
  parts = [next(data.batches(5, i, 2))["index"] for i in range(2)]
  np.testing.assert_array_equal(np.concatenate(parts), numbers)
  assert 0 < sum(mirrored) < len(mirrored)
