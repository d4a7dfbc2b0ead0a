"""Options: types, defaults, errors; the command line that sets them."""

import copy
import dataclasses
import pathlib
import pickle
import re

import pytest
import tiny

from vit_jax import config as config_lib
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
from vit_jax.evaluators import EVALUATORS
from vit_jax.families import vit
from vit_jax.options import parse_value

ROOT = pathlib.Path(__file__).parents[2]
FEWSHOT = {"kind": "fewshot", "dataset": "digits", "shots": (1, 5)}


def _valid(**changes):
  c = defaults()
  c.total_steps = 100
  tiny.apply(c, changes)
  return freeze(c)


def test_defaults_freeze_to_the_default_config():
  assert freeze(defaults()) == Config()


def test_frozen_config_survives_json_and_is_hashable():
  c = defaults()
  c.evals = {"few": FEWSHOT, "val": {"kind": "classification"}}
  frozen = freeze(c)
  assert freeze(to_dict(frozen)) == frozen
  assert hash(frozen) == hash(freeze(to_dict(frozen)))
  assert [e.name for e in frozen.evals] == ["few", "val"]
  assert frozen.evals[0].shots == (1, 5)


def test_misspelt_names_in_a_config_file():
  c = defaults()
  c.model.varient = "B/16"
  c.optim["momentun"] = 0.8
  c.lr = 0.1
  c.seed = "one"
  with pytest.raises(ConfigError) as e:
    freeze(c)
  for error, words in zip(
    e.value.errors,
    ("config.lr: no such", "'one'", "mean 'variant'", "mean 'momentum'"),
    strict=True,
  ):
    assert words in error
  for read in (lambda: c.modle.variant, lambda: c.model.varint):
    with pytest.raises(AttributeError, match="no option"):
      read()


def test_what_a_config_file_did_not_set_reads_as_its_default():
  c = defaults()
  assert c.data.batch_size == 4096 and c.model.name == "vit" and not c.evals
  assert c == {"data": {}, "model": {}, "evals": {}}
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


def test_all_unknown_and_ill_typed_options_in_one_error():
  with pytest.raises(ConfigError) as e:
    freeze(
      {
        "modle": {},
        "log_steps": "many",
        "model": {"varaint": "B/16", "pool": "gapp", "scan": "maybe"},
        "data": 3,
        "evals": {
          "val": {"kind": "clasification"},
          "few": {**FEWSHOT, "shot": 3, "shots": "1,x"},
          "vall": {"split": "test"},
        },
      }
    )
  assert e.value.errors == (
    "config.modle: no such option. Did you mean 'model'?",
    "config.log_steps: got 'many', expected a value of type whole number.",
    "config.model.varaint: no such option. Did you mean 'variant'?",
    "config.model.pool: got 'gapp', expected one of token, gap, map. Did you"
    " mean 'gap'?",
    "config.model.scan: got 'maybe', expected a value of type true/false.",
    "config.data: got 3, expected options by name.",
    "config.evals.val.kind: got 'clasification', expected one of "
    f"{', '.join(EVALUATORS)}. Did you mean 'classification'?",
    "config.evals.few.shot: no such option. Did you mean 'shots'?",
    "config.evals.few.shots: got 'x', expected a value of type whole number.",
    "config.evals.vall: no such evaluator. Did you mean 'val'?",
  )
  assert str(e.value).startswith("10 errors in the configuration:\n  - config.")


@pytest.mark.parametrize(
  "annotation, text, value",
  [
    (int, "1_000", 1000),
    (float, "3e-4", 3e-4),
    (float, 3, 3.0),
    (bool, "True", True),
    (bool, "0", False),
    (int | None, "None", None),
    (float | None, "0.5", 0.5),
    (tuple[int, ...], "(1, 5,10)", (1, 5, 10)),
    (tuple[int, ...], [1, 5], (1, 5)),
    (tuple[float, ...], "16", (16.0,)),
    (str, "none", "none"),
  ],
)
def test_values_of_the_command_line(annotation, text, value):
  assert parse_value(annotation, text, "x") == value


