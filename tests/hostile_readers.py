"""Every reader of files that others wrote, with a valid sample."""

import functools
import io
import json
import pathlib
import pickle
import random
import tarfile
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.config import ConfigError, model_config, to_dict

VIT = dict(variant="B/4", width=8, depth=2, mlp_dim=12, num_heads=2)
BIT = dict(name="bit", variant="R26x0.5", stage_blocks=(1, 1), stage_width=None)
LOADED = 0.1  # share of files that are loaded as a whole: the slow part
PAGES = 0.02  # share of runs whose page is made


class Reader(NamedTuple):
  """What reads a kind of file.

  build: Writes a valid sample into a folder.
  read: Reads a path, as a user's command does; a random.Random says how far.
  file: The path below the folder that is given to `read`.
  is_target: Whether a file of the sample is changed.
  is_refused: Whether the sample itself is refused, as a pickle is.
  """

  build: Callable[[pathlib.Path], None]
  read: Callable[[pathlib.Path, random.Random], None]
  file: str = ""
  is_target: Callable[[pathlib.Path], bool] = lambda path: True
  is_refused: bool = False

  def path(self, folder: pathlib.Path) -> pathlib.Path:
    return folder / self.file


@functools.cache
def _model(**options):
  return model_config(**options)


@functools.cache
def _params(is_bit: bool = False, **options):
  import foreign  # tests/weights/foreign.py

  model = _model(**(BIT if is_bit else VIT), **options)
  return foreign.random_params(model, 3, (8, 8))


def _weights(path: pathlib.Path, rng: random.Random) -> None:
  """Reads as `vit_jax.load` does, and now and then all of it."""
  import vit_jax
  from vit_jax import weights
  from vit_jax.inference.pretrained import preprocessing

  if rng.random() >= 1 - LOADED:
    vit_jax.load(path, verbose=False)
    return
  found = weights.read(path)
  try:  # as `load` does
    weights.identify(found.params, found.options)
    preprocessing(found, weights.trained_at(found))
  except ValueError as e:
    raise ValueError(f"{path}: {e}") from None
  for array in found.params.values():
    np.asarray(array)


def _npz(write: Callable[[], dict[str, np.ndarray]]) -> Reader:
  def build(folder):
    np.savez(folder / "x.npz", **write())

  return Reader(build, _weights, "x.npz")


def _paper():
  from vit_jax.weights import google

  return google.write(_params())


def _big_vision():
  from vit_jax.weights import google

  return google.write(_params(pool="gap"), is_big_vision=True)


def _bit():
  from vit_jax.weights import bit

  return bit.write(_params(is_bit=True))


def _build_npy(folder):
  np.save(folder / "x.npy", np.zeros((3, 4), np.float32))


def _build_timm(folder):
  from vit_jax.weights import safetensors_file, timm

  arrays = timm.write(_params(), _model(**VIT))
  ours = {"model": to_dict(_model(**VIT)), "image_size": [8, 8], "grid": [2, 2]}
  ours |= {"class_names": ["a", "b", "c"], "loss": "softmax"}
  ours |= {"preprocessing": {"ops": "decode|resize(8)"}}
  path = folder / "model.safetensors"
  safetensors_file.write(path, arrays, {"vit_jax": ours})


