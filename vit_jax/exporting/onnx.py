"""Models as ONNX files: written by jax2onnx, run by onnxruntime.

Both are installed separately, as the extra "onnx". `vit_jax.load` does not read
such a file.
"""

import contextlib
import io
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

PACKAGES = ("jax2onnx", "onnx", "onnxruntime")
INPUT = "images"
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
) -> list[str]:
  """Writes a function of images, with the arrays that it holds.

  Its input is `images`, float32 [batch, height, width, 3] in [-1, 1], of 1 or
  more images: onnxruntime may end the process where there are none.

  Args:
    path: A new file on this machine.
    apply: Maps images to a float32 array [batch, n], in jax.
    image_shape: Height and width in pixels, and channels.
    output: Name of what it returns.
    num_bytes: Size of its arrays; above `MAX_BYTES` they become a second file,
      the name with ".data" at its end, which must stay beside the first.
    properties: Written as `metadata_props`: texts as they are, the rest as
      JSON.

  Returns:
    The files' names.

  Raises:
    ValueError: The path is in a bucket.
  """
  import jax2onnx
  import onnx

  path = os.fspath(path)
  if "://" in path:
    raise ValueError(
      f"DST: got {path!r}, expected a path on this machine: the library that"
      " writes ONNX knows no buckets. Copy the file there afterwards."
    )
  for name in ("jax2onnx", "onnx_ir"):  # they warn of what is not used here
    logging.getLogger(name).setLevel(logging.ERROR)
  with contextlib.redirect_stdout(io.StringIO()):
    model = jax2onnx.to_onnx(
      apply,
      [("batch", *image_shape)],
      model_name="vit_jax",
      input_names=[INPUT],
      output_names=[output],
    )
  onnx.helper.set_model_props(
    model,
    {
      key: value
      if isinstance(value, str)
      else json.dumps(value, ensure_ascii=False)
      for key, value in properties.items()
    },
  )
  os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
  name = os.path.basename(path)
  if num_bytes <= MAX_BYTES:
    onnx.save(model, path)
    return [name]
  onnx.save(model, path, save_as_external_data=True, location=f"{name}.data")
  return [name, f"{name}.data"]


def read(path: str | os.PathLike) -> Callable[[np.ndarray], np.ndarray]:
  """Returns the function of images [b, h, w, 3] in a file; it uses the CPU."""
  import onnxruntime

  options = onnxruntime.SessionOptions()
  options.log_severity_level = 3  # errors
  session = onnxruntime.InferenceSession(
    os.fspath(path), options, providers=["CPUExecutionProvider"]
  )
  return lambda images: session.run(None, {INPUT: images})[0]
