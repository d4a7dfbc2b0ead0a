"""The check of prices on TPU slices: what it compares, keeps and names."""

import json
import pathlib
import subprocess

import plans
import pytest

from vit_jax.config import checks, cli

ROOT = pathlib.Path(__file__).parents[1]
TITLE, CONFIG, SLICE = plans.CHECKED[0]


@pytest.fixture
def compiler(tmp_path, monkeypatch):
  """Prices every row at `prices[-1]` seconds; files are in `tmp_path`."""
  prices = [1.0]
  monkeypatch.setattr(plans, "PLANS", tmp_path / "plans.jsonl")
  monkeypatch.setattr(plans, "PAGE", tmp_path / "plans.md")
  monkeypatch.setattr(plans, "versions", lambda: "jax 1 and libtpu 2")
  plans.PLANS.touch()

  def run(*_, **__):
    plan = dict.fromkeys(plans.COLUMNS, 1.0)
    plan |= {"fits": prices[-1] is not None, "price_seconds": prices[-1]}
    return subprocess.CompletedProcess([], 0, json.dumps(plan), "")

  monkeypatch.setattr(plans.subprocess, "run", run)
  return prices


def test_a_price_above_the_best_is_named_until_it_is_mended(compiler, capsys):
  plans.check([""])
  first = capsys.readouterr().out
  assert f"20 rows have no committed price with {plans.versions()}" in first
  compiler.append(1.02)
  plans.check([""])
  assert f"{TITLE}, {SLICE}: 1020.0, 1000.0, 1.020" in capsys.readouterr().out
  compiler.append(1.04)
  for _ in range(2):  # the second time the file has the higher price, too
    with pytest.raises(SystemExit) as e:
      plans.check(["vit_s16"])
    assert str(e.value) == (
      "worse than the best price by more than 3 %:\n"
      f"  {TITLE}, {SLICE} ({CONFIG}): 1040.0, 1000.0, 1.040"
    )
  compiler.append(0.9)
  plans.check(["vit_s16"])
  assert plans.best(plans.known()[CONFIG, SLICE]) == 0.9
  assert len(plans.stored()) == len(plans.CHECKED)
  assert plans.PAGE.read_text().count("| 1.00 |\n") == 1


def test_a_row_that_no_longer_fits(compiler):
  plans.check(["vit_s16"])
  compiler.append(None)
  with pytest.raises(SystemExit, match="does not fit"):
    plans.check(["vit_s16"])
  assert plans.best(plans.known()[CONFIG, SLICE]) == 1.0


def test_other_versions_are_not_compared(compiler, capsys, monkeypatch):
  plans.check(["vit_s16"])
  monkeypatch.setattr(plans, "versions", lambda: "jax 3 and libtpu 4")
  compiler.append(2.0)
  plans.check(["vit_s16"])
  text = capsys.readouterr().out
  assert "no committed price with jax 3 and libtpu 4" in text
  assert "also has: jax 1 and libtpu 2" in text
  assert len(plans.stored()) == 2


@pytest.mark.parametrize("title,config,topology", plans.CHECKED)
def test_checked_rows_are_recipes(title, config, topology):
  name, *options = config.split()
  args = cli.parse("x", {}, [f"--config={name}", *options])
  assert not args.errors and not checks.errors(args.config)
  assert (("scan" in title), ("LoRA" in title)) == (
    args.config.model.scan,
    args.config.lora.rank is not None and args.config.lora.rank > 0,
  )


def test_checked_rows_span_the_recipes():
  assert len({row[1:] for row in plans.CHECKED}) == 20
  text = str(plans.CHECKED)
  for part in (*"SBLH", "384 px", "512 px", "LoRA", "DINOv3-L"):
    assert part in text
  for kind in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
    assert f"{kind}:" in text
