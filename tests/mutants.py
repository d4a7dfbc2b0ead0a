"""Changes one line of the package at a time, to see that a quick test fails.

Run: make mutants, or python tests/mutants.py [--only=TEXT]

The package and its tests are copied once. In the copy, each change is made
alone, and the quick tests named for it run until one fails: the change is
"killed". If none fails it has SURVIVED, and a test is missing; then the exit
code is 1. The tests must pass without a change, so these run once first.
"""

import argparse
import contextlib
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
# A file and the tests that must notice; then text that is once in the file, and
# what replaces it. A test of the name after "::" is chosen where its file would
# take long.
MUTANTS = r"""
losses.py test_losses.py
- (1.0 - amount) * targets + amount / targets.shape[-1]
+ (1.0 - amount) * targets + amount / (targets.shape[-1] - 1)
- return -jnp.sum(targets * log_p + (1.0 - targets) * log_not_p, axis=-1)
+ return -jnp.sum(targets * log_p + log_not_p, axis=-1)
- return sigmoid_xent(logits, targets) / logits.shape[-1]
+ return sigmoid_xent(logits, targets)
- n.sum() / (present.sum() * n[present])
+ n.sum() / (len(n) * n[present])

schedules.py test_schedules.py
- _decay(config, total_steps - warmup)
+ _decay(config, total_steps - warmup - 1)
- optax.linear_schedule(0.0, config.lr, warmup)
+ optax.linear_schedule(config.lr / warmup, config.lr, warmup)
- RSQRT_TIMESCALE = 10_000
+ RSQRT_TIMESCALE = 1_000
- share = end_lr / lr if lr else 0.0
+ share = end_lr if lr else 0.0
- {step: 0.1 ** at.count(step) for step in at}
+ {step: 0.1 for step in at}

schedules.py test_optim.py::test_the_weight_decay_moves_along_half_a_cosine
- optax.cosine_decay_schedule(start - end, total_steps)
+ optax.cosine_decay_schedule(start - end, total_steps - 1000)

param_groups.py test_optim.py
- in ("kernel", "lora_a", "lora_b")
+ in ("kernel", "scale", "lora_a", "lora_b")
- decay ** np.asarray(last - layer, np.float64)
+ decay ** np.asarray(last - layer - 1, np.float64)
- if block == "all" else block + 1
+ if block == "all" else block

optim.py test_optim.py
- LION_DECAY = 0.99
+ LION_DECAY = 0.98
- MUON_RMS = 0.2
+ MUON_RMS = 0.25
- parts.append(_by_blocks(optax.masked(ratio, decay_mask), model))
+ parts.append(_by_blocks(ratio, model))
- optax.add_decayed_weights(decay, decay_mask)
+ optax.add_decayed_weights(decay)
- jnp.minimum(config.beta2, 1.0 - (step + 1.0) ** -exponent)
+ jnp.minimum(config.beta2, 1.0 - (step + 2.0) ** -exponent)
- 9.0 / (10.0 + step)
+ 9.0 / (9.0 + step)
- lambda old, new: old + weight * (new - old)
+ lambda old, new: old + (1 - weight) * (new - old)
- jnp.where(step < steps, 0.0, 1.0)
+ jnp.where(step <= steps, 0.0, 1.0)
- 1.0, w / u)
+ 1.0, u / w)

step.py test_step.py
- is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
+ is_finite = jnp.isfinite(loss)
- lambda x: mean(x, count), (loss, grads)
+ lambda x: mean(x, count + 1), (loss, grads)
- weight = optim.ema_weight(config.optim.ema_decay, state.step)
+ weight = optim.ema_weight(config.optim.ema_decay, state.step + 1)
- "undecodable": (~batch["mask"])
+ "undecodable": (batch["mask"])

step.py self_supervised/test_dinov2.py::test_a_step_is_the_formula
- rng = jax.random.fold_in(root, state.step)
+ rng = root

step.py self_supervised/test_dino.py
- weight = 1.0 - learner.average.at(state.step)
+ weight = 1.0 - learner.average.at(state.step + 1)

objectives/classification.py test_step.py
- jnp.sum(cross_entropy(logits, targets) * batch["mask"])
+ jnp.sum(cross_entropy(logits, targets))

batch.py test_step.py
- images.astype(np.float32) / 127.5 - 1.0
+ images.astype(np.float32) / 128.0 - 1.0

objectives/mixing.py objectives/test_mixing.py
- jnp.maximum(share, 1 - share)
+ share
- jnp.roll(batch[k], 1, 0)
+ jnp.roll(batch[k], -1, 0)
- share = weight.mean((1, 2))
+ share = weight.max((1, 2))
- weight[None, ..., None], 1.0
+ weight[None, ..., None], 0.0

models/posemb.py models/test_transformer.py::test_all_intermediates
- np.linspace(0, 1, width // 4)
+ np.linspace(0, 1, width // 4, endpoint=False)
- [np.sin(x), np.cos(x), np.sin(y), np.cos(y)]
+ [np.sin(y), np.cos(y), np.sin(x), np.cos(x)]

models/posemb.py models/test_transformer.py::test_all_intermediates
- ((0, 0), (num_zeros, 0), (0, 0))
+ ((0, 0), (0, num_zeros), (0, 0))

models/resample.py models/test_resample.py
- functools.partial(_sharp, more=0.1)
+ functools.partial(_sharp, more=0.0)
- "linear": functools.partial(_weights, kernel=_triangle, antialias=False)
+ "linear": functools.partial(_weights, kernel=_triangle, antialias=True)
- kernel=functools.partial(_keys, a=-0.75)
+ kernel=functools.partial(_keys, a=-0.5)
- np.linalg.pinv(_weights(p, q, _triangle, antialias=False).T)
+ np.linalg.pinv(_weights(p, q, _triangle, antialias=True).T)

zoo/models/rope.py models/test_transformer.py::test_all_intermediates
- rounded = (100.0**exponents)
+ rounded = (1000.0**exponents)
- 2 * (i + 0.5) / n - 1 for i, n
+ 2 * i / n - 1 for i, n
- frequencies = 10_000.0**-exponents
+ frequencies = 1_000.0**-exponents
- jnp.concatenate([-second, first], axis=-1)
+ jnp.concatenate([second, -first], axis=-1)

models/attention.py models/test_transformer.py::test_all_intermediates
- query = query / query.shape[-1] ** 0.5
+ query = query / query.shape[-1]

models/attention.py models/test_transformer.py::test_a_part_of_the_tokens
- (query / query.shape[-1] ** 0.5, offsets)
+ (query, offsets)

sharding.py test_sharding.py
- MAX_FSDP = 16
+ MAX_FSDP = 32
- return P(*(None,) * (num_dims - len(spec)), *spec)
+ return P(*spec)
- max(free, key=lambda i: shape[i])
+ min(free, key=lambda i: shape[i])
- if (i > 0 or not model.is_scanned(name))
+ if True

families/vit.py test_sharding.py
- (r"out/kernel", ("tensor", None, "fsdp"))
+ (r"out/kernel", ("fsdp", None, "tensor"))

collectives.py self_supervised/test_published_parts.py::test_koleo
- device = device * size + jax.lax.axis_index(axis)
+ device = device + size * jax.lax.axis_index(axis)

collectives.py self_supervised/test_published_parts.py::test_centring
- self.sum(weighted) / jnp.maximum(self.sum(weights), 1e-12)
+ self.sum(weighted) / len(x)

digests.py test_digests.py
- odd = 2 * i + np.uint32(1)
+ odd = 2 * i
- second += 2 * begin * total
+ second += begin * total
- if shard.replica_id == 0:
+ if True:
- w *= np.uint32(SECOND)
+ w *= np.uint32(FIRST)
- json.dumps(value, sort_keys=True, separators=(",", ":"))
+ json.dumps(value, separators=(",", ":"))

data/order.py data/test_order.py
- epoch = tf.cast(positions // num_examples, tf.uint32)
+ epoch = tf.cast(positions * 0, tf.uint32)
- ahead = self.num_lanes - 1 - lane
+ ahead = self.num_lanes - lane
- return positions // repeats, positions % repeats
+ return positions // repeats, positions * 0
- _ROUNDS = 16
+ _ROUNDS = 4

data/subsets.py data/test_subsets.py
- return np.sort(np.argpartition(state, count)[:count])
+ return np.sort(np.argpartition(state, count)[-count:])

finetune/data/imports/csv_files.py data/test_listing.py::test_labels_of_a_csv
- lines = [[*map(str.strip, line)] for line in reader]
+ lines = [[*line] for line in reader]

finetune/lora.py test_lora.py
- 1.0 if options.alpha is None else options.alpha / rank
+ 1.0 if options.alpha is None else options.alpha
- bound = np.prod(shape[start:end]) ** -0.5
+ bound = np.prod(shape[start:end]) ** -1.0
- return (kernel + scale * product)
+ return (kernel + product)

self_supervised/targets.py self_supervised/test_published_parts.py
- CENTRE_MOMENTUM = 0.9
+ CENTRE_MOMENTUM = 0.99
- ITERATIONS = 3
+ ITERATIONS = 2
- jnp.sum(targets[:, ::-1] * log_q, (1, 2))
+ jnp.sum(targets * log_q, (1, 2))
- scores - jnp.expand_dims(centre
+ scores + jnp.expand_dims(centre

self_supervised/dino.py self_supervised/test_dino.py
- share = jnp.minimum(step / max(steps - 1, 1), 1.0)
+ share = jnp.minimum(step / max(steps, 1), 1.0)

self_supervised/koleo.py self_supervised/test_published_parts.py::test_koleo
- fits &= rows[:, None] != others[None]
+ fits &= True

self_supervised/mae_model.py self_supervised/test_mae.py
- pixels.var(-1, keepdims=True, ddof=1)
+ pixels.var(-1, keepdims=True)
- places_in(order) >= num_kept
+ places_in(order) > num_kept

ridge.py test_ridge.py
- BIAS = 100.0
+ BIAS = 1.0
- STD_FLOOR = 1e-5
+ STD_FLOOR = 1e-2
- (2.0 * sums - rows.sum(axis=0)).T
+ (2.0 * sums).T
- rng.permutation(i)[:shots]
+ i[:shots]

evaluators/fewshot.py evaluators/test_fewshot.py
- zip(l2s, scores.mean(axis=0), strict=True)
+ zip(l2s, scores.max(axis=0), strict=True)

evaluators/knn.py evaluators/test_knn.py
- TEMPERATURE = 0.07
+ TEMPERATURE = 0.1
- jnp.where(jnp.arange(chunk) < count, similarity, -jnp.inf)
+ jnp.where(jnp.arange(chunk) <= count, similarity, -jnp.inf)
- x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), TINY)
+ x

metrics.py test_metrics.py
- (jax.tree.map(np.float64, part) for part in parts)
+ (jax.tree.map(np.float32, part) for part in parts)

weights/normalisation.py weights/test_assumed.py
- np.arange(bias.shape[1]) >= weights.class_rows(model)
+ np.arange(bias.shape[1]) >= 0
- scale, shift = 0.5 / std, (0.5 - mean) / std
+ scale, shift = 0.5 / std, (1.0 - mean) / std

checkpointing/retention.py checkpointing/test_layout.py
- for number, s in firsts.items() if number}
+ for number, s in firsts.items()}
- first = sorted(good)[-keep_last]
+ first = sorted(there)[-keep_last]

batch.py callbacks/test_accounting.py
- return int(position) // batch_size
+ return -(-int(position) // batch_size)

inputs.py test_experiment.py
- e.data.batches(first, index, count)
+ e.data.batches(first + (first > 0), index, count)
- start_step=first,
+ start_step=start,

callbacks/accounting.py callbacks/test_accounting.py
- images = (step - self._start) * self._batch_size
+ images = step * self._batch_size

callbacks/run_lock.py callbacks/test_run_lock.py
- if changes == 2:
+ if changes == 1:
- return record or {}, True
+ return record or {}, False
- if record["id"] != self._record["id"]:
+ if record is None:

train.py test_headlines.py::test_a_killed_run_ends_in_the_same_bits
- range(start + 1, total_steps + 1)
+ range(start + 1 + (start > 0), total_steps + 1)
- state = trainer.completed(state) if start else
+ state = trainer.init_state() if start else
- if step > start:
+ if step < start:

collectives.py test_headlines.py::test_two_processes_stop_at_one_step
- axes: tuple[str, ...] = BATCH_AXES) ->
+ axes: tuple[str, ...] = ("data",)) ->

callbacks/preemption.py test_headlines.py::test_two_processes_stop_at_one_step
- multihost_utils.reached_preemption_sync_point(self._num_checks)
+ False

data/pipeline.py test_headlines.py::test_cells_of_a_notebook_run
- Dataset.range(start_step * rows, _FOREVER)
+ Dataset.range((start_step + (start_step > 0)) * rows, _FOREVER)
"""


