"""Facts of runs as the report states them: scores, data, costs, time."""

import dataclasses
import math
import re

import pytest
from fake_runs import Drawn, Page, run, write

from vit_jax.callbacks.accounting import BUCKETS
from vit_jax.config import ClassificationConfig, Config, FewshotConfig
from vit_jax.tools.reporting import curves, fewshot, runs, tables


def of_evals(split="train", rows=(), dataset="digits", **evals):
  """A run with evaluators, which score the head unless they say otherwise."""
  evals = {k: {"kind": "classification", **v} for k, v in evals.items()}
  data = {"dataset": dataset, "split": split}
  return run(rows, {"data": data, "evals": evals})


def titles(a_run):
  return [text for _, text, _ in tables.headlines(a_run)]


def test_a_folder_of_weights_is_no_run(tmp_path):
  """vit-jax convert writes such ones, timm and Hugging Face too."""
  for name in ("run", "weights"):
    write(tmp_path / name, config={})
  (tmp_path / "weights" / "metrics.jsonl").unlink()
  (tmp_path / "weights" / "model.safetensors").write_text("")
  assert [r.name for r in runs.find_runs(tmp_path)] == ["run"]


@pytest.mark.parametrize(
  "metadata, options, name, fact, score",
  [
    ({"data_given": None}, {}, "digits", "digits [train]", "digits train"),
    ({}, {"fake_data": True}, *["digits, fake", "digits [train], fake"],
     "digits train, fake"),
    ({"data_given": "Squares"}, {}, *["Squares, given"] * 2, "digits train"),
  ],
)  # fmt: skip
def test_data_are_what_was_trained_on(metadata, options, name, fact, score):
  """Not what config.data says of a run on a loader, or on made-up images."""
  rows = [{"step": 1, "head/top1": 0.5}]
  a_run = of_evals(rows=rows, head={"split": "train"})
  a_run.metadata.update(metadata)
  a_run.config.update(options)
  assert list(curves.by_dataset([a_run])) == [name]
  assert tables.run_facts(a_run)["data"] == fact
  assert titles(a_run) == [f"head ({score}), top-1"]
  assert a_run.is_training_part("head") == ("given" not in name)


def test_scores_have_the_names_of_data_and_classifier():
  few = {"kind": "fewshot", "l2": [2.0]}
  names = {
    "val": {},
    "real": {"dataset": "folder:/data/my_real/"},
    "probe": {"kind": "linear", "split": "test"},
    "some": {"kind": "subset", "split": "test"},
    "pets": {**few, "dataset": "oxford_pets/a=1", "split": "test"},
    "cars": {**few, "dataset": "cars", "split": "test"},
  }
  row = {"step": 1, "pets/25shot": 0.5, "cars/5shot": 0.125}
  row |= {f"{n}/top1": 0.5 for n in ("real", "probe", "some")}
  row |= {"val/top1": 0.25, "val/loss": 1.5, "val/count": 1e4}
  a_run = of_evals(rows=[row], dataset="imagenet/x", **names)
  assert titles(a_run) == [
    "val (imagenet validation), top-1",
    "real (my_real validation), top-1",
    "probe (imagenet test), linear probe, top-1",
    "some (imagenet test), among the classes of imagenet_a, top-1",
    "pets (oxford_pets test), 25-shot, L2 2",
    "cars (cars test), 5-shot, L2 2",
  ]
  head, first, *_ = Page(tables.scores([a_run])).rows
  assert head == ["", "top-1", "balanced", "top-5", "loss", "images"]
  assert first[1:] == ["25.0%", "—", "—", "1.5", "10,000"]