def _build_timm_config(folder):
  """A BiT, as timm writes it: nothing but the shapes tells the model."""
  from vit_jax.weights import safetensors_file, timm

  arrays = timm.write(_params(is_bit=True), _model(**BIT))
  safetensors_file.write(folder / "model.safetensors", arrays, {})
  about = {"input_size": [3, 8, 8], "crop_pct": 0.9, "label_names": ["a"] * 3}
  about |= {"interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3}
  values = {"architecture": "x", "num_classes": 3, "pretrained_cfg": about}
  (folder / "config.json").write_text(json.dumps(values))


def _build_hf(folder):
  from vit_jax.weights import hf, hf_preprocessing, safetensors_file

  arrays, config = hf.write(
    _params(),
    _model(**VIT),
    num_classes=3,
    image_size=(8, 8),
    class_names=["x", "y", "z"],
  )
  safetensors_file.write(folder / "model.safetensors", arrays, {})
  (folder / "config.json").write_text(json.dumps(config))
  about, _ = hf_preprocessing.write("decode|resize(8)", (8, 8))
  about = json.dumps(about | {"image_mean": [0.4, 0.5, 0.6]})
  (folder / "preprocessor_config.json").write_text(about)


def _build_index(folder):
  from vit_jax.weights import safetensors_file
  from vit_jax.weights.safetensors_file import open_safetensors

  _build_hf(folder)
  whole = folder / "model.safetensors"
  arrays = {k: np.asarray(v) for k, v in open_safetensors(whole)[0].items()}
  whole.unlink()
  parts = {}
  for i in (0, 1):
    part = dict(list(arrays.items())[i::2])
    safetensors_file.write(folder / f"model-{i}.safetensors", part, {})
    parts |= dict.fromkeys(part, f"model-{i}.safetensors")
  index = folder / "model.safetensors.index.json"
  index.write_text(json.dumps({"metadata": {}, "weight_map": parts}))


def _build_torch(folder):
  data = pickle.dumps({"state_dict": {"cls": [0.0] * 9}})
  with zipfile.ZipFile(folder / "x.pth", "w") as archive:
    archive.writestr("archive/data.pkl", data)
    archive.writestr("archive/data/0", bytes(64))


def _build_pickle(folder):
  (folder / "x.bin").write_bytes(pickle.dumps({"cls": [0.0] * 9}))


def _build_onnx(folder):
  (folder / "x.onnx").write_bytes(b"\x08\x07\x12\x07vit_jax" + bytes(99))


def _build_checkpoint(folder):
  from flax.traverse_util import unflatten_dict

  from vit_jax.checkpointing import checkpointer

  metadata = {"config": {"model": to_dict(_model(**VIT))}, "grid": [2, 2]}
  metadata |= {"image_size": [8, 8], "class_names": ["a", "b", "c"], "step": 3}
  metadata |= {"preprocessing": {"ops": "decode|resize(8)"}}
  params = unflatten_dict(_params(), sep="/")
  checkpointer.write_params(str(folder / "3"), params, metadata)


def _build_orbax(folder):
  import orbax.checkpoint as ocp
  from flax.traverse_util import unflatten_dict

  tree = unflatten_dict(_params(), sep="/")
  with ocp.StandardCheckpointer() as writer:
    writer.save(folder.resolve() / "tree", tree)


def _build_zarr(folder):
  """As older programs wrote it: a folder of files for each array."""
  import orbax.checkpoint as ocp
  from flax.traverse_util import unflatten_dict

  tree = unflatten_dict(_params(), sep="/")
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as writer:
    writer.save(folder.resolve() / "tree", ocp.args.PyTreeSave(tree))


def jpeg(seed: int = 0) -> bytes:
  from PIL import Image

  pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3))
  file = io.BytesIO()
  Image.fromarray(pixels.astype(np.uint8)).save(file, "jpeg")
  return file.getvalue()


def tar_of(files: dict[str, bytes]) -> bytes:
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode="w") as tar:
    for name, data in files.items():
      info = tarfile.TarInfo(name)
      info.size = len(data)
      tar.addfile(info, io.BytesIO(data))
  return out.getvalue()


def _build_webdataset(folder, suffix=".tar"):
  import gzip

  files = {}
  for i in range(4):
    files |= {f"a/{i}.jpg": jpeg(i), f"a/{i}.cls": str(i % 2).encode()}
  data = tar_of(files)
  data = gzip.compress(data, 1) if suffix == ".tar.gz" else data
  (folder / f"train{suffix}").write_bytes(data)


def _build_21k(folder):
  for wnid in ("n00000001", "n00000002"):
    images = {f"{wnid}_{i}.JPEG": jpeg(i) for i in range(2)}
    (folder / f"{wnid}.tar").write_bytes(tar_of(images))


def _build_21k_outer(folder):
  _build_21k(folder)
  inner = {f.name: f.read_bytes() for f in sorted(folder.glob("*.tar"))}
  for name in inner:
    (folder / name).unlink()
  (folder / "all.tar").write_bytes(tar_of(inner))


def _build_parquet(folder):
  import pyarrow as pa
  from pyarrow import parquet

  features = {"label": {"names": ["x", "y"], "_type": "ClassLabel"}}
  told = json.dumps({"info": {"features": features}})
  rows = [{"bytes": jpeg(i), "path": None} for i in range(4)]
  table = pa.table({"image": rows, "label": [0, 1, 0, 1]})
  table = table.replace_schema_metadata({"huggingface": told})
  parquet.write_table(table, folder / "train.parquet")


def _imported(kind: str):
  def read(path, rng):
    from vit_jax.data.imports import KINDS, Options

    del rng
    listing = KINDS[kind].listed(str(path), Options())
    for split in listing.splits.values():
      for _ in split.entries():
        pass

  return read


def _read_21k(path, rng):
  from vit_jax.data.builders import imagenet21k

  del rng
  for _ in imagenet21k._entries(imagenet21k.class_tars(path)):
    pass


def _build_classes(folder):
  (folder / "classes.txt").write_text("x\ny\nz\n")


def _read_classes(path, rng):
  from vit_jax.commands import prepare

  del rng
  args = prepare.parse(["folder:/x", "--name=x", f"--classes={path}"])
  prepare._options(args)


