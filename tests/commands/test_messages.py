"""Command lines that are refused: the message names the option and the reason.

A row is a command line and words of its message: the option or the file that is
wrong, then what is wrong with it. Nothing is written.
"""

import io
import json
import pathlib
import sys

import numpy as np
import pytest
import tiny
from PIL import Image

from vit_jax import __main__ as command
from vit_jax.config import to_dict

DATA = pathlib.Path(__file__).parents[1] / "data"
MINE = "prepare folder:{photos} --name=x --data_dir=out "

TABLE = [
  ("trian", "'trian'", "'train'", "prepare"),
  # Flags.
  ("train --wrkdir=x", "--wrkdir", "'workdir'"),
  ("train --help=modle", "--help", "'model'", "run, "),
  ("train --help=model --config=vit_h15", "'vit_h14'"),
  ("predict x y --imgae_size=3", "--imgae_size=3", "'--image_size'"),
  ("predict x y --json --csv", "--csv", "not allowed"),
  ("predict x y --layer=cls", "--layer", "--features"),
  ("predict x y --attention --out_dir=gs://b/x", "gs://b/x", "this machine"),
  ("report x --out=gs://b/x", "gs://b/x", "this machine"),
  ("serve x --port=70000", "--port", "65535"),
  ("serve x --max_megabytes=-1", "--max_megabytes", "'-1'"),
  ("score x --batch_size=0", "--batch_size", "from 1"),
  ("convert a b --to=npz --image_size=0", "--image_size", "224"),
  ("convert a b --to=npz --posemb_filter=x", "--posemb_filter", "'x'"),
  ("convert a b --to=npz --grid=x", "--grid", "224x160"),
  ("convert a b --to=npz --opset=17", "--opset", "--to=onnx"),
  ("convert a b --to=orbax --push=a/b", "--push", "--to=hf"),
  ("convert none.npz b --to=hf --push=vit", "--push", "OWNER/NAME"),
  # Files.
  ("convert {weights} x.bin --to=npz", "x.bin", ".npz"),
  ("convert none.npz x --to=orbax", "none.npz", "not exist"),
  ("convert {weights} {weights} --to=npz", "{weights}", "exists"),
  ("convert {weights} x --to=orbax --grid=3x4", "17 rows", "13"),
  ("convert {weights} {file}/x.npz --to=npz", "DST", "{file}", "written"),
  ("convert {prelogits} x --to=hf", "head", "--drop_head"),
  ("predict {headless} {photo}", "without a head", "features"),
  ("predict {resnet} {photo} --attention --image_size=32", "attention"),
  ("predict {weights} {photo} --features=x.csv", "'x.csv'", ".npz"),
  ("predict {weights} {photo} --features=no/x.npz", "no/x.npz", "folder"),
  ("predict {weights} {photo} --features=x.npz --layer=to", "'to'", "encoded"),
  ("score {weights} --on=imagnet", "--on", "imagenet2012"),
  ("score {weights} --on=available --data_dir=x", "--on=available", "sketch"),
  ("score {headless} --on=digits[test]", "{headless}", "head"),
  # Runs, and files that are scored without one.
  ("evaluate", "--checkpoint"),
  ("evaluate --checkpoint=none.npz", "none.npz", "not exist"),
  ("evaluate --checkpoint={weights}", "config.json", "--config=", "--fewshot"),
  ("evaluate --checkpoint={damaged}", "--checkpoint", "config.json"),
  ("evaluate --checkpoint={run}", "config.evals", "--fewshot"),
  ("evaluate --checkpoint={run} --fewshot=digits --dtype=float32", "--dtype"),
  (
    "evaluate --checkpoint={weights} --linear=folder:/no/x --knn=folder:/no/y",
    *("--linear", "--knn"),
  ),
  (
    "evaluate --checkpoint={weights} --knn=folder:{photos}"
    " --config.model.width=8",
    *("config.model", "{weights}"),
  ),
  # All errors of a command at once.
  (
    "plan --config=vit_b16 --config.optim.lr=fast --price_per_chip_hour=cheap"
    " --input_rate=0",
    *("--topology", "config.optim.lr", "'fast'"),
    *("--price_per_chip_hour", "'cheap'", "--input_rate", "above 0"),
  ),
  (
    "benchmark --steps=0 --config=vit_b16 --config.optim.lr=fast --input=none"
    " --config.data.batch_size=4",
    *("--steps", "'0'", "--input", "synthetic", "config.optim.lr", "'fast'"),
    *("config.data.batch_size", "split over"),
  ),
  # Data.
  ("prepare folder:{photos}", "--name", "''"),
  ("prepare folders:/x --name=x", "SOURCE", "folder:"),
  ("prepare cifar10 --label=fine", "--label", "none"),
  ("prepare cifar01", "'cifar10'"),
  ("prepare folder:/no/x --name=x", "/no/x", "no folder"),
  ("prepare parquet:{photos} --name=x --classes=/no/x", "/no/x"),
  ("prepare csv:x.csv --name=x --numbers=age --label=age", "--label", "none"),
  ("prepare webdataset:x --name=x --image=jpg --label=cls", "--label", "cls"),
  (MINE + "--splits=train=a*", "--splits", "names of splits"),
  (MINE + "--splits=train=a*,train=b*", "--splits", "once"),
  (MINE + "--classes={file}", "--classes", "none for folder:"),
  (MINE + "--manual_dir=/m", "--manual_dir", "/m"),
  ("prepare imagenet21k --manual_dir=/no/x", "/no/x", "class tars"),
  ("prepare imagenet21k --manual_dir={photos}", "0 tars", "n01440764"),
  ("prepare imagenet2012 --manual_dir={photos}", "ILSVRC2012_img_train.tar"),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
  root = tmp_path_factory.mktemp("paths")
  weights = DATA / "vit_linen_names.weights.npz"
  with np.load(weights) as file:
    arrays = {k: v for k, v in file.items() if not k.startswith("head/")}
  np.savez(root / "headless.npz", **arrays)
  (root / "file").write_text("a\n")
  for name in ("damaged", "run", "photos/a", "photos/b"):
    (root / name).mkdir(parents=True)
  (root / "damaged" / "config.json").write_text("{bad")
  config = json.dumps(to_dict(tiny.config(evals=None)))
  (root / "run" / "config.json").write_text(config)
  for name in "ab":
    Image.new("RGB", (8, 8)).save(root / "photos" / name / "0.png")
  return {
    "weights": weights,
    "prelogits": DATA / "vit_token_prelogits.weights.npz",
    "resnet": DATA / "bit_v2.weights.npz",
    "headless": root / "headless.npz",
    "photo": root / "photos" / "a" / "0.png",
    **{n: root / n for n in ("file", "damaged", "run", "photos")},
  }


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0][:60])
def test_the_message_names_what_is_wrong(
  row, paths, tmp_path, monkeypatch, capsys
):
  line, *words = (text.format(**paths) for text in row)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
  with pytest.raises(SystemExit) as e:
    command.run(line.split())
  text = str(e.value.code)
  if text == "2":  # argparse's, after the usage, which names every flag
    text = capsys.readouterr().err.rpartition("error: ")[2]
  assert [word for word in words if word not in text] == [], text
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "modules, row",
  [
    ("datasets", ("prepare hf:beans --name=x", "install datasets")),
    (
      "pyarrow",
      ("predict {weights} {photo} --features=x.parquet", "install pyarrow"),
    ),
    # Before the weights are read.
    (
      "jax2onnx onnx onnxruntime",
      ("convert none.npz x.onnx --to=onnx", "jax2onnx, onnx", "'onnx'"),
    ),
  ],
)
def test_a_missing_library_comes_with_its_command(
  modules, row, paths, tmp_path, monkeypatch, capsys
):
  for name in modules.split():
    monkeypatch.setitem(sys.modules, name, None)
  test_the_message_names_what_is_wrong(
    row, paths, tmp_path, monkeypatch, capsys
  )
