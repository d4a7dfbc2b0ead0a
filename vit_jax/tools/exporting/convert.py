"""Writes weights in another format: `vit-jax convert SRC DST --to=FORMAT`.

SRC is anything that `vit_jax.load` reads. The written file is read again, and
its logits are compared with those of SRC.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict

import vit_jax
from vit_jax import weights
from vit_jax.checkpointing import checkpointer
from vit_jax.distributed import processes
from vit_jax.finetune import lora_base
from vit_jax.finetune.lora import is_trained
from vit_jax.inference.pretrained import Pretrained, with_head
from vit_jax.models.stacking import unstack_blocks
from vit_jax.options import not_installed, unexpected
from vit_jax.paths import is_remote
from vit_jax.tools.exporting import model_card, onnx
from vit_jax.weights import as_npz, assumptions, safetensors_file
from vit_jax.weights.reading import read_checkpoint
from vit_jax.weights.weights_file import METADATA_KEY
from vit_jax.zoo.files import (
  hf_classes,
  hf_preprocessing,
  openclip,
  peft,
  timm,
  timm_names,
  torch_file,
)

# Largest difference / largest logit. Float32 sums in another order differ by
# 1e-5 in the deepest models; a wrong computation differs far more.
TOLERANCE = 1e-3
# With float16, which rounds at 5e-4: the largest seen is 2e-3.
FP16_TOLERANCE = 2e-2
CARD = "README.md"
HALF = "images are in [-1, 1]: mean 0.5, deviation 0.5"
PAGE = "docs/tasks/convert.md"
# Platforms that the StableHLO runs on.
PLATFORMS = ("cpu", "cuda", "tpu")


def convert(vit: Pretrained, path: str, to: str, **options) -> list[str]:
  """Writes a model in another format.

  Args:
    vit: A model from `vit_jax.load`.
    path: A new folder for "orbax", "hf" and "peft", a new file for the others.
    to: Name of the format, a key of `WRITERS`.
    **options: For "onnx": opset and fp16, see `exporting.onnx.write`.

  Returns:
    Notes for the user: how the other library loads the file, and differences.

  Raises:
    FileExistsError: The path exists.
    ValueError: The format has no place for a part of the model, the libraries
      that write it are not installed, or the path cannot be written.
  """
  check(path, to)
  vit = dataclasses.replace(  # no format has stacked blocks
    vit,
    params=unstack_blocks(vit.params, vit.config),
    config=vit.config.unstacked(),
  )
  params = {
    k: np.asarray(v) for k, v in flatten_dict(vit.params, sep="/").items()
  }
  with whole_or_none(path):
    return WRITERS[to].write(vit, params, epath.Path(path), **options)


def check(path: str, to: str) -> None:
  """Checks path and libraries before a model is loaded.

  Args:
    path, to: See `convert`.

  Raises:
    FileExistsError: The path exists.
    ValueError: Libraries are missing, or the path cannot be written.
  """
  if error := not_installed(WRITERS[to].packages, WRITERS[to].extra):
    raise ValueError(f"--to={to}: {error}")
  check_destination(path, WRITERS[to].suffix)


def check_destination(path: str, suffix: str | None) -> None:
  """Checks that a new file or folder can be written there.

  Args:
    path: A new file or folder; the folders above it need not exist.
    suffix: Ending that the name must have; None: any.

  Raises:
    FileExistsError: The path exists.
    ValueError: The name has another suffix, or the folder cannot be written to.
      A bucket is not checked.
  """
  target = epath.Path(path)
  for part in _parts(path):
    if part.exists():
      raise FileExistsError(f"DST: got {str(part)!r}, which exists.")
  if suffix and target.suffix != suffix:
    raise ValueError(f"DST: got {path!r}, expected a name ending in {suffix}.")
  if is_remote(path):
    return
  parents = pathlib.Path(path).absolute().parents
  folder = next(p for p in parents if os.path.exists(p))
  if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
    raise ValueError(f"DST: got {path!r}, but {folder} cannot be written to.")


@contextlib.contextmanager
def whole_or_none(path: str) -> Iterator[None]:
  """Removes a new file or folder if the body raises.

  Args:
    path: File or folder that the body writes; it passed `check_destination`.
  """
  try:
    yield
  except FileExistsError:  # another process wrote it
    raise
  except BaseException:  # Ctrl-C, too
    with contextlib.suppress(OSError):
      for part in _parts(path):
        if part.is_dir():
          part.rmtree()
        else:
          part.unlink(missing_ok=True)
    raise


def _parts(path: str) -> list[epath.Path]:
  """Returns the file or folder, and the second file that ONNX may write."""
  more = [f"{path}.data"] if path.endswith(".onnx") else []
  return [epath.Path(part) for part in (path, *more)]


def _write_orbax(vit: Pretrained, params, target: epath.Path) -> list[str]:
  del params  # the tree itself is written
  checkpointer.write_params(str(target), vit.params, vit.metadata())
  return [
    f"vit_jax.load({str(target)!r}), --config.init={target}, or Orbax alone:"
    f" see {PAGE}"
  ]


def _write_npz(vit: Pretrained, params, target: epath.Path) -> list[str]:
  arrays, reader = as_npz.write(params, vit.config)
  data = io.BytesIO()  # files in a bucket have no positions
  np.savez(data, **arrays)
  target.parent.mkdir(parents=True, exist_ok=True)
  target.write_bytes(data.getvalue())
  return [
    f"under the names of {reader}",
    *as_npz.notes(
      missing_arguments(vit),
      vit.num_classes,
      vit.class_names,
      vit.ops,
      vit.image_size,
    ),
  ]


def missing_arguments(vit: Pretrained) -> dict[str, Any]:
  """Returns the arguments that `vit_jax.load` needs for a model's `.npz`."""
  return as_npz.missing_arguments(
    flatten_dict(vit.params, sep="/"),
    vit.config,
    image_size=vit.image_size,
    num_classes=vit.num_classes,
    loss=vit.loss,
    posemb_filter=vit.posemb_filter,
  )


