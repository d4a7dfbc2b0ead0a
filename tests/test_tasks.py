"""docs/tasks: the scripts run, on embedded data.

/path/to/images, ViT-B_16.npz and dinov3 stand for what a user has; here they
are a few of scikit-learn's digits, the weights of notebooks/letters.npz, and
random weights in the form of transformers' DINOv3. Training is
cut to two steps of a small model by options that are put behind those of the
page.
"""

import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from PIL import Image

from vit_jax import families, weights
from vit_jax.exporting import convert
from vit_jax.inference import pretrained
from vit_jax.models import build

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "tasks").glob("*.md"))
WEIGHTS = "notebooks/letters.npz"
VALUES = {
  r"/path/to/images": "images",
  r"\*\.jpg": "*.png",
  r"ViT-B_16\.npz": WEIGHTS,
  r"\bres=\d+": "res=32",
  r"\bresize\(\d+\)": "resize(32)",
}
SHORT = "--config.total_steps=2 --config.optim.warmup_steps=1"
TINY = (
  "--config.model.variant=Ti/16 --config.model.depth=1 --config.mesh.fsdp=1"
  " --config.data.batch_size=8"
)
# Page -> what is put behind `vit-jax train`.
MORE = {"pretrain": f"{SHORT} {TINY}", "finetune": SHORT}
# Page -> files that its scripts write.
WRITTEN = {
  "dinov3": [
    "features.parquet",
    "classes.csv",
    "lora.safetensors",
    "lora.onnx",
  ],
  "convert": ["runs/export/vit.npz", "runs/export/vit.stablehlo"],
  "fewshot": ["runs/probe/evaluation.jsonl"],
  "finetune": ["runs/mine/report.html", "runs/mine/evaluation.jsonl"],
  "other_flax": [],
  "own_loader": ["runs/own_loader/metrics.jsonl"],
  "predict": ["classes.csv", "classes.jsonl"],
  "pretrain": ["runs/scratch/report.html", "runs/scratch/evaluation.jsonl"],
  "score": ["runs/mine/evaluation.jsonl"],
  "transfer": ["runs/sweep/report.html"],
}
WITHOUT_SCRIPT = ("add_model", "plan", "pod")


def blocks(page, kind):
  pattern = rf"^```{kind}\n(.*?)^```$"
  return re.findall(pattern, page.read_text(), re.M | re.S)


def filled_in(code):
  for pattern, value in VALUES.items():
    code = re.sub(pattern, value, code)
  return code


def test_every_page_has_a_script_and_is_linked():
  index = (ROOT / "docs" / "README.md").read_text()
  assert {p.stem for p in PAGES} == WRITTEN.keys() | set(WITHOUT_SCRIPT)
  for page in PAGES:
    assert f"tasks/{page.name}" in index
    scripts = blocks(page, "sh") + blocks(page, "python")
    assert bool(scripts) != (page.stem in WITHOUT_SCRIPT)


@pytest.fixture
def folder(tmp_path):
  """A folder with the repository's configs, images of three digits, a run."""
  from sklearn.datasets import load_digits

  digits = load_digits()
  for label in range(3):
    for split, some in (("train", slice(0, 30)), ("val", slice(30, 36))):
      (path := tmp_path / f"images/{split}/{label}").mkdir(parents=True)
      for i, x in enumerate(digits.images[digits.target == label][some]):
        pixels = np.round(x * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).resize((32, 32)).save(path / f"{i}.png")
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
  (tmp_path / "bin").mkdir()
  wrapper = tmp_path / "bin" / "vit-jax"
  wrapper.write_text(
    "#!/bin/sh\n"
    'if [ "$1" = train ] || [ "$1" = sweep ]; then set -- "$@" $MORE; fi\n'
    f'exec {sys.executable} -m vit_jax "$@"\n'
  )
  wrapper.chmod(0o755)
  return tmp_path


def write_dinov3(path):
  """Writes a tiny DINOv3 with random weights as transformers does."""
  model = families.model_config(
    "modern",
    variant="S/16",
    **dict(width=64, depth=2, mlp_dim=128, num_heads=4),
    **dict(registers=4, rope="dinov3", posemb="none", qkv_bias="no_key"),
    **dict(layer_scale=0.1, ln_eps=1e-5, gelu="erf"),
  )
  images = jax.numpy.zeros((1, 64, 64, 3))
  params = build(model, 0).init(jax.random.key(0), images)["params"]
  vit = pretrained.Pretrained(
    config=model,
    params=params,
    num_classes=0,
    image_size=(64, 64),
    class_names=None,
    ops="decode|resize_torch(64, 'bilinear')",
    loss="softmax",
    report=weights.Report("random", {}, {}, (), ()),
  )
  convert.convert(vit, str(path), "hf")


def call(folder, command, more=""):
  env = dict(os.environ, JAX_PLATFORMS="cpu", MORE=more)
  env.pop("XLA_FLAGS", None)  # one device
  env["PYTHONPATH"] = str(ROOT)
  env["PATH"] = f"{folder / 'bin'}{os.pathsep}{env['PATH']}"
  out = subprocess.run(
    command, cwd=folder, env=env, capture_output=True, text=True
  )
  assert out.returncode == 0, f"{command}\n{out.stdout}{out.stderr}"
  return out.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_scripts_run(name, folder):
  page = ROOT / "docs" / "tasks" / f"{name}.md"
  more = MORE.get(name, SHORT)
  if name == "dinov3":
    write_dinov3(folder / "dinov3")
  if name in ("convert", "score"):  # they begin with a run
    begin = f"vit-jax train --config=folder:path=images,init={WEIGHTS},res=32"
    call(folder, ["bash", "-ec", f"{begin} --workdir=runs/mine"], more)
  for code in blocks(page, "sh"):
    command = ["bash", "-euo", "pipefail", "-c", filled_in(code)]
    print(call(folder, command, more))
  for code in blocks(page, "python"):
    print(call(folder, [sys.executable, "-c", filled_in(code)]))
  for path in WRITTEN[name]:
    assert (folder / path).stat().st_size > 0, path


@pytest.mark.nightly
def test_the_command_on_fake_data_of_readme(folder):
  text = (ROOT / "README.md").read_text()
  (command,) = re.findall(r"^vit-jax train .*--fake_data.*$", text, re.M)
  call(folder, ["bash", "-ec", command])
  assert (folder / "runs/vit_b16/metrics.jsonl").stat().st_size > 0
