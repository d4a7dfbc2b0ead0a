"""Recipes run anywhere on fake data, through the command line."""

import json
import subprocess
import sys

import numpy as np
import pytest
import several

from vit_jax.writers.metric_writer import read_metrics

# They compile for a minute or two each.
RECIPES = (
  "finetune.py:model=B/16,dataset=cifar10,res=384",
  "vit_b16.py:imagenet2012",
  "ablation.py:posemb=learn2d,posemb_at=blocks",
  "ablation.py:model=R50x1,optimizer=sgd",
  "augreg.py:model=B/16,aug=medium1,reg=0.1,dataset=imagenet21k",
  "vit_s16.py:epochs=300",
  "deit3.py:stage=i1k,model=S/16",
  "deit3.py:stage=i1k_384,model=B/16",
  "mae_finetune.py:model=B/16",
  "masked_patch.py:imagenet2012,target=small,steps=100000",
)


@pytest.mark.nightly
@pytest.mark.parametrize("source", RECIPES)
def test_recipe_on_fake_data(source, tmp_path):
  """Two steps of the whole width; two blocks stand for the others."""
  command = [sys.executable, "-m", "vit_jax.train", "--fake_data"]
  command += [f"--config=configs/{source}", f"--workdir={tmp_path}"]
  command += ["--config.data.batch_size=4", "--config.total_steps=2"]
  command += ["--config.optim.warmup_steps=1"]
  if "R50" not in source:
    command.append("--config.model.depth=2")
  options = dict(capture_output=True, text=True, cwd=several.ROOT)
  done = subprocess.run(command, env=several.env(), **options)
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