def _write_arrays(
  vit: Pretrained,
  arrays: dict[str, np.ndarray],
  target: epath.Path,
  write: Callable[..., None],
) -> None:
  """Writes a file of arrays with our metadata, from which `load` reads it."""
  target.parent.mkdir(parents=True, exist_ok=True)
  write(target, arrays, {METADATA_KEY: vit.metadata()})


def _write_timm(vit: Pretrained, params, target: epath.Path) -> list[str]:
  grid = vit.config.grid(vit.image_size)
  arrays = timm.write(params, vit.config, grid=grid)
  _write_arrays(vit, arrays, target, safetensors_file.write)
  name, kwargs = timm_names.create_call(
    vit.config, vit.num_classes, vit.image_size
  )
  if name is None:
    call = f"timm has no name for this model; to build it there: {PAGE}"
  else:
    text = "".join(f", {k}={v!r}" for k, v in kwargs.items())
    call = f"timm.create_model({name!r}, checkpoint_path={str(target)!r}{text})"
  return [call, HALF, *timm_names.differences(vit.config)]


def _of_hf(vit: Pretrained, params) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns arrays and config.json.

  Raises:
    ValueError: transformers has no class for the model.
  """
  return hf_classes.write(
    params,
    vit.config,
    num_classes=vit.num_classes,
    image_size=vit.image_size,
    class_names=vit.class_names,
    grid=vit.config.grid(vit.image_size),
    loss=vit.loss,
  )


def _write_meta(vit: Pretrained, params, target: epath.Path) -> list[str]:
  arrays = timm.write_meta(params, vit.config)
  _write_arrays(vit, arrays, target, torch_file.write)
  return [
    f"torch.load({str(target)!r})['model']; {HALF}",
    *timm_names.differences(vit.config),
  ]


def _write_openclip(vit: Pretrained, params, target: epath.Path) -> list[str]:
  arrays = openclip.write(params, vit.config)
  _write_arrays(vit, arrays, target, safetensors_file.write)
  return [
    f"the image tower alone; {HALF}",
    *timm_names.differences(vit.config),
  ]


def _write_hf(vit: Pretrained, params, target: epath.Path) -> list[str]:
  arrays, config = _of_hf(vit, params)
  preprocessor, ops = hf_preprocessing.write(vit.ops, vit.image_size)
  target.mkdir(parents=True)
  safetensors_file.write(target / "model.safetensors", arrays, {})
  for name, values in (
    ("config.json", config),
    (hf_preprocessing.FILE, preprocessor),
  ):
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (target / name).write_text(text + "\n")
  (target / CARD).write_text(model_card.text(vit, str(target)))
  (kind,) = config["architectures"]
  notes = [f"transformers.{kind}.from_pretrained({str(target)!r})"]
  if ops != vit.ops:
    notes.append(
      f"preprocessing there: {ops}, transformers' nearest to {vit.ops}"
    )
  chosen = vit.posemb_filter
  if (
    assumptions.has_positions(params)
    and weights.read(target).posemb_filter != chosen
  ):
    load = f"vit_jax.load({str(target)!r}, posemb_filter={chosen!r})"
    notes.append(f"{load} resizes positions as before")
  return notes


def _write_peft(vit: Pretrained, params, target: epath.Path) -> list[str]:
  folder = epath.Path(vit.report.path)
  run = read_checkpoint(folder) if folder.is_dir() else None
  if run is None or not lora_base.is_on_base(run.metadata):
    expected = "hf, as SRC is no run with config.lora.rank"
    raise ValueError(unexpected("--to", "peft", expected))
  (kind,) = _of_hf(vit, params)[1]["architectures"]
  if kind not in peft.CLASSES:
    expected = f"hf, as peft is written for {', '.join(peft.CLASSES)} alone"
    raise ValueError(unexpected("--to", f"peft for {kind}", expected))
  head = {
    k: np.asarray(v)
    for k, v in run.params.items()
    if is_trained(k, vit.config) and vit.num_classes
  }
  base = run.metadata["base"]["path"]
  has_gate = getattr(vit.config, "mlp", "gelu") == "swiglu"
  arrays, config = peft.write(
    lora_base.factors_of(run), head, base, kind, has_gate
  )
  target.mkdir(parents=True)
  safetensors_file.write(target / peft.ARRAYS, arrays, {})
  (target / peft.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
  model = f"transformers.{kind} of the base"
  if not (epath.Path(base) / "config.json").exists():
    model += f", which `vit-jax convert {base} DST --to=hf` writes"
  if head:
    model += f", with {vit.num_classes} labels"
  notes = [
    f"peft.PeftModel.from_pretrained(model, {str(target)!r})",
    f"model: {model}",
  ]
  if mean := run.metadata["base"]["mean"]:
    notes.append(f"vit_jax.load({str(target)!r}, mean={mean!r})")
  return notes


def _write_onnx(
  vit: Pretrained, params, target: epath.Path, **options
) -> list[str]:
  layer = _layer(vit)
  files = onnx.write(
    target,
    lambda images: vit.model.apply({"params": vit.params}, images)[0],
    image_shape=vit.image_shape,
    output=layer,
    num_bytes=sum(array.nbytes for array in params.values()),
    properties=vit.metadata(),
    **options,
  )
  return [
    f"onnxruntime.InferenceSession({str(target)!r}).run(None, "
    f"{{{onnx.INPUT!r}: images}})",
    _signature(vit, layer),
    *(f"{name} holds the weights; keep it beside" for name in files[1:]),
  ]


def _write_stablehlo(vit: Pretrained, params, target: epath.Path) -> list[str]:
  del params
  target.parent.mkdir(parents=True, exist_ok=True)
  target.write_bytes(vit.export(PLATFORMS))
  return [
    "jax.export.deserialize(bytearray(open"
    f"({str(target)!r}, 'rb').read())).call(images)",
    _signature(vit, _layer(vit)),
    f"for {', '.join(PLATFORMS)}; jax alone runs it",
  ]


def _signature(vit: Pretrained, layer: str) -> str:
  images = jax.ShapeDtypeStruct((1, *vit.image_shape), np.float32)
  outputs = jax.eval_shape(vit, images)[0].shape[1]
  return (
    f"images float32 [1 or more, {', '.join(map(str, images.shape[1:]))}] in"
    f" [-1, 1] -> {layer} [as many, {outputs}]"
  )


def _layer(vit: Pretrained) -> str:
  """Returns the name of the first result of a model's call."""
  return "logits" if vit.num_classes else "pre_logits"


