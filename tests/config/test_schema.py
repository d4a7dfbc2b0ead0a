"""Options: types, defaults, errors; the command line that sets them."""

import copy
import json
import pathlib
import pickle

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.config import (
  Config,
  ConfigError,
  build,
  checks,
  cli,
  defaults,
  freeze,
  model_config,
  to_dict,
)
from vit_jax.options import parse_value

ROOT = pathlib.Path(__file__).parents[2]
FEWSHOT = {"kind": "fewshot", "dataset": "digits", "shots": (1, 5)}


def _valid(**changes):
  c = defaults()
  c.total_steps = 100
  tiny.apply(c, changes)
  return freeze(c)


@settings(derandomize=True, deadline=None, max_examples=10)
@given(
  seed=st.integers(0, 2**32 - 1),
  lr=st.floats(1e-6, 1.0),
  steps=st.none() | st.integers(1, 10**6),
  shots=st.lists(st.integers(1, 99), min_size=1).map(tuple),
  names=st.lists(st.sampled_from("abcd"), unique=True),
)
def test_a_frozen_config_survives_json(seed, lr, steps, shots, names):
  c = defaults()
  c.seed, c.optim.lr, c.total_steps = seed, lr, steps
  c.evals = {name: FEWSHOT | {"shots": shots} for name in names}
  frozen = freeze(c)
  again = freeze(json.loads(json.dumps(to_dict(frozen))))
  assert again == frozen and hash(again) == hash(frozen)
  assert (again.seed, again.optim.lr, again.total_steps) == (seed, lr, steps)
  assert [e.name for e in again.evals] == names
  assert all(e.shots == shots for e in again.evals)


def test_what_a_config_file_did_not_set_reads_as_its_default():
  c = defaults()
  assert c.data.batch_size == 4096 and c.model.name == "vit" and not c.evals
  assert c == {"data": {}, "model": {}, "evals": {}}
  assert freeze(c) == Config()
  c.update({"optim": {"lr": 0.1}, "evals": {"val": dict(kind="knn", k=3)}})
  c.optim.update(momentum=0.8)
  c.evals.val.k += 1
  c.evals["again"] = {**c.evals["val"], "k": 9}
  assert c.optim == {"lr": 0.1, "momentum": 0.8} and c.optim.beta1 == 0.9
  assert (c.evals.val.k, c.evals.again.k) == (4, 9)
  del c.optim.lr
  assert c.optim.lr == Config().optim.lr
  c.model.name = "bit"
  assert c.model.root_pad == model_config("bit").root_pad

  for read in (lambda: c.modle.variant, lambda: c.model.varint):
    with pytest.raises(AttributeError, match="no option"):
      read()


def test_all_unknown_and_ill_typed_options_in_one_error():
  wrong = {
    "modle": {},
    "log_steps": "many",
    "model": {"varaint": "B/16", "pool": "gapp"},
    "data": 3,
    "evals": {
      "val": {"kind": "clasification"},
      "few": {**FEWSHOT, "shot": 3, "shots": "1,x"},
      "vall": {"split": "test"},
    },
  }
  named = {
    "config.modle": "'model'",
    "config.log_steps": "'many'",
    "config.model.varaint": "'variant'",
    "config.model.pool": "'gap'",
    "config.data": "3",
    "config.evals.val.kind": "'classification'",
    "config.evals.few.shot": "'shots'",
    "config.evals.few.shots": "'x'",
    "config.evals.vall": "'val'",
  }
  with pytest.raises(ConfigError) as e:
    freeze(wrong)
  for error, (option, word) in zip(e.value.errors, named.items(), strict=True):
    assert error.startswith(f"{option}: ") and word in error


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
  st.integers(),
  st.floats(allow_nan=False, allow_infinity=False),
  st.booleans(),
  st.lists(st.integers()).map(tuple),
)
def test_values_are_read_from_their_texts(number, real, flag, numbers):
  for annotation, value in (
    (int, number),
    (int | None, number),
    (float, real),
    (float | None, real),
    (bool, flag),
    (tuple[int, ...], numbers),
  ):
    for text in (value, str(value)):
      assert parse_value(annotation, text, "x") == value


