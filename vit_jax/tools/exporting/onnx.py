"""Writes models as ONNX files with jax2onnx; runs them with onnxruntime.

The extra "onnx" installs both. `vit_jax.load` does not read ONNX files.
"""

import contextlib
import io
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vit_jax.options import unexpected
from vit_jax.paths import is_remote

PACKAGES = ("jax2onnx", "onnx", "onnxruntime")
INPUT = "images"
OPSET = 23
GELU_OPSET = 20  # the first opset with GELU as an operator
OPSETS = (
  "17 or later for a ViT, 21 or later for group norms (BiT, hybrids);"
  f" {OPSET} is the default"
)
# A protocol buffer holds 2 GiB; the weights of a larger model are beside it.
MAX_BYTES = 1_900_000_000


def write(
  path: str | os.PathLike,
  apply: Callable[[Any], Any],
  *,
  image_shape: tuple[int, int, int],
  output: str,
  num_bytes: int,
  properties: Mapping[str, Any],
  opset: int = OPSET,
  fp16: bool = False,
) -> list[str]:
  """Writes a function of images, with its arrays.

  The input is `images`, float32 [batch, height, width, channels] in [-1, 1],
  with one or more images; onnxruntime may end the process for an empty batch.

  Args:
    path: A new file on this machine.
    apply: Maps images to a float32 array [batch, n], in jax.
    image_shape: Height and width in pixels, and channels.
    output: Name of the output.
    num_bytes: Bytes of the arrays. Above `MAX_BYTES` they are in a second file,
      whose name ends in ".data", and which must be in the same folder.
    properties: Values for `metadata_props`; values other than text become JSON.
    opset: Version of ONNX's operators.
    fp16: Whether weights and products are float16; images and outputs are
      float32.

  Returns:
    The names of the files.

  Raises:
    ValueError: The path is in a bucket, onnx does not know the opset, or the
      opset lacks operators of the model. Nothing is written.
  """
  import jax2onnx
  import onnx
  import onnx.inliner

  path = os.fspath(path)
  if is_remote(path):
    raise ValueError(f"DST: got {path!r}, expected a path on this machine.")
  if opset > (newest := onnx.defs.onnx_opset_version()):
    expected = f"at most {newest} with onnx {onnx.__version__}: {OPSETS}"
    raise ValueError(unexpected("--opset", opset, expected))
  for name in ("jax2onnx", "onnx_ir"):  # they warn of what is not used here
    logging.getLogger(name).setLevel(logging.ERROR)
  with contextlib.redirect_stdout(io.StringIO()):
    model = jax2onnx.to_onnx(
      apply,
      [("batch", *image_shape)],
      opset=opset,
      model_name="vit_jax",
      input_names=[INPUT],
      output_names=[output],
    )
  # jax2onnx writes Gelu also for an opset that lacks it.
  if opset < GELU_OPSET and num_bytes <= MAX_BYTES:
    (version,) = model.opset_import
    version.version = GELU_OPSET  # its definition of Gelu uses older operators
    model = onnx.inliner.inline_selected_functions(
      model, [("", "Gelu")], inline_schema_functions=True
    )
    model.opset_import[0].version = opset
  if fp16:
    from onnxruntime.transformers import float16, onnx_model

    # Inference of shapes would serialise the model, at most 2 GiB.
    model = float16.convert_float_to_float16(
      model, keep_io_types=True, disable_shape_infer=num_bytes > MAX_BYTES
    )
    onnx_model.OnnxModel(model).topological_sort()  # its casts are at the end
    num_bytes //= 2
  onnx.helper.set_model_props(
    model,
    {
      key: value
      if isinstance(value, str)
      else json.dumps(value, ensure_ascii=False)
      for key, value in properties.items()
    },
  )
  if num_bytes <= MAX_BYTES:  # the checker would serialise a larger one, too
    try:
      onnx.checker.check_model(model)
    except onnx.checker.ValidationError as e:
      why = str(e).strip().splitlines()[0][:300]
      raise ValueError(unexpected("--opset", opset, OPSETS, why)) from None
  os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
  name = os.path.basename(path)
  if num_bytes <= MAX_BYTES:
    onnx.save(model, path)
    return [name]
  onnx.save(model, path, save_as_external_data=True, location=f"{name}.data")
  return [name, f"{name}.data"]


def read(path: str | os.PathLike) -> Callable[[np.ndarray], np.ndarray]:
  """Returns the function of images [b, h, w, channels] in a file, on the CPU.

  Raises:
    ValueError: onnxruntime cannot run the file, for example because the opset
      is too old.
  """
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.log_severity_level = 3  # errors
  try:
    session = onnxruntime.InferenceSession(
      os.fspath(path), options, providers=["CPUExecutionProvider"]
    )
  except Exception as e:  # its errors have no type in common
    raise ValueError(
      f"{path}: got {str(e).splitlines()[0][:300]} from onnxruntime, expected"
      f" another --opset: {OPSETS}."
    ) from None
  return lambda images: session.run(None, {INPUT: images})[0]