# A forward pass: images [b, h, w, 3] -> logits, or pre_logits without a head.
Apply = Callable[[np.ndarray], np.ndarray]


def _load(vit: Pretrained, path: str) -> Apply:
  # A .npz does not state all that is known here.
  options = missing_arguments(vit) if path.endswith(".npz") else {}
  options["image_size"] = vit.image_size
  again = vit_jax.load(path, verbose=False, **options)
  return lambda images: again(images)[0]


def _load_peft(vit: Pretrained, path: str) -> Apply:
  run = read_checkpoint(epath.Path(vit.report.path))
  size, mean = vit.image_size, run.metadata["base"]["mean"]
  again = vit_jax.load(path, verbose=False, image_size=size, mean=mean)
  # The base may have a head that the adapter lacks.
  return lambda images: again(images)[1][_layer(vit)]


def _load_onnx(vit: Pretrained, path: str) -> Apply:
  del vit
  return onnx.read(path)


def _load_stablehlo(vit: Pretrained, path: str) -> Apply:
  del vit
  return jax.export.deserialize(bytearray(epath.Path(path).read_bytes())).call


class Writer(NamedTuple):
  """How a format is written.

  write: (model, flat parameters, path, **options) -> notes for the user.
  suffix: Ending of the file name; None: the format is a folder.
  read: (written model, path) -> forward pass of the file.
  packages: Modules that must be installed.
  extra: Name of the extra that installs them.
  """

  write: Callable[..., list[str]]
  suffix: str | None = None
  read: Callable[[Pretrained, str], Apply] = _load
  packages: tuple[str, ...] = ()
  extra: str = ""