def test_values_of_the_command_line():
  for annotation, text, value in (
    (int, "1_000", 1000),
    (float, 3, 3.0),
    (bool, "0", False),
    (int | None, "None", None),
    (tuple[int, ...], "1, 5,10", (1, 5, 10)),
    (tuple[float, ...], "16", (16.0,)),
    (str, "none", "none"),
  ):
    assert parse_value(annotation, text, "x") == value
  for annotation, value in (
    *((int, "1.5"), (int, 1.5), (int, True)),
    *((bool, 1), (float, "a"), (str, 3)),
  ):
    with pytest.raises(ValueError, match="^x: got .* expected a value of type"):
      parse_value(annotation, value, "x")


WRONG = """
total_steps=0
optim.warmup_steps=100
seed=4294967297
data.batch_size=0
optim.microbatch=0
optim.lr=0.0
optim.ema_decay=1.0
optim.decay_at=(0.5,)
optim.beta2=0.95 optim.name=sgd
optim.momentum=0.8 optim.name=optax:adam
optim.end_lr=0.5 optim.schedule=rsqrt
model.posemb_at=shared model.posemb=relative
mesh.tensor=-1
model.variant=X/16 -> size: got 'X'
model.variant=B16 -> config.model.variant
model.num_heads=5
model.variant=B/15 -> config.data.ops: got images of 224x224
model.variant=R+Ti/16 data.ops=decode|resize(225) -> the patch of 32
model.width=6 model.posemb=sincos2d model.num_heads=1
""".strip().split("\n")


@pytest.mark.parametrize("row", WRONG)
def test_errors_of_options(row):
  options, _, words = row.partition(" -> ")
  (name, value), *others = (x.split("=", 1) for x in options.split(" "))
  prefix = words or f"config.{name}: got "
  c = defaults()
  c.total_steps = 100
  for option, text in ((name, value), *others):
    tiny.apply(c, {option.replace(".", "__"): text})
  found = [e for e in checks.errors(freeze(c)) if prefix in e]
  assert found and (words or value.strip("()") in found[0])


def test_errors_of_evaluators_and_objectives():
  group = {"kind": "fewshot", "group": "g"}
  evals = {"a": {"kind": "classification", "ops": "decode|resize(9)"}}
  evals |= {"b": group | {"group": "b"}, "c": group | {"every_steps": 5}}
  objective = {"label_smoothing": 1.0}
  errors = checks.errors(
    _valid(evals=evals | {"d": group}, objective=objective)
  )
  for words in (
    "config.evals.a.ops: got images of 9x9",
    "config.evals.b.group: got 'b'",
    "config.evals.*.every_steps: got c 5, d",
    "config.objective.label_smoothing: got 1.0",
  ):
    assert any(e.startswith(words) for e in errors), words
  assert checks.errors(_valid(seed=2**32 - 1)) == []


def test_command_line_collects_every_error():
  flags = ["--wrkdir=x", "--config.modle.x=3", "bare", "--fake_data"]
  flags += ["--config.model.variant", "L/16", "--config.optim.lr"]
  config = f"--config={ROOT}/configs/vit_b16.py"
  args = cli.parse("train", {"workdir": ""}, [config, *flags])
  assert args.config.model.variant == "L/16"
  assert args.config.fake_data
  for option, word in {
    "--wrkdir": "'workdir'",
    "config.modle": "'model'",
    "--config.optim.lr": "no value",
    "'bare'": "without a flag",
  }.items():
    assert any(option in e and word in e for e in args.errors), option


def test_a_missing_name_of_a_config_is_one_error():
  with pytest.raises(SystemExit) as e:
    cli.parse("evaluate", {"checkpoint": ""}, ["--checkpoint"])
  (error,) = str(e.value).splitlines()[1:]
  assert "--checkpoint=VALUE" in error


def test_errors_of_a_config_file_have_their_line(tmp_path):
  path = tmp_path / "old.py"
  start = "from vit_jax.config import defaults\n"
  for code, text in (
    ("def get_config():\n  return defaults().optm\n", "line 3: AttributeError"),
    ("y = = 2\n", "line 2: SyntaxError: invalid syntax"),
  ):
    path.write_text(start + code)
    with pytest.raises(SystemExit, match=text):
      cli.parse("x", {}, [f"--config={path}"])


def test_a_config_of_one_family_becomes_one_of_another():
  c = defaults()
  c.model.name, c.model.variant = "bit", "R50x1"
  c.model.root_pad = "nothing"
  again = pickle.loads(pickle.dumps(c))
  for config in (c, copy.deepcopy(c), again):
    assert freeze(config).model == model_config(
      "bit", variant="R50x1", root_pad="nothing"
    )
  c.model.pool = "gap"
  assert build(c)[1] == [
    "config.model.pool: got 'gap', expected 'token' for config.model.name=bit."
  ]