@pytest.mark.parametrize(
  "annotation, value",
  [(int, "1.5"), (int, 1.5), (int, True), (bool, 1), (float, "a"), (str, 3)],
)
def test_values_of_another_type(annotation, value):
  with pytest.raises(ValueError, match="^x: got .* expected a value of type"):
    parse_value(annotation, value, "x")


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"total_steps": 0}, "config.total_steps: got 0, expected 1 or more"),
    (
      {"optim__warmup_steps": 100},
      "config.optim.warmup_steps: got 100, expected fewer than the 100",
    ),
    (
      {"objective": {"label_smoothing": 1.0}},
      "config.objective.label_smoothing: got 1.0, expected a",
    ),
    (
      {"seed": 2**32 + 1},
      "config.seed: got 4294967297, expected 0 to 4,294,967,295.",
    ),
    ({"log_steps": 0}, "config.log_steps: got 0, expected 1 or more"),
    ({"checkpoint__every_steps": -1}, "config.checkpoint.every_steps: got -1"),
    ({"data__batch_size": 0}, "config.data.batch_size: got 0, expected 1"),
    ({"data__repeats": 0}, "config.data.repeats: got 0, expected 1 or more"),
    (
      {"optim__microbatch": 0},
      "config.optim.microbatch: got 0, expected 1 or more",
    ),
    ({"optim__lr": 0.0}, "config.optim.lr: got 0.0, expected more than 0"),
    ({"optim__ema_decay": 1.0}, "config.optim.ema_decay: got 1.0, expected 0"),
    (
      {"optim__decay_at": (0.5,)},
      "config.optim.decay_at: got (0.5,)",
    ),
    (
      {"optim__beta2": 0.95, "optim__name": "sgd"},
      "config.optim.beta2: got 0.95, expected 0.999: config.optim.name=sgd",
    ),
    (
      {"optim__momentum": 0.8, "optim__name": "optax:adam"},
      "config.optim.momentum: got 0.8, expected 0.9: config.optim.name=optax",
    ),
    (
      {"optim__end_lr": 1e-5, "optim__schedule": "rsqrt"},
      "config.optim.end_lr: got 1e-05, expected 0.0: config.optim.schedule",
    ),
    (
      {"model__posemb": "relative", "model__posemb_at": "shared"},
      "config.model.posemb_at: got 'shared', expected 'stem'",
    ),
    ({"mesh__tensor": -1}, "config.mesh.tensor: got -1"),
    (
      {"model__variant": "X/16"},
      "config.model.variant: size: got 'X', expected one of Ti, S, B, L, H",
    ),
    ({"model__variant": "B16"}, "expected '<size>/<patch in pixels>'"),
    ({"model__width": 0}, "config.model.width: got 0, expected 1 to"),
    (
      {"model__num_heads": 5},
      "config.model.num_heads: got 5, expected a divisor of the width 768",
    ),
    (
      {"model__variant": "B/15"},
      "config.data.ops: got images of 224x224 pixels, expected multiples",
    ),
    (
      {"model__variant": "R+Ti/16", "data__ops": "decode|resize(225)"},
      "the patch of 32 (config.model.variant='R+Ti/16'), such as 224x224",
    ),
    (
      {
        "model__posemb": "sincos2d",
        "model__width": 6,
        "model__num_heads": 1,
      },
      "config.model.width: got 6, expected a multiple of 4",
    ),
    (
      {"evals": {"val": {"kind": "classification", "ops": "decode|resize(9)"}}},
      "config.evals.val.ops: got images of 9x9 pixels, expected 224x224, the",
    ),
    (
      {"evals": {"val": {"kind": "classification", "batch_size": 0}}},
      "config.evals.val.batch_size: got 0",
    ),
    (
      {"evals": {"a": {"kind": "fewshot", "group": "a"}}},
      "config.evals.a.group: got 'a', expected a name without '/'",
    ),
    (
      {
        "evals": {
          "a": {"kind": "fewshot", "group": "g", "every_steps": 5},
          "b": {"kind": "fewshot", "group": "g"},
        }
      },
      "config.evals.*.every_steps: got a 5, b 0, expected one number",
    ),
  ],
)
def test_errors_of_options(changes, message):
  assert any(message in e for e in checks.errors(_valid(**changes)))


def test_a_right_config_has_no_errors():
  assert checks.errors(_valid()) == []
  assert checks.errors(_valid(seed=2**32 - 1)) == []