WRITERS = {
  "orbax": Writer(_write_orbax),
  "npz": Writer(_write_npz, ".npz"),
  "timm": Writer(_write_timm, ".safetensors"),
  "meta": Writer(_write_meta, ".pth"),
  "openclip": Writer(_write_openclip, ".safetensors"),
  "hf": Writer(_write_hf),
  "peft": Writer(_write_peft, read=_load_peft),
  "onnx": Writer(_write_onnx, ".onnx", _load_onnx, onnx.PACKAGES, "onnx"),
  "stablehlo": Writer(_write_stablehlo, ".stablehlo", _load_stablehlo),
}


def without_head(vit: Pretrained, to: str) -> Pretrained:
  """Removes the heads and, for timm, the tanh layer before them."""
  vit = with_head(vit, 0)
  if to != "timm" or not getattr(vit.config, "pre_logits", False):
    return vit
  return dataclasses.replace(
    vit,
    config=dataclasses.replace(vit.config, pre_logits=False),
    params={k: v for k, v in vit.params.items() if k != "pre_logits"},
  )


def largest_difference(vit: Pretrained, again: Apply) -> tuple[float, float]:
  """Compares a model with a forward pass, on the same random images.

  Returns:
    The largest difference of the logits (without a head, of pre_logits), and
    their largest absolute value.
  """
  rng = np.random.default_rng(0)
  images = rng.uniform(-1, 1, (2, *vit.image_shape)).astype(np.float32)
  with jax.default_matmul_precision("highest"):
    a, b = np.asarray(vit(images)[0]), np.asarray(again(images))
  return float(np.abs(a - b).max()), float(np.abs(a).max())


