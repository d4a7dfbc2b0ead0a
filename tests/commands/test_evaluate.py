"""A checkpoint is scored on other data: classes by name, few-shot, files."""

import contextlib
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import tiny
from etils import epath
from PIL import Image

import vit_jax
from vit_jax import evaluate, train
from vit_jax.callbacks import run_record, startup
from vit_jax.checkpointing import checkpointer, layout
from vit_jax.commands import evaluate as command
from vit_jax.config import Config, ConfigError, defaults, freeze, to_dict
from vit_jax.data.sources import Sources
from vit_jax.finetune import probes
from vit_jax.models import precision
from vit_jax.tools.exporting import convert

OPS = "decode|resize(16)"
COLOURS = {
  "blue": (0, 0, 200),
  "green": (0, 200, 0),
  "red": (200, 0, 0),
  "white": (200, 200, 200),
}


def folder(root, colour_of, num_images=16):
  """One class folder a name, with images of its colour."""
  rng = np.random.default_rng(0)
  for name, colour in colour_of.items():
    (root / name).mkdir(parents=True)
    for i in range(num_images):
      noise = rng.integers(0, 50, (8, 8, 3))
      image = Image.fromarray(np.uint8(noise + COLOURS[colour]))
      image.save(root / name / f"{i}.png")
  return f"folder:{root}"


def test_without_evaluators_nothing_is_read():
  with pytest.raises(
    ConfigError, match="config.evals: got no evaluator.*--fewshot=DAT"
  ):
    evaluate.evaluate(tiny.config(), "nowhere")


