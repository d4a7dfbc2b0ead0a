"""Recipes run anywhere on fake data, through the command line."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import several

from vit_jax.writers.metric_writer import read_metrics

ROOT = pathlib.Path(__file__).parents[2]


def _run(module, *args):
  return subprocess.run(
    [sys.executable, "-m", f"vit_jax.{module}", *args],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env=several.env(),
  )


# They compile for a minute or two each.
RECIPES = (
  "finetune.py:model=B/16,dataset=cifar10,res=384",
  "vit_b16.py:imagenet2012",
  "vit_l32.py:folder:/nowhere",
  "ablation.py:posemb=learn2d,posemb_at=blocks",
  "vit_b32.py:imagenet21k",
  "vit_l16.py:imagenet21k",
  "vit_h14.py:imagenet2012",
  "ablation.py:model=R50x1,optimizer=sgd",
  "augreg.py:model=B/16,aug=medium1,reg=0.1,dataset=imagenet21k",
  "augreg.py:model=Ti/16,aug=strong2,dataset=imagenet2012",
  "vit_s16.py:epochs=300",
  "deit3.py:stage=i1k,model=S/16",
  "deit3.py:stage=i1k_384,model=B/16",
  "deit3.py:stage=i21k,model=B/16",
  "mae_finetune.py:model=B/16",
  "comparison.py:model=L/16,dataset=imagenet2012",
  "masked_patch.py:imagenet2012,target=small,steps=100000",
)


@pytest.mark.nightly
@pytest.mark.parametrize("source", RECIPES)
def test_recipe_on_fake_data(source, tmp_path):
  """Two steps of the whole width; two blocks stand for the others."""
  done = _run(
    "train",
    f"--config=configs/{source}",
    "--fake_data",
    f"--workdir={tmp_path}",
    "--config.data.batch_size=4",
    "--config.total_steps=2",
    "--config.optim.warmup_steps=1",
    *(["--config.model.depth=2"] if "R50" not in source else ()),
  )
  assert done.returncode == 0, done.stderr
  rows = read_metrics(str(tmp_path))
  assert np.isfinite([r["train/loss"] for r in rows if "train/loss" in r]).all()
  config = json.loads((tmp_path / "config.json").read_text())
  scores = {k: v for r in rows for k, v in r.items() if k.endswith("/count")}
  evals = config["evals"]
  heads = [n for n, e in evals.items() if e["kind"] == "classification"]
  assert scores == {f"{name}/count": 8 for name in heads}
  sets = sum(e["kind"] == "fewshot" for e in evals.values())
  assert rows[-1].get("fewshot/sets", 0) == sets
  assert config["fake_data"]
