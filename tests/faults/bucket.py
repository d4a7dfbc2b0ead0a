"""Runs whose folder is in a bucket, of a store that fails on purpose.

tests/object_store.py speaks Google's API in a network namespace; TensorStore
and TensorFlow reach it by their own settings.
"""

import collections
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import object_store

from faults import runs
from faults.trial import trial

URL = "gs://bkt/run"
STEPS = 60
BITS = " It ends in the bits of a run on a disk that was left alone."
# A model of 15,626 parameters that saves every 20 steps.
TINY = runs.ROOT / "tests" / "tiny_run.py"


def start(
  bucket: object_store.Bucket,
  config: pathlib.Path,
  folder: pathlib.Path,
  options: Sequence[str] = (),
  processes: int = 1,
) -> list[subprocess.Popen]:
  """Starts a run in the bucket; what it prints is added to run.0.log ..."""
  started = []
  lines = runs.commands(config, URL, options, processes)
  for i, command in enumerate(lines):
    with runs.log(folder / "run", i).open("ab") as file:
      started.append(
        bucket.popen(
          command,
          env=runs.environment(folder),
          stdin=subprocess.DEVNULL,
          stdout=file,
          stderr=subprocess.STDOUT,
          start_new_session=True,
        )
      )
  return started


def assert_same(bucket, folder: pathlib.Path, want: pathlib.Path) -> int:
  """Compares the run in the bucket with one on a disk, bit by bit."""
  bucket.fault()
  bucket.download("run", folder / "got")
  return runs.assert_same(folder / "got", want)


def wanted(folder: pathlib.Path, steps: int = STEPS, **options):
  """Returns the config of a run, and the folder of it undisturbed on a disk."""
  config = runs.write_config(folder, steps)
  runs.whole(config, folder / "want", **options)
  return config, folder / "want"


@trial(
  "A run whose folder is in a bucket, and that is killed or gets SIGTERM,"
  " resumes." + BITS,
  seconds=180,
)
def stops(folder: pathlib.Path, seed: int) -> str:
  rng = random.Random(seed)
  config, want = wanted(folder)
  texts = []
  with object_store.Bucket() as bucket:
    bucket.fault(latency=0.02)
    for number, kind in enumerate(("SIGKILL", "SIGTERM", "SIGKILL"), 1):
      (process,) = start(bucket, config, folder)
      runs.wait_for(folder / "run", "\nstep ", [process], count=4 * number)
      time.sleep(rng.uniform(0, 1))
      process.send_signal(getattr(signal, kind))
      (code,) = runs.finish([process], 100)
      assert code == {"SIGKILL": -9, "SIGTERM": 75}[kind], code
      last = re.findall(r"step (\d+)/", runs.output(folder / "run"))[-1]
      texts.append(f"{kind} after step {last}")
    codes = runs.finish(start(bucket, config, folder), 200)
    assert codes == [0], runs.output(folder / "run")
    numbers = assert_same(bucket, folder, want)
  return (
    f"{', '.join(texts)}: {numbers:,} numbers, all rows and all events equal in"
    f" bits those of a run on a disk; seed {seed}"
  )


@trial(
  "A bucket that answers with errors, or not at all for a minute, loses"
  " nothing; after 10 seconds a line says what is waited for." + BITS,
  seconds=200,
)
def faults(folder: pathlib.Path, seed: int) -> str:
  del seed
  config, want = wanted(folder)
  with object_store.Bucket() as bucket:
    bucket.fault(share_503=0.05, share_dropped=0.02, latency=0.01)
    (process,) = start(bucket, config, folder)
    runs.wait_for(folder / "run", "\nstep ", [process], count=2)
    bucket.fault(share_429=0.4)
    time.sleep(10)
    bucket.fault(outage=60)  # 503 to all
    time.sleep(61)
    bucket.fault(share_503=0.05)
    codes = runs.finish([process], 300)
    assert codes == [0], runs.output(folder / "run")
    failed = collections.Counter(r["status"] for r in bucket.requests())
    numbers = assert_same(bucket, folder, want)
  text = runs.output(folder / "run", last=10**6)
  assert re.search(r"^waits +10 s so far for the save of step", text, re.M), (
    text[-3000:]
  )
  return (
    f"{failed[503]:,} answers 503 and {failed[429]:,} answers 429, one minute"
    f" without any other; {numbers:,} numbers, all rows and all events equal"
  )


@trial(
  "A bucket that refuses writes from the start ends the run with a message;"
  " one that refuses them later loses nothing." + BITS,
  seconds=120,
)
def refused(folder: pathlib.Path, seed: int) -> str:
  del seed
  config, want = wanted(folder)
  with object_store.Bucket() as bucket:
    bucket.fault(refuse_writes=True)
    codes = runs.finish(start(bucket, config, folder), 60)
    text = runs.output(folder / "run")
    assert codes == [1] and "no files can be written" in text, text
    bucket.fault()
    (process,) = start(bucket, config, folder)
    runs.wait_for(folder / "run", "\nstep ", [process], count=4)
    bucket.fault(refuse_writes=True)
    runs.wait_for(folder / "run", "NOT SAVED", [process])
    time.sleep(5)
    bucket.fault()
    codes = runs.finish([process], 200)
    # The next start makes TensorBoard's file again from metrics.jsonl.
    codes += runs.finish(start(bucket, config, folder), 100)
    assert codes == [0, 0], runs.output(folder / "run")
    numbers = assert_same(bucket, folder, want)
  return f"then {numbers:,} numbers, all rows and all events equal in bits"