def _build_run(folder):
  from vit_jax.config import Config
  from vit_jax.config import to_dict as as_dict

  config = as_dict(Config())
  config |= {"total_steps": 20, "init": "runs/other"}
  config["data"] |= {"dataset": "glyphs", "split": "train"}
  config["evals"] = {
    "val": {"kind": "classification", "dataset": "glyphs", "split": "test"},
    "few": {"kind": "fewshot", "dataset": "digits", "group": "all"},
    "each": {"kind": "per_class", "dataset": "glyphs", "split": "test"},
  }
  account = {"images_seen": 9.0, "exaflops": 1.0, "device_hours": 0.1}
  metadata = {"image_size": [8, 8], "grid": [2, 2], "class_names": ["a", "b"]}
  metadata |= {"num_params": 9, "num_examples": 99, "devices": "8 x TPU v3"}
  metadata |= {"accounting": account | {"init": account}}
  metadata |= {"versions": {"jax": "0.10"}, "num_classes": 2, "config": config}
  rows = [
    {"step": s, "time": 1e9 + s, "train/loss": 2.0 / s, "train/lr": 0.1}
    | {"train/images_per_second": 9.0, "train/mfu": 0.3, "val/top1": 0.5}
    | {"few/1shot": 0.5, "few/l2=16/5shot": 0.2, "each/ece": 0.1}
    | {"train/device_hours": 0.1, "train/peak_bytes": 9.0}
    for s in (1, 10, 20)
  ]
  process = {"host": "h", "pid": 9, "ticks": 1, "began": 1e9, "ended": None}
  classes = [
    {"class": i, "name": str(i), "count": 2, "right": 1, "predicted": 2}
    for i in range(2)
  ]
  per_class = {"classes": classes, "confusions": [[0, 1, 1]], "count": 4}
  per_class |= {"bins": [{"confidence": 0.5, "right": 0.5, "count": 4}]}
  files = {
    "config.json": config,
    "metadata.json": metadata,
    "process.json": process | {"how": None},
    "each_classes.json": per_class,
  }
  for name, values in files.items():
    (folder / name).write_text(json.dumps(values))
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / "metrics.jsonl").write_text(lines)
  image = np.zeros((2, 4, 4, 3), np.uint8)
  two = np.array([0, 1])
  np.savez(
    folder / "predictions.npz",
    **{"image": image, "prediction": two, "label": two[::-1]},
    **{"probability": np.array([0.5, 0.9]), "mistake_image": image},
    **{"mistake_prediction": two, "mistake_label": two[::-1]},
    **{"mistake_probability": np.array([0.9, 0.5])},
    **{"num_images": 4, "num_wrong": 2, "dataset": "glyphs", "split": "test"},
  )


def _read_run(path, rng):
  import vit_jax.commands.report as report
  from vit_jax.reporting import comparison, runs, summary, tables

  if rng.random() < 1 - PAGES:
    found = runs.find_runs(path)
    summary.summarise(found, path)
    tables.scores(found)
    tables.others(found)
    tables.facts(found)
    comparison.states_section(found)
    comparison.costs_section(found)
    comparison.differences_section(found * 2)
  else:
    report.write_report(str(path), out=f"{path}.page")


def _read_config(path, rng):
  """Reads as the commands do that get a run: evaluate, plan, sweep."""
  from vit_jax.config import build, cli, options_of

  del rng
  faults: list[str] = []
  values = cli._config_of(str(path), faults, ())
  if faults:
    raise ConfigError(faults)
  options_of(values)
  if faults := build(values)[1]:
    raise ConfigError(faults)


def _by_name(*names):
  return lambda path: path.name in names


READERS = {
  "npz": _npz(_paper),
  "npz_big_vision": _npz(_big_vision),
  "npz_bit": _npz(_bit),
  "npy": Reader(_build_npy, _weights, "x.npy", is_refused=True),
  "timm": Reader(_build_timm, _weights, "model.safetensors"),
  "timm_config": Reader(
    _build_timm_config, _weights, "", _by_name("config.json")
  ),
  "hf": Reader(_build_hf, _weights),
  "index": Reader(_build_index, _weights),
  "torch_zip": Reader(_build_torch, _weights, "x.pth", is_refused=True),
  "torch_pickle": Reader(_build_pickle, _weights, "x.bin", is_refused=True),
  "onnx": Reader(_build_onnx, _weights, "x.onnx", is_refused=True),
  "checkpoint": Reader(_build_checkpoint, _weights, "3"),
  "orbax": Reader(_build_orbax, _weights, "tree"),
  "zarr": Reader(_build_zarr, _weights, "tree"),
  "webdataset": Reader(_build_webdataset, _imported("webdataset:")),
  "webdataset_gz": Reader(
    lambda folder: _build_webdataset(folder, ".tar.gz"),
    _imported("webdataset:"),
  ),
  "imagenet21k": Reader(_build_21k, _read_21k),
  "imagenet21k_outer": Reader(_build_21k_outer, _read_21k),
  "parquet": Reader(_build_parquet, _imported("parquet:")),
  "classes": Reader(_build_classes, _read_classes, "classes.txt"),
  "run": Reader(_build_run, _read_run),
  "config": Reader(_build_run, _read_config, "", _by_name("config.json")),
}
