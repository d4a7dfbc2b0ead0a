"""The model card: the run's own numbers, read back by the hub's library."""

import json
import pathlib

import jax
import numpy as np
import pytest
import tiny

import vit_jax
from vit_jax import models
from vit_jax.checkpointing import checkpointer
from vit_jax.config import build, to_dict
from vit_jax.tools.exporting import convert, model_card

TOKEN = pathlib.Path(__file__).parents[1] / "data" / "vit_token.weights.npz"
TEST = {"kind": "classification", "dataset": "imagenet2012", "split": "test"}
EVALS = {
  "test": TEST,
  "val": {"kind": "classification", "split": "train[90%:]"},
  "few": {"kind": "fewshot", "dataset": "digits", "split": "test"},
}
SCORES = {
  "test/top1": 0.75,
  "test/top5": 0.9,
  "test/loss": 1.25,
  "test/count": 100.0,
  "val/top1": 0.5,
  "few/5shot": 0.25,
  "few/l2=64/5shot": 0.3,
  "few/random_init/5shot": 0.1,
}
ROWS = [
  {"step": 16, "test/top1": 0.99},
  {"step": 20, "train/images_seen": 320.0, "train/exaflops": 1.5,
   "train/device_hours": 2.5},
  {"step": 20, **SCORES},
  {"step": 24, "test/top1": 0.98},  # after the checkpoint
]  # fmt: skip


def write_run(folder, data_given=None, evals=EVALS, changed=(), **options):
  """A run of 20 steps, of which step 16 was scored as well."""
  options = {"data__dataset": "cifar10"} | options
  config = tiny.config(data__split="train[:90%]", model__depth=1, **options)
  config, errors = build(to_dict(config) | {"evals": evals})
  assert not errors
  metadata = {
    "config": to_dict(config),
    "image_size": [16, 16],
    "grid": [2, 2],
    "num_classes": 10,
    "class_names": list("abcdefghij"),
    "num_params": 1,
    "num_examples": 45000,
    "data_given": data_given,
    "changes": [*changed],
    "devices": "8 x TPU v4",
    "versions": {"jax": "0.10.2"},
    "preprocessing": {"ops": "decode|resize(16)"},
    "step": 20,
  }
  step = str(folder / "checkpoints" / "20")
  shapes = tiny.shapes(models.build(config.model, 10))
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  checkpointer.write_params(step, zeros, metadata)
  lines = "".join(json.dumps(row) + "\n" for row in ROWS)
  (folder / "metrics.jsonl").write_text(lines)
  return vit_jax.load(folder, verbose=False)


def parsed(text):
  """Returns what the hub's library reads in a card."""
  hub = pytest.importorskip("huggingface_hub")
  return hub.ModelCard(text).data


def options_in(text):
  (block,) = text.split("```json\n")[1:]
  return json.loads(block.split("```")[0])


def test_a_run_s_own_numbers(tmp_path):
  vit = write_run(
    tmp_path / "b16", data__data_dir="/home/me/data", init="/home/me/x"
  )
  text = model_card.text(vit, "me/vit", is_on_hub=True)
  data = parsed(text)
  assert data.library_name == "transformers"
  assert data.pipeline_tag == "image-classification"
  assert data.datasets == ["uoft-cs/cifar10"]
  assert data.license is None and data.base_model is None
  assert data.model_name == "vit"
  results = [
    (e.dataset_type, e.dataset_split, e.metric_name, e.metric_value)
    for e in data.eval_results
  ]
  assert results == [
    ("ILSVRC/imagenet-1k", "test", "top-1 accuracy", 0.75),
    ("ILSVRC/imagenet-1k", "test", "top-5 accuracy", 0.9),
    ("uoft-cs/cifar10", "train[90%:]", "top-1 accuracy", 0.5),
    ("digits", "test", "5-shot linear accuracy", 0.25),
  ]
  for line in (
    "| imagenet2012 | test | top-1 accuracy | 75.00% |",
    "| devices | 8 x TPU v4 |",
    "| images seen | 320 |",
    "| steps | 20 |",
    "| starts from | x |",
    "vit = vit_jax.load('hf-hub:me/vit')",
    "model = ViTForImageClassification.from_pretrained('me/vit')",
  ):
    assert f"\n{line}\n" in text
  # The operations of the scores, and those of the file that is written.
  assert "resize_torch(16, 'bilinear')`" in text and "resize(16)`" in text
  assert "/home/me" not in text  # no folders of the machine
  assert "98.0" not in text and "99.00" not in text  # other steps
  assert options_in(text)["data"]["batch_size"] == 16


