"""The command convert: what it says, its options, what it checks."""

import json
import pathlib

import jax
import numpy as np
import pytest
from converting import assert_same

import vit_jax
from vit_jax.commands import convert as convert_command
from vit_jax.tools.exporting import convert
from vit_jax.weights import safetensors_file
from vit_jax.weights.weights_file import POS_EMBEDDING

DATA = pathlib.Path(__file__).parents[1] / "data"


@pytest.fixture
def quick_to_compile():
  """Compiles what the command compares, in half of the usual time."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def main(capsys, *argv):
  convert_command.main([str(word) for word in argv])
  return capsys.readouterr().out.split("\n")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_to_compile")
def test_the_command_writes_checks_and_says_how_to_load(tmp_path, capsys):
  src, dst = DATA / "vit_linen_names.weights.npz", tmp_path / "new" / "vit"
  lines = main(
    capsys, src, dst, "--to=hf", "--image_size=48", "--posemb_filter=bicubic"
  )
  text = "\n".join(lines)
  for words in (
    f"{POS_EMBEDDING}: 4x4 -> 6x6",
    "--config.model.variant=B/8 ",
    f"from_pretrained('{dst}')",
    f"load('{dst}', posemb_filter='bicubic')",
    # The same arrays, the same program: no difference at all.
    "largest difference of logits 0,",
  ):
    assert words in text
  config = json.loads((dst / "config.json").read_text())
  assert config["image_size"] == 48
  assert config["hidden_act"] == "gelu_pytorch_tanh"
  expected = vit_jax.load(
    src, image_size=48, posemb_filter="bicubic", verbose=False
  )
  assert_same(vit_jax.load(dst, verbose=False), expected)


@pytest.mark.slow
def test_the_command_s_options(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(convert, "largest_difference", lambda *_: (0.0, 1.0))
  write = lambda src, dst, *argv: main(capsys, src, tmp_path / dst, *argv)
  load = lambda name: vit_jax.load(tmp_path / name, verbose=False)
  src = DATA / "vit_linen_names.weights.npz"
  changes = ("--patch=4", "--image_size=16x24", "--gelu=erf")
  write(src, "a.npz", "--to=npz", *changes)
  grid = "--grid=4x6"
  timm = tmp_path / "b.safetensors"
  lines = write(tmp_path / "a.npz", timm, "--to=timm", grid, "--gelu=erf")
  assert f"resized         {POS_EMBEDDING}" not in "\n".join(lines)
  vit = load(timm)
  assert (vit.config.variant, vit.config.gelu) == ("B/4", "erf")
  assert vit.image_size == (16, 24)

  # A file of timm's own, which cannot say how many heads there are.
  arrays = safetensors_file.open_safetensors(timm)[0]
  bare = tmp_path / "c.safetensors"
  arrays = {k: np.asarray(v) for k, v in arrays.items()}
  safetensors_file.write(bare, arrays, {})
  with pytest.raises(SystemExit, match="num_heads"):
    write(bare, "d", "--to=orbax")
  write(bare, "d", "--to=orbax", "--num_heads=4", grid)
  assert_same(load("d"), vit)

  # No table: fixed positions, or none.
  src = DATA / "bv_gap_sincos2d_rep.weights.npz"
  write(src, "e", "--to=orbax", "--posemb=none", "--image_size=32")
  assert load("e").config.posemb == "none"
  # A table whose first row is no class token's.
  src = DATA / "bv_token.weights.npz"
  with pytest.raises(SystemExit, match="15 patches"):
    write(src, "f", "--to=orbax", "--cls_row=true")
  write(src, "f", "--to=orbax", "--cls_row=false")
  assert not load("f").config.cls_row


def test_other_logits_are_an_error_and_leave_nothing(tmp_path, monkeypatch):
  vit = vit_jax.load(DATA / "vit_token.weights.npz", verbose=False)
  monkeypatch.setattr(vit_jax, "load", lambda *_, **__: vit)
  dst, writer = tmp_path / "x.npz", convert.WRITERS["npz"]
  for factor in (2, np.nan):

    def read(vit, path, factor=factor):
      assert dst.exists()
      return lambda images: factor * np.asarray(vit(images)[0])

    monkeypatch.setitem(convert.WRITERS, "npz", writer._replace(read=read))
    argv = [vit.report.path, str(dst), "--to=npz"]
    with pytest.raises(SystemExit, match="x.npz: got logits .*at most 0.001"):
      convert_command.main(argv)
    assert not list(tmp_path.iterdir())
