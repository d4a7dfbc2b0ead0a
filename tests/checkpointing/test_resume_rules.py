"""What of a config may change in a run that resumes, and what is kept of it."""

import dataclasses
import json
import pathlib

import tiny

from vit_jax.checkpointing import resume_rules
from vit_jax.config import Config, flat, freeze, to_dict
from vit_jax.config.schema import UNIONS
from vit_jax.evaluators import EVALUATORS


def _options(cls=Config, prefix=""):
  """Yields the path of every option of every kind."""
  for field in dataclasses.fields(cls):
    path = f"{prefix}{field.name}"
    if field.name in UNIONS and cls is Config:
      for kind in UNIONS[field.name][1].values():
        yield from _options(kind, f"{path}.")
    elif field.name == "evals" and cls is Config:
      for kind in EVALUATORS.values():
        yield from _options(kind, f"{path}.val.")
    elif dataclasses.is_dataclass(field.type):
      yield from _options(field.type, f"{path}.")
    else:
      yield path


def test_every_option_is_in_exactly_one_class():
  """The longest entry counts; none is beside the schema, or without effect."""
  used = set()
  for path in _options():
    parts = path.split(".")
    starts = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    entries = [s for s in starts if s in resume_rules.RULES]
    assert entries, f"{path}: give it a class in checkpointing/resume_rules.py"
    assert resume_rules.rule_of(path) == resume_rules.RULES[entries[0]]
    used.add(entries[0])
    for inner, outer in zip(entries, entries[1:], strict=False):
      differ = [resume_rules.RULES[e].makes_another_run for e in (inner, outer)]
      why = [resume_rules.RULES[e].why for e in (inner, outer)]
      assert differ[0] != differ[1] or why[0] != why[1]
  assert used == resume_rules.RULES.keys()
  assert all(rule.why for rule in resume_rules.RULES.values())


def test_what_makes_another_run():
  for key in ("model.width", "data.batch_size", "optim.lr", "no.such.option"):
    assert resume_rules.rule_of(key).makes_another_run, key
  for key in ("model.scan", "data.data_dir", "evals.val.every_steps"):
    assert not resume_rules.rule_of(key).makes_another_run, key


def _differences(**options):
  old = to_dict(tiny.config(optim__schedule="constant"))
  new = tiny.config(**{"optim__schedule": "constant", **options})
  return resume_rules.differences(old, new)


def test_differences_are_refused_by_name_unless_named():
  changes = _differences(optim__lr=0.5, optim__beta1=0.8, log_steps=7, seed=3)
  assert [c.key for c in changes] == [
    *("log_steps", "optim.beta1", "optim.lr", "seed")
  ]
  beta1, seed = resume_rules.errors(changes, ["optim.lr"], "runs/a")
  assert beta1.startswith("config.optim.beta1 was 0.9, is now 0.8 (")
  assert seed.startswith("config.seed was 0, is now 3 (")
  assert "--allow_change=optim.beta1,seed " in seed and "runs/a" in seed
  (error,) = resume_rules.errors(changes, ["optim"], "runs/a")
  assert "--allow_change=seed " in error
  assert resume_rules.errors(changes, ["optim", "seed"], "runs/a") == []
  assert len(resume_rules.errors(changes, ["opt", "see"], "runs/a")) == 3


def test_options_that_are_gone_are_ignored():
  """The file is of the glyphs recipe, by the version that had them."""
  golden = pathlib.Path(__file__).parents[1] / "golden"
  old = json.loads((golden / "old" / "glyphs.json").read_text())
  config = freeze(json.loads((golden / "glyphs.json").read_text())[""])
  assert resume_rules.differences(old, config) == []
  gone = resume_rules.unknown_options(old)
  assert {"optim.eps", "max_skipped", "limits.step_seconds"} < set(gone)


def test_a_longer_run_is_the_same_where_the_rate_is():
  """The rate of a cosine at a step depends on the length, a constant's not."""
  assert resume_rules.errors(_differences(total_steps=21), [], "a") == []
  for schedules in (("cosine", "cosine"), ("constant", "cosine")):
    old, new = (
      tiny.config(total_steps=20 + i, optim__schedule=schedule)
      for i, schedule in enumerate(schedules)
    )
    changes = resume_rules.differences(to_dict(old), new)
    (error,) = resume_rules.errors(changes, ["optim"], "a")
    assert error.startswith("config.total_steps was 20, is now 21 (")


def test_names_of_the_flag():
  assert resume_rules.names_of(None) == resume_rules.names_of(" ,") == ()
  names = resume_rules.names_of("optim, config.data.ops\nevals.old.split")
  assert names == ("optim", "data.ops", "evals.old.split")
  config, old = tiny.config(), to_dict(tiny.config())
  old["evals"] = {"old": {"kind": "classification", "split": "test"}}
  assert resume_rules.flag_errors(names, config, old) == []
  wrong = resume_rules.flag_errors(["optim.rl", "dta"], config, old)
  for error, got, meant in zip(
    wrong, ("'optim.rl'", "'dta'"), ("'optim.lr'", "'data'"), strict=True
  ):
    assert error.startswith(f"--allow_change: got {got}") and meant in error
  every = set(flat(to_dict(config)))
  assert resume_rules.flag_errors(every, config, {}) == []


def test_a_folder_by_another_path_is_the_same_data(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  options = {"data__dataset": "folder:pets/"}
  old = to_dict(tiny.config(**options))
  same = tiny.config(data__dataset=f"folder:{tmp_path}/pets")
  assert resume_rules.differences(old, same) == []
  other = tiny.config(data__dataset=f"folder:{tmp_path}/cars")
  (change,) = resume_rules.differences(old, other)
  assert change.key == "data.dataset"


def test_the_trail_stays_and_has_each_change_once(tmp_path):
  folder = str(tmp_path)
  changes = _differences(optim__lr=0.5, log_steps=7)
  trail = resume_rules.trail(folder, 8, changes)
  assert [(x["key"], x["from"], x["to"], x["by"]) for x in trail] == [
    ("log_steps", 50, 7, "harmless"),
    ("optim.lr", 0.01, 0.5, "--allow_change"),
  ]
  resume_rules.write(folder, trail)
  # Killed before config.json was written, it finds the same differences again.
  again = resume_rules.trail(folder, 8, changes)
  assert again == trail == resume_rules.read(folder)
  later = resume_rules.trail(folder, 16, _differences(log_steps=7))
  resume_rules.write(folder, later)
  path = tmp_path / resume_rules.FILE
  path.write_bytes(path.read_bytes() + b'\0\xff\n[1]\n{"step": 1}\n{"step')
  assert [x["step"] for x in resume_rules.read(folder)] == [8, 8, 16]
  assert json.loads(path.read_text(errors="replace").splitlines()[0])["time"]
