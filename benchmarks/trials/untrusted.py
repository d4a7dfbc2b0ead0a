"""Files that others wrote: damaged ones, and those that mean to do harm."""

import pathlib
import sys

from trials.trial import Trial

TESTS = pathlib.Path(__file__).resolve().parents[2] / "tests"
MIB = 2**20
# Reader -> files. Those of Orbax, and pages of runs, take the longest.
COUNTS = {
  **{"npz": 1500, "npz_big_vision": 400, "npz_bit": 250, "npy": 600},
  **{"timm": 1500, "timm_config": 500, "hf": 1200, "index": 700},
  **{"torch_zip": 300, "torch_pickle": 300, "onnx": 200},
  **{"checkpoint": 400, "orbax": 200, "zarr": 200},
  **{"webdataset": 900, "webdataset_gz": 400, "parquet": 700},
  **{"imagenet21k": 250, "imagenet21k_outer": 250, "classes": 300},
  **{"run": 800, "config": 500},
}


def _hostile():
  sys.path[:0] = [str(TESTS)] * (str(TESTS) not in sys.path)
  import hostile

  return hostile


def _figure(found) -> str:
  """Returns what came of the files; raises AssertionError for a fault."""
  hostile = _hostile()
  faults, of = found["faults"], found["readers"]
  assert not faults, f"{len(faults)} files, such as {'; '.join(faults[:3])}"
  seconds = max(v["seconds"] for v in of.values())
  memory = max(v["memory"] for v in of.values())
  read = sum(v.get("read", 0) for v in of.values())
  refused = sum(v.get("refused", 0) for v in of.values())
  return (
    f"{read + refused:,} files: {read:,} read, {refused:,} refused in words;"
    f" at most {seconds:.1f} s of a CPU (limit {hostile.SECONDS:.0f}) and"
    f" {memory / MIB:,.0f} MiB of memory (limit: twice the files and"
    f" {hostile.CONSTANT / MIB:,.0f} MiB)"
  )


def mutations(folder: pathlib.Path, seed: int) -> str:
  """Reads damaged files; a quarter of them as Hypothesis drew them."""
  found = _hostile().run(folder, COUNTS, seed, 1100)
  of = {
    name: v.get("read", 0) + v.get("refused", 0)
    for name, v in found["readers"].items()
  }
  listed = ", ".join(f"{name} {count:,}" for name, count in of.items())
  return f"seed {seed}; {_figure(found)}; {listed}"


def attacks(folder: pathlib.Path, seed: int) -> str:
  """Reads pickles, bombs, links, and headers that state too much."""
  hostile = _hostile()
  found = hostile.run(folder, dict.fromkeys(COUNTS, 0), seed, 600)
  text = _figure(found)
  trace = folder / "was_here"
  assert not trace.exists(), "a pickle was loaded"
  return f"{text}; no pickle was loaded"


SMALL = "tests/test_untrusted.py::test_damaged_files_end_in_words"
TRIALS = (
  Trial(
    "untrusted.damaged",
    "A damaged file of weights, of a checkpoint, of a run or of a data set is"
    " read, or refused in words that say what was expected.",
    mutations,
    small=SMALL,
    seconds=240,
  ),
  Trial(
    "untrusted.attacks",
    "Nothing in a file is unpickled, no name or link leads out of its folder,"
    " and no header takes memory for what it states.",
    attacks,
    small="tests/test_untrusted.py::test_json_beyond_its_limits",
    seconds=60,
  ),
)
