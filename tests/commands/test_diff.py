"""vit-jax diff: the first step and the first array in which two runs part."""

import json
import shutil

import numpy as np
import pytest
import tiny

from vit_jax import train
from vit_jax.callbacks import fingerprints
from vit_jax.commands import diff
from vit_jax.config import defaults, freeze, to_dict
from vit_jax.reporting import first_divergence


class Noise:
  """The random batches of `tiny`."""

  num_examples, num_classes, class_names = 160, tiny.NUM_CLASSES, None

  def __init__(self, cfg):
    self._config = cfg

  def batches(self, start_step, process_index, process_count):
    while True:
      batch = tiny.batch(start_step, self._config)
      start_step += 1
      yield batch | {"index": batch["index"] + 16 * start_step}


def _config(**changes):
  c = defaults()
  c.update(to_dict(tiny.config(total_steps=4)))
  c.data.dataset, c.fake_data = "digits", True
  c.checkpoint.every_steps, c.checkpoint.keep_last = 2, 9
  tiny.apply(c, changes)
  return freeze(c)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Two that differ in the learning rate, and a folder for copies."""
  folder = tmp_path_factory.mktemp("runs")
  for name, lr in (("a", 0.01), ("b", 0.02)):
    cfg = _config(optim__lr=lr)
    train.train_and_evaluate(cfg, str(folder / name), Noise(cfg))
  return folder


@pytest.fixture
def copy(runs, tmp_path):
  """Returns a copy of run a, with its fingerprints changed by a function."""

  def make(change=None, ignore=()):
    new = tmp_path / "copy"
    shutil.copytree(runs / "a", new, ignore=shutil.ignore_patterns(*ignore))
    if change:
      found = change(fingerprints.read(new).copy())
      (new / fingerprints.FILE).write_bytes(
        fingerprints.MAGIC + found.tobytes()
      )
    return new

  return make


def _compare(a, b, capsys):
  status = diff.main([str(a), str(b)])
  return status, capsys.readouterr().out


def test_a_run_and_its_copy(runs, copy, capsys):
  status, text = _compare(runs / "a", copy(), capsys)
  assert status == 0
  assert "steps 1 to 4: equal, 4 that both have" in text
  assert "step 2: equal, " in text and "step 4: equal, " in text
  assert "nothing that is known" in text
  assert text.endswith("equal in all that both have\n")


def test_another_learning_rate(runs, capsys):
  """The first loss and gradient are the same, the first update is not."""
  status, text = _compare(runs / "a", runs / "b", capsys)
  assert status == 1
  assert "step 1: the same images, loss and gradient, another update" in text
  assert "step 1: param_norm " in text and "4 of 4 steps differ" in text
  assert "config.optim.lr: 0.01 and 0.02" in text
  assert text.endswith("the runs part at step 1\n")
  # In the order of the tree; the step and the counts are the same.
  first = "the first is params/Transformer/encoder_norm/bias: float32[32] "
  assert f"arrays differ, {first}" in text
  assert "devices" not in text.partition("differs between them")[2]


@pytest.mark.parametrize(
  "change, told",
  [
    ({"records": 1, "order": 1}, "step 3: other records (or other labels"),
    ({"order": 1}, "step 3: the same records in another order"),
    ({"pixels": 1}, "step 3: the same records with other pixels"),
    ({"loss": 1}, "step 3: the same images, another loss"),
    ({"grad_norm": 1}, "step 3: the same images and loss, another gradient"),
  ],
)
def test_how_they_part(runs, copy, capsys, change, told):
  def later(found):
    for name in change:
      found[name][2:].view("<u4")[:] ^= 1
    return found

  status, text = _compare(runs / "a", copy(later), capsys)
  assert status == 1 and told in text
  assert "steps 1 to 2: equal" in text and "2 of 4 steps differ" in text
  assert ("(1 unit in the last place)" in text) == ("loss" in told)
  assert text.endswith("the runs part at step 3\n")


def test_the_same_batches_later(runs, copy, capsys):
  def shifted(found):
    for name in ("records", "order", "pixels"):
      found[name][1:] = found[name][:-1].copy()
    return found

  _, text = _compare(runs / "a", copy(shifted), capsys)
  assert "step 2: the records that A has there, B has at step 3" in text


def test_of_different_lengths(runs, copy, capsys):
  status, text = _compare(runs / "a", copy(lambda found: found[:2]), capsys)
  assert status == 0 and "steps 1 to 2: equal, 2 that both have" in text
  assert "fingerprints of steps 1 to 2; checkpoints: 2, 4" in text


def test_without_fingerprints_or_checkpoints(runs, copy, capsys):
  other = copy(ignore=(fingerprints.FILE,))
  status, text = _compare(runs / "a", other, capsys)
  assert status == 0 and "none that both have a fingerprint of" in text
  assert "no fingerprints (an older version wrote them" in text
  shutil.rmtree(other / "checkpoints")
  status, text = _compare(runs / "a", other, capsys)
  assert status == 2 and "none of a step that both have" in text
  assert text.endswith("no step and no checkpoint is known of both\n")


def test_a_checkpoint_without_digests_and_a_damaged_one(runs, copy, capsys):
  other = copy(ignore=("digests.json",))
  status, text = _compare(runs / "a", other, capsys)
  assert "digests.json is missing" in text and status == 0  # by the steps


def test_what_differs_between_the_machines(runs, copy, capsys):
  other = copy()
  path = other / "metadata.json"
  metadata = json.loads(path.read_text())
  metadata["devices"], metadata["versions"]["jax"] = "4 x TPU v5e", "0.99"
  metadata["mesh"] = {"data": 4, "fsdp": 1, "tensor": 1}
  path.write_text(json.dumps(metadata))
  (other / "config.json").write_text("{")
  _, text = _compare(runs / "a", other, capsys)
  assert "devices: 8 x cpu and 4 x TPU v5e" in text
  assert "mesh.data: 8 and 4" in text and "and 0.99" in text
  assert "B has no config.json that can be read" in text


def test_no_run(tmp_path, capsys):
  assert diff.main([str(tmp_path), str(tmp_path)]) == 2
  assert "expected the folder of a run" in capsys.readouterr().err


def test_units_in_the_last_place():
  one = np.float32(1.0)
  near = np.nextafter(one, np.float32(2))
  assert first_divergence._units(one, near) == " (1 unit in the last place)"
  assert first_divergence._units(one, -one) == first_divergence._units(
    one, np.float32("nan")
  )
