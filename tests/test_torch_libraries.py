"""Libraries that import torchvision, where it works, fails, or is absent."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"

TIMM = """
from torchvision import transforms
from torchvision.ops.misc import FrozenBatchNorm2d
import torchvision.transforms.functional as F
import torchvision

MODES = {F.InterpolationMode.BILINEAR: 1, F.InterpolationMode.BICUBIC: 2}

class Crop(transforms.CenterCrop):
  pass

def is_frozen(x):
  return isinstance(x, FrozenBatchNorm2d)

def augment():
  return torchvision.transforms.Compose([])
"""

TRANSFORMERS = """
import importlib.util

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
if HAS_TORCHVISION:
  import torchvision
"""

CODE = """
import json, sys, torch_libraries
found = {}
for name in sys.argv[1:]:
  module = torch_libraries.load(name)
  if name == "timm":
    found["modes"] = len(module.MODES)
    found["is_frozen"] = module.is_frozen(3)
    try:
      found["augment"] = module.augment()
    except ImportError as e:
      found["augment"] = str(e)
  else:
    found["has_torchvision"] = module.HAS_TORCHVISION
print(json.dumps(found))
"""

WORKING = {
  "__init__.py": "from . import ops, transforms",
  "ops/__init__.py": "",
  "ops/misc.py": "class FrozenBatchNorm2d: pass",
  "transforms/__init__.py": "class CenterCrop: pass\nCompose = len",
  "transforms/functional.py": "import enum\n"
  "InterpolationMode = enum.Enum('InterpolationMode', 'BILINEAR BICUBIC')",
}
BROKEN = WORKING | {
  "__init__.py": "from . import ops\n"
  "raise RuntimeError('operator torchvision::nms does not exist')"
}


def write(folder, files):
  for name, text in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("names", [("timm", "hf"), ("hf", "timm")])
@pytest.mark.parametrize("kind", ["works", "broken", "absent"])
def test_they_are_imported(tmp_path, kind, names):
  write(tmp_path, {"timm.py": TIMM, "hf.py": TRANSFORMERS})
  if kind != "absent":
    files = WORKING if kind == "works" else BROKEN
    write(tmp_path / "torchvision", files)
  done = subprocess.run(
    # Without the installed packages, of which torchvision may be one.
    [sys.executable, "-S", "-c", CODE, *names],
    capture_output=True,
    text=True,
    env={"PYTHONPATH": f"{tmp_path}:{BENCHMARKS}"},
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found["modes"] == 2 and found["is_frozen"] is False
  assert found["has_torchvision"] == (kind == "works")
  if kind == "works":
    assert found["augment"] == 0
  else:
    assert found["augment"].startswith("torchvision: absent, or built for")


def test_another_fault_is_told(tmp_path):
  write(tmp_path, {"timm.py": "raise ValueError('of its own')"})
  done = subprocess.run(
    [sys.executable, "-S", "-c", CODE, "timm"],
    capture_output=True,
    text=True,
    env={"PYTHONPATH": f"{tmp_path}:{BENCHMARKS}"},
  )
  assert "ValueError: of its own" in done.stderr