@trial(
  "One of two processes is killed; both start again." + BITS,
  seconds=200,
)
def two_processes(folder: pathlib.Path, seed: int) -> str:
  rng = random.Random(seed)
  config, want = wanted(folder, 200, processes=2)
  with object_store.Bucket() as bucket:
    bucket.fault(latency=0.01)
    started = start(bucket, config, folder, processes=2)
    runs.wait_for(folder / "run", "\nstep ", [started[0]], count=5)
    time.sleep(rng.uniform(0, 2))
    who = rng.randrange(2)
    started[who].kill()
    codes = runs.finish(started, 200)
    assert codes[who] == -9 and codes[1 - who] in (134, -6), codes
    codes = runs.finish(start(bucket, config, folder, processes=2), 300)
    assert codes == [0, 0], runs.output(folder / "run")
    numbers = assert_same(bucket, folder, want)
  return (
    f"process {who} of two killed: {numbers:,} numbers, all rows and all events"
    f" equal in bits; seed {seed}"
  )


@trial(
  "A save of a small model takes at most 120 requests, and a run ends within"
  " 15 seconds of SIGTERM, though each request takes 50 ms.",
  seconds=120,
)
def requests(folder: pathlib.Path, seed: int) -> str:
  del seed
  texts = []
  with object_store.Bucket() as bucket:
    bucket.fault(latency=0.05)
    (process,) = start(bucket, TINY, folder)
    runs.wait_for(folder / "run", "step 100/200", [process])
    assert runs.finish([process], 200) == [0], runs.output(folder / "run")
    log = bucket.requests()
    by_save = collections.Counter(
      m[1] for r in log if (m := re.search(r"/checkpoints/(\d+)/", r["object"]))
    )
    most = max(by_save.values())
    all_in_all = len(log) / 10  # ten saves, and all else of the run
    assert all_in_all <= 120, all_in_all
    texts.append(
      f"{most} requests for the objects of a checkpoint, written and removed;"
      f" {all_in_all:.0f} a save with all other requests of the run"
      f" ({len(log):,} for 200 steps)"
    )
    bucket.delete("run/")
    options = ["--config.total_steps=100000", "--config.checkpoint.keep_last=2"]
    options += ["--config.checkpoint.every_steps=500"]
    (process,) = start(bucket, TINY, folder, options)
    runs.wait_for(folder / "run", "/100,000", [process], count=120)
    bucket.reset()
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    (code,) = runs.finish([process], 100)
    seconds = time.monotonic() - began
    assert code == 75, runs.output(folder / "run")
    assert seconds < 15, seconds
    texts.append(
      f"{seconds:.1f} s and {bucket.counts()['all']} requests from SIGTERM to"
      " the exit"
    )
  return "with 50 ms a request: " + "; ".join(texts)


@trial(
  "evaluate, predict, convert and vit_jax.load read a run in a bucket; report"
  " says how to copy it.",
  seconds=150,
)
def commands(folder: pathlib.Path, seed: int) -> str:
  """What reads a run in a bucket: scores, predictions, weights."""
  del seed
  image = folder / "digit.png"
  data = """
from PIL import Image
from sklearn.datasets import load_digits
Image.fromarray((load_digits().images[0] * 15).astype("uint8")).save("{}")
"""
  subprocess.run([sys.executable, "-c", data.format(image)], check=True)
  counts = {}
  with object_store.Bucket() as bucket:
    assert runs.finish(start(bucket, TINY, folder), 200) == [0]

    def run(name, *arguments, code=0):
      bucket.reset()
      done = bucket.run(
        [sys.executable, *arguments],
        env=runs.environment(folder),
        capture_output=True,
        text=True,
      )
      text = done.stdout + done.stderr
      assert done.returncode == code and "Traceback" not in text, text
      counts[name] = bucket.counts()["all"]
      return text

    cli, local = ("-m", "vit_jax"), str(folder / "out.npz")
    scores = json.loads(bucket.get("run/metrics.jsonl").splitlines()[-1])
    text = run("evaluate", *cli, "evaluate", f"--checkpoint={URL}")
    assert f"top1 {scores['digits/top1']:.4f}" in text, text
    run("predict", *cli, "predict", URL, str(image))
    run("convert to a file", *cli, "convert", URL, local, "--to=npz")
    target = "gs://bkt/out.npz"
    run("convert into the bucket", *cli, "convert", URL, target, "--to=npz")
    assert bucket.get("out.npz")[:2] == b"PK"
    code = f"import vit_jax; print(vit_jax.load('{URL}').params.keys())"
    run("load", "-c", code)
    text = run("report", *cli, "report", URL, code=1)
    assert "expected a local folder" in text, text
  del counts["report"]
  return "; ".join(f"{k}: {v} requests" for k, v in counts.items())