def test_scores_without_a_column_of_their_own():
  """Also few-shot accuracies of all examples, which is no number of shots."""
  few = {"kind": "fewshot", "dataset": "pets", "split": "test", "group": "few"}
  evals = {
    "pets": {**few, "l2": [2.0, 4.0]},
    "all": {"kind": "per_class", "split": "train"},
    "near": {"kind": "knn", "dataset": "glyphs", "split": "test"},
  }
  row = {"step": 1, "pets/5shot": 0.125, "pets/all": 0.5, "pets/l2=4/all": 0.75}
  row |= {"few/all": 0.375, "few/5shot": 0.125, "few/sets": 1.0}
  row |= {
    "all/top1": 0.5,
    "all/ece": 0.25,
    "near/20nn": 0.875,
    "near/count": 9.0,
  }
  a_run = of_evals(rows=[row], **evals)
  assert Page(tables.other_scores([a_run])).rows[1:] == [
    ["pets (pets test)", "fewshot", "all 0.5, l2=4/all 0.75"],
    ["all (digits train)", "per_class", "ece 0.25"],
    ["near (glyphs test)", "knn", "20nn 0.875, count 9"],
    ["few (mean of 1 data set)", "fewshot", "all 0.375"],
  ]


def test_scores_are_all_of_one_step_and_gaps_are_seen():
  rows = [
    {"step": 1, "head/top1": 0.8, "head/loss": 0.9, "train/loss": 1.0},
    {"step": 2, "head/top1": 0.1},  # whose loss is not finite
    {"step": 3, "train/skipped": 1.0},
    {"step": 4, "head/not_finite": 1},
  ]
  a_run = of_evals(rows=rows, head={"split": "test"})
  assert a_run.scores("other") == {}
  before = dataclasses.replace(a_run, rows=rows[:2])
  assert before.scores("head") == {"top1": 0.1}
  assert "0.9" not in tables.scores([before])
  for name, steps in (("train/loss", [1, 3]), ("head/top1", [1, 2, 4])):
    at, values = a_run.points(name)
    assert at == steps
    assert [math.isnan(v) for v in values] == [s > 2 for s in steps]


@pytest.mark.parametrize(
  "split, of_eval, is_training_part, is_held_out",
  [
    ("train[:90%]", "train[90%:]", True, True),
    ("train[:90%]", "train[:200]", True, False),
    ("train", "train[90%:]", True, False),
    ("train@2000", "train[99%:]", True, False),
    ("train800", "val200", True, True),
    ("train", "test", False, False),
  ],
)
def test_what_is_held_out(split, of_eval, is_training_part, is_held_out):
  a_run = of_evals(split, head={"split": of_eval})
  assert a_run.is_training_part("head") == is_training_part
  assert a_run.is_held_out("head") == is_held_out


def test_a_held_out_part_is_no_headline_beside_a_test():
  splits = {"val": {"split": "train[90%:]"}, "test": {"split": "test"}}
  row = {"step": 1, "val/top1": 0.5}
  both = of_evals("train[:90%]", [row | {"test/top1": 0.25}], **splits)
  assert titles(both) == ["test (digits test), top-1"]
  assert "digits train[90%:]" in tables.scores([both]).replace("<wbr>", "")
  alone = of_evals("train[:90%]", [row], **splits)
  assert titles(alone) == ["val (digits train[90%:]), top-1"]


@pytest.mark.parametrize(
  "evals, chance",
  [
    ({"val": {}, "few": {"kind": "fewshot"}}, True),
    ({"val": {}, "some": {"kind": "subset"}}, False),
    ({"val": {"dataset": "cifar100"}}, False),
  ],
)
def test_chance_is_that_of_all_curves(evals, chance):
  """The files of a run state the classes only of the training data."""
  metric = {"few": "10shot"}
  row = {"step": 1} | {f"{k}/{metric.get(k, 'top1')}": 0.5 for k in evals}
  a_run = of_evals(rows=[row], **evals)
  a_run.metadata["num_classes"] = 10
  drawn = Drawn()
  curves.section("x", [a_run], drawn)
  lines = [line.get_ydata() for line in drawn.axes["accuracy_x"].lines]
  assert (len(lines) > len(evals)) == chance
  assert not chance or [*lines[-1]] == [10.0, 10.0]