class Mutant(NamedTuple):
  """A change of `old` to `new` in a file, and the tests that must fail."""

  file: str
  tests: str
  old: str
  new: str


def mutants() -> Iterator[Mutant]:
  """Yields the changes of `MUTANTS`, with paths from the root."""
  for group in MUTANTS.strip().split("\n\n"):
    head, *lines = group.split("\n")
    file, tests = head.split()
    for old, new in zip(lines[::2], lines[1::2], strict=True):
      yield Mutant(f"vit_jax/{file}", f"tests/{tests}", old[2:], new[2:])


def errors() -> list[str]:
  """Returns what is wrong with the list: texts that are not once in a file."""
  found = []
  for file, tests, old, new in mutants():
    count = (ROOT / file).read_text().count(old)
    if count != 1 or old == new:
      found.append(f"{file}: got {old!r} {count} times, expected once.")
    if not (ROOT / tests.partition("::")[0]).exists():
      found.append(f"{tests}: no such file.")
  return found


def run(root: pathlib.Path, tests: str) -> tuple[bool, float]:
  """Returns whether quick tests of a copy pass, and the seconds."""
  # Without byte code, all of TensorFlow would be compiled for every run.
  env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
  env["PYTHONPATH"] = os.pathsep.join(map(str, (root, root / "tests")))
  began, options = time.monotonic(), ("-x", "-q", "-n", "0")
  command = [sys.executable, "-m", "pytest", *options, tests]
  done = subprocess.run(command, cwd=root, env=env, capture_output=True)
  return done.returncode == 0, time.monotonic() - began


@contextlib.contextmanager
def changed(path: pathlib.Path, old: str, new: str) -> Iterator[None]:
  """In its body, a file has another line."""
  text = path.read_text()
  path.write_text(text.replace(old, new))
  yield
  path.write_text(text)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--only", default="", help="text that a change has")
  only = parser.parse_args().only
  if wrong := errors():
    sys.exit("\n".join(wrong))
  chosen = [m for m in mutants() if only in " ".join(m)]
  survivors = 0
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder) / "copy"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "build")
    shutil.copytree(ROOT, root, ignore=ignored)
    unchanged = functools.cache(lambda tests: run(root, tests)[0])
    for number, (file, tests, old, new) in enumerate(chosen, start=1):
      if not unchanged(tests):
        sys.exit(f"{tests}: fails without a change.")
      with changed(root / file, old, new):
        survives, seconds = run(root, tests)
      survivors += survives
      result = "SURVIVED" if survives else "killed"
      place = f"{number}/{len(chosen)} {file}: {old} -> {new}"
      print(f"{result:8} {seconds:4.0f} s  {place}", flush=True)
  print(f"{len(chosen)} changes, {survivors} survived.")
  return min(1, survivors)


if __name__ == "__main__":
  sys.exit(main())
