"""Set-up of every test: eight CPU devices, no silent rank promotion."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The embedded data sets are made anew; a user's own are not touched.
os.environ["TFDS_DATA_DIR"] = tempfile.mkdtemp(prefix="vit_jax_tests_")
# So are the programs that XLA compiles.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["TFDS_DATA_DIR"] + "/xla"
atexit.register(shutil.rmtree, os.environ["TFDS_DATA_DIR"], ignore_errors=True)

import jax  # noqa: E402  (after the flags that it reads)

jax.config.update("jax_numpy_rank_promotion", "raise")
