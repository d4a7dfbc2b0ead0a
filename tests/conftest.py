"""Set-up of every test: eight CPU devices, no silent rank promotion."""

import atexit
import collections
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# The tests compile many small programs and run each for a moment, so XLA
# optimises little: compiling well would take most of the time. Where `make`
# sets TEST_WHAT_USERS_RUN it compiles as for users.
FLAGS = ["--xla_force_host_platform_device_count=8"]
if not os.environ.get("TEST_WHAT_USERS_RUN"):
  FLAGS += [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
  ]
  if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # later ones refuse it
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The embedded data sets are made anew; a user's own are not touched.
SCRATCH = tempfile.mkdtemp(prefix="vit_jax_tests_")
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
os.environ["TFDS_DATA_DIR"] = SCRATCH
# So are the programs that XLA compiles, each once for all processes: many tests
# make the same one, and nearly all compile faster than jax keeps by default.
if "PYTEST_XDIST_WORKER" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = SCRATCH + "/xla"
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.03"

# Torch for GPUs brings triton, which ends a process in which TensorFlow was
# imported before it (triton 3.7, TensorFlow 2.21).
if importlib.util.find_spec("triton"):
  importlib.import_module("triton")

import jax  # noqa: E402  (after the flags that it reads)
import pytest  # noqa: E402

from vit_jax.callbacks import run_lock  # noqa: E402

run_lock.SETTLE_SECONDS = 0.0  # runs of tests are short, and start one by one

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def run(tmp_path_factory):
  """A tiny run with evaluations: a `shared_runs.Run`. Copy what you change."""
  import shared_runs  # only tests of runs need what it imports

  return shared_runs.make_run(tmp_path_factory.mktemp("colours"))


@pytest.fixture
def collected():
  """Collects what failed saves leave, whose end asyncio logs, after the test.

  Otherwise it happens amid any later test: its log has further lines, and a
  collection within `ast.parse` is a SystemError in Python 3.11.
  """
  yield
  gc.collect()


@pytest.hookimpl(trylast=True)  # after tests were deselected
def pytest_collection_modifyitems(items):
  """Sorts files: the headlines, then those of most tests, for two workers."""
  sizes = collections.Counter(item.path for item in items)
  is_rest = lambda path: path.name != "test_headlines.py"
  items.sort(key=lambda item: (is_rest(item.path), -sizes[item.path]))


def pytest_collection_finish(session):
  """What was imported is never garbage, and traces are made of small objects.

  Looking through all of them as often as Python does by default takes a tenth
  of the time; once more, when thousands of tests have run, 17 seconds.
  """
  gc.freeze()
  gc.set_threshold(100_000, 50, 10_000)
