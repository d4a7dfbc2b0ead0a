"""Several processes keep their compiled programs in the folder of the run."""

import shutil
import sys

import jax
import pytest
import several

from vit_jax.callbacks import startup

CONFIG = """
from vit_jax.config import defaults

def get_config():
  c = defaults()
  c.total_steps = 2
  c.model.variant = "Ti/8"
  c.model.width, c.model.depth = 32, 1
  c.model.mlp_dim, c.model.num_heads = 64, 4
  c.data.dataset, c.data.ops = "digits", "decode|resize(16)"
  c.data.batch_size = 8
  return c
"""
# Each says what it read from the cache.
PROCESS = """
import runpy, sys
import jax

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
runpy.run_module("vit_jax.train", run_name="__main__")
names = ["/jax/compilation_cache/cache_" + x for x in ("hits", "misses")]
counts = map(hits.count, names)
print("HITS", *counts)
"""


def test_several_processes_keep_programs_in_the_run(monkeypatch):
  before = jax.config.jax_compilation_cache_dir
  of_xla = jax.config.jax_persistent_cache_enable_xla_caches
  try:
    for count, expected in ((2, "gs://bucket/run/xla"), (1, None)):
      jax.config.update("jax_compilation_cache_dir", None)
      monkeypatch.setattr(jax, "process_count", lambda count=count: count)
      monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # not writable
      startup.use_cache("gs://bucket/run")
      assert jax.config.jax_compilation_cache_dir == expected
    # XLA itself cannot open what is in a bucket, whoever named it.
    assert jax.config.jax_persistent_cache_enable_xla_caches == "none"
    jax.config.update("jax_persistent_cache_enable_xla_caches", of_xla)
    jax.config.update("jax_compilation_cache_dir", "gs://mine")
    startup.use_cache("gs://bucket/run")
    assert jax.config.jax_compilation_cache_dir == "gs://mine"
    assert jax.config.jax_persistent_cache_enable_xla_caches == "none"
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_enable_xla_caches", of_xla)


def _start(config, workdir):
  """Runs two processes to the end; returns each one's (hits, misses)."""
  address = several.address()
  env = several.env()
  del env["JAX_COMPILATION_CACHE_DIR"]
  # All programs, however long a busy machine takes to compile them.
  env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  commands = [
    [
      *(sys.executable, "-c", PROCESS, f"--config={config}"),
      *(f"--workdir={workdir}", "--config.checkpoint.every_steps=0"),
      *(f"--coordinator={address}", "--num_processes=2"),
      f"--process_id={i}",
    ]
    for i in range(2)
  ]
  outputs = several.outputs(commands, env)
  counts = [out.split("HITS ")[1].split() for out in outputs]
  return [tuple(map(int, pair)) for pair in counts]


@pytest.mark.nightly
def test_a_second_start_reads_what_process_0_wrote(tmp_path):
  """On CPUs jax gives every process its own key: only process 0 reads.

  A TPU's key is that of its slice.
  """
  config, workdir = tmp_path / "tiny.py", tmp_path / "run"
  config.write_text(CONFIG)
  first = _start(config, workdir)
  # jax counts a miss where it writes, in process 0.
  assert [hits for hits, _ in first] == [0, 0] and first[0][1]
  before = workdir.rename(tmp_path / "before")
  shutil.copytree(before / "xla", workdir / "xla")  # from its first step
  second = _start(config, workdir)
  assert second == [(first[0][1], 0), (0, 0)]
  names = {path.name for path in (workdir / "xla").iterdir()}
  assert names == {path.name for path in (before / "xla").iterdir()}