def test_folders_of_the_machine_are_left_out(tmp_path):
  change = {"step": 8, "by": "--allow_change", "key": "init", "from": None}
  vit = write_run(
    tmp_path,
    data__dataset="folder:/home/me/x",
    data__data_dir="/home/me/data",
    init="/home/me/w",
    evals={"y": EVALS["few"] | {"dataset": "folder:/home/me/y"}},
    changed=[change | {"to": "/home/me/w"}],
  )
  text = model_card.text(vit, "x")
  assert "/home" not in text and "data_dir: " not in text
  assert "init None to 'w' (allowed)" in text
  options = options_in(text)
  assert options["data"]["dataset"] == "folder:x"
  assert options["evals"]["y"]["dataset"] == "folder:y"


def test_scores_are_those_of_the_model_and_its_step(tmp_path):
  vit = write_run(tmp_path)
  changed = [
    vit_jax.load(tmp_path, image_size=32, verbose=False),
    vit_jax.load(tmp_path, gelu="erf", verbose=False),
    convert.without_head(vit, "hf"),
  ]
  for other in changed:
    text = model_card.text(other, "x")
    assert parsed(text).eval_results is None
    assert "75.00%" not in text
  assert parsed(text).pipeline_tag == "image-feature-extraction"
  assert "ViTModel.from_pretrained('x')" in text
  # The run died between a checkpoint and the next line of metrics.
  metrics = tmp_path / "metrics.jsonl"
  metrics.write_text(metrics.read_text().splitlines()[0] + "\n")  # of step 16
  text = model_card.text(vit, "x")
  assert parsed(text).eval_results is None
  assert "99.00%" not in text


def test_fake_or_given_data_are_no_data_set_of_the_hub(tmp_path):
  text = model_card.text(write_run(tmp_path / "a", fake_data=True), "x")
  data = parsed(text)
  assert data.eval_results is None and data.datasets is None
  assert "75.00%" not in text
  text = model_card.text(write_run(tmp_path / "b", data_given="Squares"), "x")
  assert parsed(text).datasets is None
  assert "\n| data | Squares, given |\n" in text


def test_published_weights_say_what_they_know():
  text = model_card.text(vit_jax.load(TOKEN, verbose=False), "folder")
  data = parsed(text).to_dict()
  assert set(data) == {"library_name", "pipeline_tag", "tags"}
  assert "vit_token.weights.npz" in text
  assert "## Training" not in text and "## Scores" not in text


def test_the_folder_has_it_and_loads(tmp_path, monkeypatch):
  """A relative folder is not taken for one of the hub."""
  vit = write_run(tmp_path / "run", init="hf-hub:google/vit-base@v2")
  monkeypatch.chdir(tmp_path)
  folder = "hf/b16"
  convert.convert(vit, folder, "hf")
  text = pathlib.Path(folder, "README.md").read_text()
  assert text == model_card.text(vit, folder)
  assert parsed(text).base_model == "google/vit-base"
  assert f"vit = vit_jax.load('{folder}')" in text
  assert "load('hf-hub:" not in text
  again = vit_jax.load(folder, verbose=False)
  assert again.class_names == tuple("abcdefghij")
