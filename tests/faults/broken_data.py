"""Broken data: right pixels, or named, counted and limited; memory bounded."""

import os
import pathlib
import subprocess
import sys

from faults import runs
from faults.trial import trial

sys.path.append(str(runs.ROOT / "tests" / "data"))

OPS = "decode|resize((24, 40))"
# An image at the limit is decoded to 3 bytes a pixel; the decoder, the file and
# what resizing needs come on top.
MOST_BOMB_MB, MOST_BYTES_A_PIXEL = 64, 20


@trial(
  "No header makes the input take memory: at most 89,478,485 pixels an image"
  " are decoded.",
  seconds=40,
)
def bombs(folder: pathlib.Path, seed: int) -> str:
  """The memory of a process that reads bombs, and images at the limit."""
  import kinds as files
  from PIL import Image

  from vit_jax.data.images import MAX_PIXELS

  del seed
  plain = {f"{i}.png": files.encoded(files.photo(), "PNG") for i in range(2000)}
  bad = {n: data for n, (data, _) in files.broken().items() if "bomb" in n}
  side = int(MAX_PIXELS**0.5)
  # Progressive and to be turned, which takes most.
  large = Image.linear_gradient("L").resize((side, side)).convert("RGB")
  _write(folder / "plain", plain)
  _write(folder / "bombs", plain | bad)
  turned = files.oriented("JPEG", 6, large, progressive=True)
  _write(folder / "large", plain | {"large.jpg": turned})
  usual, with_bombs, with_large = (
    _peak(folder / name) for name in ("plain", "bombs", "large")
  )
  more = (with_bombs - usual) / 1e6
  assert more < MOST_BOMB_MB, f"bombs took {more:.0f} MB"
  a_pixel = (with_large - usual) / side**2
  assert a_pixel < MOST_BYTES_A_PIXEL, f"{a_pixel:.1f} bytes a pixel"
  return (
    f"{len(bad)} bombs, of up to 4.3 billion pixels by their headers:"
    f" {max(0.0, more):.0f} MB more than without; an image of {side:,} x"
    f" {side:,} pixels, the most allowed, progressive and turned: {a_pixel:.1f}"
    " bytes a pixel"
  )


def _write(root: pathlib.Path, files: dict[str, bytes]) -> None:
  for i, (name, data) in enumerate(files.items()):
    path = root / "ab"[i % 2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


PEAK = """
import resource, sys
from vit_jax.data import pipeline, sources
source = sources.open_source("folder:" + sys.argv[1], "train+val")
for batch in pipeline.eval_batches(source, sys.argv[2], batch_size=64):
  pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def _peak(root: pathlib.Path) -> int:
  """Returns the peak memory of a process that reads a folder, in bytes."""
  done = subprocess.run(
    [sys.executable, "-c", PEAK, str(root), OPS],
    env=os.environ | {"PYTHONPATH": str(runs.ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return int(done.stdout)