def check_push(name: str) -> None:
  """Checks that a folder can be uploaded under this name.

  Args:
    name: OWNER/NAME.

  Raises:
    ValueError: The name has another form, or there is no token.
  """
  if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
    raise ValueError(f"--push: got {name!r}, expected OWNER/NAME.")
  import huggingface_hub

  if huggingface_hub.get_token() is None:
    raise ValueError("--push: got no token, expected `hf auth login`.")


def push(folder: str | os.PathLike, name: str) -> str:
  """Uploads all files of a folder as one commit, and returns the address.

  A new repository is private. An existing repository keeps its visibility and
  its other files.

  Args:
    folder: A local folder.
    name: OWNER/NAME.

  Raises:
    ValueError: The hub or the network refused.
  """
  import huggingface_hub

  api = huggingface_hub.HfApi()
  try:
    url = api.create_repo(name, private=True, exist_ok=True)
    api.upload_folder(
      repo_id=name,
      folder_path=os.fspath(folder),
      commit_message="Written by vit_jax",
    )
  except Exception as e:  # its HTTP library has errors of its own
    raise ValueError(
      f"--push: got {e or type(e).__name__}\n{folder} is complete: upload it"
      f" later with `hf upload {name} {folder}`."
    ) from None
  return str(url)


def run(args: argparse.Namespace) -> None:
  """Loads a model, writes it, reads it again, and prints a report of each.

  Args:
    args: The command line of `vit-jax convert`.

  Raises:
    OSError, ValueError: The model cannot be read, written or uploaded; or the
      written model has other logits.
  """
  names = ("num_heads", "cls_row", "gelu", "posemb")
  options = {n: v for n in names if (v := getattr(args, n)) is not None}
  if args.push:
    check_push(args.push)
  check(args.dst, args.to)
  vit = vit_jax.load(
    args.src,
    image_size=args.image_size,
    patch=args.patch,
    grid=args.grid,
    posemb_filter=args.posemb_filter,
    mean=args.mean,
    **options,
  )
  print(f"{'model':<16}{weights.describe(vit.config)}")
  size = "x".join(map(str, vit.image_size))
  print(f"{'images':<16}{size}, {vit.ops}")
  if args.drop_head:
    vit = without_head(vit, args.to)
  names = ("opset", "fp16")
  written = {n: v for n in names if (v := getattr(args, n)) is not None}
  notes = convert(vit, args.dst, args.to, **written)
  tolerance = FP16_TOLERANCE if args.fp16 else TOLERANCE
  with whole_or_none(args.dst):
    again = WRITERS[args.to].read(vit, args.dst)
    difference, largest = largest_difference(vit, again)
    if not difference <= tolerance * largest:
      raise ValueError(
        f"{args.dst}: got {_layer(vit)} that differ by {difference:.2g} from"
        f" SRC's, expected at most {tolerance:g} of {largest:.3g}."
        + (" Leave out --fp16." if args.fp16 else "")
      )
  if args.push:
    readme = model_card.text(vit, args.push, is_on_hub=True)
    (epath.Path(args.dst) / CARD).write_text(readme)
    notes.append(f"uploaded to {push(args.dst, args.push)}")
  print(f"{'written':<16}{args.dst}")
  for note in notes:
    print(f"{'':<16}{note}")
  print(
    f"{'read again':<16}largest difference of {_layer(vit)}"
    f" {difference:.2g}, of {largest:.3g}"
  )


def main(args: argparse.Namespace) -> None:
  """Runs the command; if it fails, the process ends with the error."""
  processes.refuse_several_hosts()
  try:
    run(args)
  except BrokenPipeError:  # the reader of the output has ended
    raise
  except (OSError, ValueError) as e:
    if getattr(e, "errno", None) is None:  # an error of ours
      sys.exit(str(e))
    sys.exit(f"{e.filename or args.dst}: {e.strerror}.")