def config(dataset, **changes):
  c = defaults()
  c.update(to_dict(tiny.config(model__depth=1)))
  c.data.dataset = dataset
  c.evals = {"val": {"kind": "classification", "split": "val", "ops": OPS}}
  tiny.apply(c, changes)
  return freeze(c)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run on four colours, which it separates at its end."""
  root = tmp_path_factory.mktemp("colours")
  dataset = folder(root / "data", {name: name for name in COLOURS})
  workdir = root / "run"
  train.train_and_evaluate(config(dataset), str(workdir))
  return workdir, dataset


def _eval(dataset, **options):
  return {
    "val": {
      "kind": "classification",
      "dataset": dataset,
      "split": "train+val",
      "ops": OPS,
      **options,
    }
  }


@pytest.mark.slow
def test_classes_in_another_order_are_scored_by_name(run, tmp_path, capsys):
  """Two of four classes: labels 0 and 1 are columns 3 and 0, or 1 and 2."""
  workdir, dataset = run
  # An evaluation needs no length and no optimizer.
  unset = {"total_steps": None, "optim__lr": -1.0}
  same = evaluate.evaluate(
    config(dataset, evals=_eval(dataset), **unset), str(workdir)
  )
  assert same["val/top1"] == 1 and same["val/count"] == 64
  assert "4 classes, matched by name; the same order" in capsys.readouterr().out
  few = folder(tmp_path / "few", {"red": "red", "white": "white"})
  scores = evaluate.evaluate(config(dataset, evals=_eval(few)), str(workdir))
  assert scores["val/top1"] == 1 and scores["val/count"] == 32
  out = capsys.readouterr().out
  assert (
    f"val         {few} [train+val], 2 of the head's 4 classes, matched by"
    " name; another order\n" in out
  )
  # Where the names are not known, labels are columns, which are others here.
  step = tmp_path / "run" / "checkpoints" / "20"
  shutil.copytree(workdir, tmp_path / "run")
  file = step / "metadata" / "metadata"
  metadata = json.loads(file.read_text())
  assert metadata.pop("class_names") == sorted(COLOURS)
  file.write_text(json.dumps(metadata))
  digests = checkpointer.digests(str(step))
  layout.write_digests(epath.Path(step), digests, metadata)
  nameless = str(tmp_path / "run")
  scores = evaluate.evaluate(config(dataset, evals=_eval(few)), nameless)
  assert scores["val/top1"] == 0
  out = capsys.readouterr().out
  assert "2 classes, matched by position alone: the head has no names" in out
  assert "was trained on images of" not in out


@pytest.mark.slow
def test_other_images_than_in_training_are_said(tmp_path, capsys):
  """Images that a folder gained move others from `train` to `val`."""
  dataset = folder(tmp_path / "data", {name: name for name in COLOURS}, 4)
  whole = config(dataset, total_steps=1)
  train.train_and_evaluate(whole, str(tmp_path / "run"))
  text = "val may have images that it was trained on"
  for is_other in (False, True):
    capsys.readouterr()
    evaluate.evaluate(whole, str(tmp_path / "run"))
    assert (text in capsys.readouterr().out) == is_other
    shutil.copy(tmp_path / "data/red/0.png", tmp_path / "data/red/new.png")


@pytest.mark.slow
def test_another_size_than_in_training_is_said(run, capsys):
  workdir, dataset = run
  ops = "decode|resize(32)"
  evals = _eval(dataset, ops=ops)
  evaluate.evaluate(config(dataset, data__ops=ops, evals=evals), str(workdir))
  text = "the model was trained on images of 16 x 16 pixels, and is scored on"
  assert f"{text} 32 x 32" in capsys.readouterr().out


def test_another_model_is_refused_with_the_argument_that_has_its_own(run):
  workdir, dataset = run
  other = config(dataset, evals=_eval(dataset), model__mlp_dim=8)
  with pytest.raises(ConfigError) as e:
    evaluate.evaluate(other, str(workdir))
  assert f"add init={workdir} to it: then model and image" in str(e.value)


def test_other_classes_are_refused_before_anything_is_compiled(
  run, tmp_path, monkeypatch
):
  workdir, dataset = run
  monkeypatch.setattr(jax, "jit", None)
  other = folder(tmp_path / "other", {"red": "red", "rot": "red"})
  with pytest.raises(ConfigError) as e:
    evaluate.evaluate(config(dataset, evals=_eval(other)), str(workdir))
  (error,) = e.value.errors
  assert error.startswith(
    f"config.evals.val.dataset: got {other!r} with 2 classes, of which 1 are"
    " not once in the head: rot; expected names of the head's 4 classes: blue,"
    " green, red, white"
  )
  # So is a training run with such an evaluator, and one that resumes with
  # other classes than it began with.
  with pytest.raises(ConfigError, match="config.evals.val.dataset: got"):
    train.train_and_evaluate(
      config(dataset, evals=_eval(other)), str(tmp_path / "run")
    )
  assert not (tmp_path / "run").exists()
  five = folder(tmp_path / "five", {**{c: c for c in COLOURS}, "rot": "red"})
  with pytest.raises(ConfigError) as e:
    train.train_and_evaluate(config(five, total_steps=21), str(workdir))
  assert any(
    "classes ('blue', 'green', 'red', 'rot', 'white'), expected ('blue',"
    in error
    for error in e.value.errors
  )


def test_beside_a_running_run_nothing_is_written_unasked(
  run, tmp_path, monkeypatch, capsys
):
  folder = tmp_path / "run"
  shutil.copytree(run[0], folder)
  argv = [f"--checkpoint={folder}"]
  record = run_record.new()
  (folder / run_record.FILE).write_text(json.dumps(record))
  before = {p for p in folder.rglob("*") if "cache" not in str(p)}
  monkeypatch.setitem(run_record.open_records, record["id"], lambda how: None)
  command.main(argv)
  assert {p for p in folder.rglob("*") if "cache" not in str(p)} == before
  assert f"not written: a run is training in {folder};" in (
    capsys.readouterr().out
  )
  command.main([*argv, f"--workdir={folder}"])
  assert (folder / "evaluation.jsonl").exists()


@pytest.mark.slow
def test_training_scores_another_data_set_by_name(run, tmp_path, capfd):
  workdir, dataset = run
  few = folder(tmp_path / "few", {"red": "red", "white": "white"})
  c = config(
    dataset, init=str(workdir), total_steps=1, optim__lr=1e-9, evals=_eval(few)
  )
  train.train_and_evaluate(c, str(tmp_path / "run"))
  err = capfd.readouterr().err
  assert f"val         {few} [train+val], 2 of the head's 4 classes" in err
  assert "re-initialised  nothing" in err and "top1 1.0000" in err
  with np.load(tmp_path / "run" / "predictions.npz") as saved:
    # Columns of the head, as the names in metadata.json.
    assert set(saved["label"]) == {2, 3}
    np.testing.assert_array_equal(saved["label"], saved["prediction"])


def _main(*args):
  command.main(args)


def test_fewshot_of_a_checkpoint_on_a_folder(run, tmp_path, capfd):
  """It needs no config; shots are as many as every class has, and all."""
  workdir, _ = run
  own = folder(tmp_path / "own", {"x": "red", "y": "green"}, 7)
  (tmp_path / "own" / "y" / "0.png").unlink()  # 6 training images of x, 5 of y
  _main(f"--checkpoint={workdir}", f"--fewshot={own}", "--json")
  out, err = capfd.readouterr()
  row = json.loads(out)  # one line, and nothing else
  assert row["scores"] == {
    "fewshot/1shot": 1.0,
    "fewshot/5shot": 1.0,
    "fewshot/all": 1.0,
  }
  assert row["step"] == 20 and row["checkpoint"] == str(workdir)
  text = (
    f"{own}, learns from [train] (11 images, 2 classes), scored on [val] (2)"
  )
  assert row["data"] == {"fewshot": text}
  assert f"fewshot     {text}\nstep 20: fewshot  1shot 1.0000" in err
  # The last line of the run's file; --workdir names another folder.
  lines = (workdir / "evaluation.jsonl").read_text().splitlines()
  assert json.loads(lines[-1]) == row
  _main(
    f"--checkpoint={workdir}/checkpoints",
    f"--fewshot={own}",
    f"--workdir={tmp_path}/here",
  )
  assert (
    f"written     {tmp_path}/here/evaluation.jsonl" in capfd.readouterr().out
  )
  (line,) = (tmp_path / "here" / "evaluation.jsonl").read_text().splitlines()
  assert json.loads(line)["scores"] == row["scores"]


@pytest.mark.slow
def test_features_of_a_file_have_the_products_that_are_fastest(
  run, tmp_path, capfd, monkeypatch
):
  """The bound of docs/tasks/predict.md, whose model was trained longer."""
  own = folder(tmp_path / "own", {name: name for name in COLOURS}, 7)
  file = tmp_path / "weights.npz"
  vit = vit_jax.load(str(run[0]), verbose=False)
  convert.convert(vit, str(file), "npz")
  scores = {}
  for dtype in ("float32", "bfloat16"):
    monkeypatch.setattr(precision, "fastest_dtype", lambda dtype=dtype: dtype)
    workdir = f"--workdir={tmp_path / dtype}"
    _main(f"--checkpoint={file}", f"--fewshot={own}", workdir)
    assert f"dtype           {dtype}\n" in capfd.readouterr().out
    (line,) = (tmp_path / dtype / "evaluation.jsonl").read_text().splitlines()
    assert json.loads(line)["dtype"] == dtype
    scores[dtype] = json.loads(line)["scores"]
  assert scores["bfloat16"] == scores["float32"]
  options = Config(), str(file)
  assert probes.config_of_file(*options, "float32").model.dtype == "float32"
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  assert probes.config_of_file(*options).model.dtype == "float32"


def test_a_config_has_a_dtype_of_its_own(run):
  message = "--dtype: got 'float32', which is only for --fewshot, --linear or"
  with pytest.raises(SystemExit, match=message):
    _main(f"--checkpoint={run[0]}", "--fewshot=digits", "--dtype=float32")


def test_each_published_file_has_a_folder(monkeypatch):
  """Names of timm differ after their dot."""
  folders = []
  monkeypatch.setattr(
    evaluate,
    "record",
    lambda config, path, workdir, *others: folders.append(workdir),
  )
  for name in ("config_of_file", "with_probes"):
    monkeypatch.setattr(probes, name, lambda config, *others: config)
  monkeypatch.setattr(startup, "use_cache", lambda workdir: None)
  for path in ("hf-hub:timm/vit.orig", "hf-hub:timm/vit.augreg", "x/a.b.pth"):
    _main(f"--checkpoint={path}", "--fewshot=digits")
  assert folders == ["runs/vit.orig", "runs/vit.augreg", "runs/a.b"]


def test_the_normalisation_in_a_config_is_that_of_its_init(monkeypatch):
  asked = []

  def read(path, mean):
    asked.append(mean)
    raise ValueError

  monkeypatch.setattr(evaluate.weights, "read", read)
  c = config("folder:x", init="a.npz", init_mean="imagenet")
  for path, mean in (("a.npz", None), ("a.npz", "half"), ("b.npz", None)):
    with pytest.raises(ConfigError, match="--checkpoint: "):
      evaluate.open_checkpoint(c, path, mean=mean)
  assert asked == ["imagenet", "half", None]


def _with_fewshot(config, dataset):
  return probes.with_probes(config, {"fewshot": dataset}, Sources())


def test_fewshot_takes_test_before_val_and_says_what_is_missing(tmp_path):
  root = tmp_path / "own"
  folder(root / "train", {"a": "red", "b": "blue"}, 12)
  folder(root / "valid", {"a": "red"} | {"b": "blue"}, 2)
  c = config(f"folder:{root}", evals=_eval(None, ops="decode|resize((16, 16))"))
  (probe,) = _with_fewshot(c, f"folder:{root}").evals
  assert (probe.train_split, probe.split) == ("train", "val")
  assert probe.shots == (1, 5, 10, 0) and not probe.baselines
  assert probe.ops == "decode|resize((16, 16))"
  folder(root / "Testing", {"a": "red", "b": "blue"}, 2)
  (probe,) = _with_fewshot(c, f"folder:{root}").evals
  assert probe.split == "test"
  few = {"f": {"kind": "fewshot", "l2": (1.0, 2.0), "shots": (3, 30)}}
  (probe,) = _with_fewshot(config("x", evals=few), f"folder:{root}").evals
  assert probe.l2 == (1.0, 2.0) and probe.shots == (3, 0)
  assert probe.name == "fewshot"  # not that of the config's own
  with pytest.raises(ConfigError, match="--fewshot: got data set .* no folder"):
    _with_fewshot(c, f"folder:{root}/nowhere")


def test_an_unknown_evaluator_lists_those_there_are(run):
  workdir, _ = run
  with pytest.raises(SystemExit) as e:
    _main(f"--checkpoint={workdir}", "--config.evals.x.split=test")
  assert "config.evals.x: no such evaluator." in str(e.value)


def test_a_folder_that_cannot_be_written_to_is_refused_first(run, tmp_path):
  workdir, _ = run
  (tmp_path / "file").write_text("")
  with pytest.raises(SystemExit) as e, contextlib.redirect_stdout(None):
    _main(f"--checkpoint={workdir}", f"--workdir={tmp_path}/file/x")
  assert f"--workdir: got '{tmp_path}/file/x', where no files can" in str(
    e.value
  )


def test_a_damaged_config_of_a_run_is_a_sentence(tmp_path):
  (tmp_path / "config.json").write_text("{bad")
  for args in ((), ("--fewshot=digits",)):
    with pytest.raises(SystemExit, match=r"--checkpoint: .*/config.json: got"):
      _main(f"--checkpoint={tmp_path}", *args)


@pytest.mark.slow
def test_weights_without_a_head_have_features(run, tmp_path, monkeypatch):
  """The head is not used: features are scored the same without it."""
  workdir, dataset = run
  c = _with_fewshot(config(dataset), dataset)
  want = evaluate.evaluate(c, str(workdir))
  read = evaluate.weights.read

  def headless(path, **options):
    file = read(path, **options)
    params = {k: v for k, v in file.params.items() if k[:5] != "head/"}
    return dataclasses.replace(file, params=params)

  monkeypatch.setattr(evaluate.weights, "read", headless)
  assert evaluate.evaluate(c, str(workdir)) == want
  with pytest.raises(ConfigError, match="has no head; expected one, or --few"):
    evaluate.evaluate(config(dataset), str(workdir))