def test_every_option_is_read_somewhere():
  """An option that is read nowhere would silently have no effect."""
  code = "".join(
    p.read_text()
    for p in (ROOT / "vit_jax").rglob("*.py")
    if p.name not in ("schema.py", "parse.py", "checks.py")
  )

  def names(cls):
    for f in dataclasses.fields(cls):
      if dataclasses.is_dataclass(f.type):
        yield from names(f.type)
      else:
        yield f.name

  classes = [Config, *EVALUATORS.values()]
  # Read by name, with getattr: the overrides of Size, the axes of the mesh.
  by_name = [f.name for f in dataclasses.fields(vit.Size)]
  by_name += [f.name for f in dataclasses.fields(config_lib.MeshConfig)]
  unread = [
    n
    for c in classes
    for n in names(c)
    if not re.search(rf"\.{n}\b", code) and n not in by_name
  ]
  assert not unread


def test_command_line_collects_every_error():
  args = cli.parse(
    "train",
    {"workdir": ""},
    [
      f"--config={ROOT}/configs/vit_b16.py",
      "--wrkdir=x",
      "--config.modle.x=3",
      "bare",
      "--config.model.variant",
      "L/16",
      "--fake_data",
      "--config.optim.lr",
    ],
  )
  assert args.config.model.variant == "L/16"
  assert args.config.fake_data
  text = "\n".join(args.errors)
  with pytest.raises(SystemExit, match="Did you mean 'vit_b16.py'?"):
    cli.parse("x", {}, [f"--config={ROOT}/configs/vit_b17.py"])
  assert "--wrkdir: no such flag. Did you mean 'workdir'?" in text
  assert "config.modle: no such option. Did you mean 'model'?" in text
  assert "--config.optim.lr: got no value" in text
  assert "'bare': got a word without a flag" in text


@pytest.mark.parametrize("key", ["workdir", "wrkdir"])
def test_a_missing_value_is_one_error(key):
  argv = [f"--config={ROOT}/configs/vit_b16.py", f"--{key}", "--config.seed=1"]
  args = cli.parse("train", {"workdir": ""}, argv)
  messages = {"wrkdir": "no such flag. Did you mean 'workdir'?"}
  message = messages.get(key, f"got no value, expected --{key}=VALUE.")
  assert args.errors == [f"--{key}: {message}"]


@pytest.mark.parametrize("key", ["config", "checkpoint"])
def test_a_missing_name_of_a_config_is_one_error(key):
  with pytest.raises(SystemExit) as e:
    cli.parse("evaluate", {"checkpoint": ""}, [f"--{key}"])
  (error,) = str(e.value).splitlines()[1:]
  assert f"--{key}: got no value, expected --{key}=VALUE." in error


def test_help_shows_units(capsys):
  with pytest.raises(SystemExit):
    cli.parse("train", {}, ["--help=all"])
  out = capsys.readouterr().out
  for text in (
    "config.optim.warmup_steps = 0\n      steps in which the learning rate ",
    "config.model.pool = 'token'\n      what the head gets\n"
    "        token  the class token\n        gap    the mean over all tokens\n",
    "config.evals.<name>.l2 = (1024.0,)",
  ):
    assert text in out


def test_build_keeps_defaults_where_there_are_errors():
  config, errors = build({"seed": 3, "log_steps": "x"})
  assert (config.seed, config.log_steps) == (3, Config().log_steps)
  assert len(errors) == 1


@pytest.mark.parametrize(
  "code, text",
  [
    (
      "from vit_jax.config import defaults\n\n\ndef get_config():\n"
      "  c = defaults()\n  c.optm.lr = 0.1\n  return c\n",
      "line 6: AttributeError: ",
    ),
    ("x = 1\ny = = 2\n", "line 2: SyntaxError: invalid syntax"),
  ],
)
def test_errors_of_a_config_file(code, text, tmp_path, monkeypatch):
  path = tmp_path / "old.py"
  path.write_text(code)
  monkeypatch.chdir(tmp_path)
  for name in (path, "old.py"):
    with pytest.raises(SystemExit, match=re.escape(text)):
      cli.parse("x", {}, [f"--config={name}"])


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