def test_means_stand_for_their_data_sets():
  few = [
    FewshotConfig(name=f"few_{d}", dataset=d, group="few", l2=(64.0,))
    for d in ("dtd", "cars196", "caltech101")
  ]
  row = {"step": 2, "val/top1": 0.5, "few/1shot": 0.125, "few/10shot": 0.375}
  row |= {"few_dtd/1shot": 0.25, "few_cars196/1shot": 0.0, "few/sets": 2.0}
  a_run = run([row], Config(evals=(ClassificationConfig(), *few)))
  assert a_run.groups == {"few": ["few_dtd", "few_cars196"]}  # as were scored
  assert a_run.fewshot_names() == ["few"]
  assert a_run.fewshot("few") == {"64": {"1": 0.125, "10": 0.375}}
  assert titles(a_run)[1:] == ["few (mean of 2 data sets), 10-shot, L2 64"]
  rows = Page(fewshot.section([a_run], Drawn(), has_probes=False)).rows
  assert ["few_dtd (dtd test)", "25.0%"] in rows
  assert ["few_cars196 (cars196 test)", "0.0%"] in rows


SECONDS = dict(step=60.0, input=0.4, evaluation=9.6, save=5.0, start=10.0)
SECONDS |= dict(compile=5.0, repeated=0.0, restart=10.0)


def accounted(seconds, name="a"):
  values = {f"train/seconds/{k}": v for k, v in seconds.items()}
  rows = [{"step": 1, "train/seconds/step": 1.0}, {"step": 2, **values}]
  return run(rows, name=name)


def test_a_bar_is_whole_and_its_numbers_are_named():
  assert SECONDS.keys() == set(BUCKETS) == curves.TIME_NAMES.keys()
  text = curves.time_section([accounted(SECONDS), accounted({}, "b")])
  widths = [float(x) for x in re.findall(r"width: ([\d.]+)%", text)]
  assert sum(widths) == 100.0 and len(widths) == 7
  assert "steps <b>1m00s</b> 60.0%" in text
  assert "waiting for images <b>0.4s</b> 0.4%" in text
  assert "steps done again" not in text  # there were none
  assert "Left out: times of b" in text
  assert curves.time_section([accounted({})]) == ""


def test_the_last_account_counts():
  """That of its end, in metadata.json, or a line after its last checkpoint."""
  a_run = accounted(SECONDS)
  a_run.rows[-1]["train/device_hours"] = 2.0
  for step, hours in ((70.0, 2.5), (50.0, 1.5)):
    account = {"began": 1.0, "seconds": SECONDS | {"step": step}}
    metadata = {"accounting": account | {"device_hours": hours}}
    other = dataclasses.replace(a_run, metadata=metadata)
    assert other.wall_seconds() == 40.0 + max(step, SECONDS["step"])
    assert tables.costs(other)["device-hours"] == max(hours, 2.0)
  damaged = {"accounting": {"began": "damaged"}}
  other = dataclasses.replace(a_run, metadata=damaged)
  assert other.seconds == SECONDS and other.device_hours == 2.0


def test_costs_are_facts_of_a_run():
  before = {"images_seen": 7e9, "exaflops": 4262.0, "device_hours": None}
  row = {"train/images_seen": 1_281_167.0, "train/exaflops": 0.135}
  metadata = {"accounting": {"device_hours": 2.5, "init": before}}
  a_run = run([{"step": 2, **row}], metadata=metadata)
  costs = tables.cost_texts(a_run)
  assert costs["images seen"] == "1,281,167"
  assert costs["exaFLOPs"] == "0.135" and costs["device-hours"] == "2.5"
  facts = tables.run_facts(a_run)["the run before"]
  for text in ("7,000,000,000", "4,262", "device-hours unknown"):
    assert text in facts


def test_changes_on_the_way_are_one_fact():
  change = {"step": 1008, "key": "optim.lr", "from": 0.1, "to": None, "by": "x"}
  facts = tables.run_facts(run(metadata={"changes": [change] * 7}))
  text = facts["changed on the way"]
  once = "step 1,008: optim.lr 0.1 to None"
  assert text == "; ".join([once] * 5 + ["and 2 more"])
