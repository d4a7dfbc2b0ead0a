"""The command convert: what it says, and what it refuses."""

import errno
import json
import os
import pathlib

import jax
import numpy as np
import pytest
from converting import SUFFIX, assert_same

import vit_jax
from vit_jax.commands import convert as convert_command
from vit_jax.models import resample
from vit_jax.tools.exporting import convert
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


@pytest.mark.usefixtures("quick_to_compile")
def test_the_command_says_what_it_did(tmp_path, capsys):
  src, dst = DATA / "vit_linen_names.weights.npz", tmp_path / "new" / "vit"
  lines = main(
    capsys, src, dst, "--to=hf", "--image_size=48", "--posemb_filter=bicubic"
  )
  assert lines[:-2] == [
    f"weights         {src}",
    "loaded          40 arrays, 49,643 parameters",
    f"resized         {POS_EMBEDDING}: 4x4 -> 6x6",
    "re-initialised  nothing",
    "ignored         nothing",
    "note            the file does not state the loss of its head: read as a"
    " softmax over classes. For another: vit_jax.load(path, loss='regression')"
    " or 'sigmoid', or the folder of the run, which states it.",
    "model           --config.model.variant=B/8 --config.model.width=48"
    " --config.model.depth=2 --config.model.mlp_dim=96"
    " --config.model.num_heads=4",
    "images          48x48, decode|resize(48)",
    f"written         {dst}",
    f"{'':<16}transformers.ViTForImageClassification.from_pretrained('{dst}')",
    f"{'':<16}preprocessing there: decode(dct='accurate')|resize_torch(48,"
    " 'bilinear'), transformers' nearest to decode|resize(48)",
    f"{'':<16}vit_jax.load('{dst}', posemb_filter='bicubic') resizes positions"
    " as before",
  ]
  # The same arrays, the same program: no difference at all.
  assert lines[-2].startswith("read again      largest difference of logits 0,")
  config = json.loads((dst / "config.json").read_text())
  assert config["image_size"] == 48 and config["hidden_act"] == (
    "gelu_pytorch_tanh"
  )
  expected = vit_jax.load(
    src, image_size=48, posemb_filter="bicubic", verbose=False
  )
  assert_same(vit_jax.load(dst, verbose=False), expected)


@pytest.mark.slow
def test_the_command_s_options(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(convert, "largest_difference", lambda *_: (0.0, 1.0))
  src = DATA / "vit_linen_names.weights.npz"
  npz, timm = tmp_path / "a.npz", tmp_path / "b.safetensors"
  main(
    capsys, src, npz, "--to=npz", "--patch=4", "--image_size=16x24",
    "--gelu=erf",
  )  # fmt: skip
  lines = main(capsys, npz, timm, "--to=timm", "--grid=4x6", "--gelu=erf")
  assert f"resized         {POS_EMBEDDING}" not in "\n".join(lines)
  assert "images          16x24, decode|resize((16, 24))" in lines
  vit = vit_jax.load(timm, verbose=False)
  assert (vit.config.variant, vit.config.gelu) == ("B/4", "erf")
  assert vit.image_size == (16, 24)

  # A file of timm's own, which cannot say how many heads there are.
  from vit_jax.weights import safetensors_file

  arrays = safetensors_file.open_safetensors(timm)[0]
  bare = tmp_path / "c.safetensors"
  safetensors_file.write(
    bare, {k: np.asarray(v) for k, v in arrays.items()}, {}
  )
  with pytest.raises(SystemExit, match="Pass num_heads"):
    main(capsys, bare, tmp_path / "d", "--to=orbax")
  main(
    capsys, bare, tmp_path / "d", "--to=orbax", "--num_heads=4", "--grid=4x6"
  )
  assert_same(vit_jax.load(tmp_path / "d", verbose=False), vit)

  # No table: fixed positions, or none.
  src = DATA / "bv_gap_sincos2d_rep.weights.npz"
  main(
    capsys, src, tmp_path / "e", "--to=orbax", "--posemb=none",
    "--image_size=32",
  )  # fmt: skip
  assert vit_jax.load(tmp_path / "e", verbose=False).config.posemb == "none"
  # A table whose first row is no class token's.
  src = DATA / "bv_token.weights.npz"
  with pytest.raises(SystemExit, match="got 15 patches, expected a square"):
    main(capsys, src, tmp_path / "f", "--to=orbax", "--cls_row=true")
  main(capsys, src, tmp_path / "f", "--to=orbax", "--cls_row=false")
  assert not vit_jax.load(tmp_path / "f", verbose=False).config.cls_row


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("to", ["timm", "hf"])
def test_the_command_drops_a_head(tmp_path, capsys, monkeypatch, to):
  if to == "hf":  # to compile it once is enough
    monkeypatch.setattr(convert, "largest_difference", lambda *_: (0.0, 1.0))
  src = DATA / "vit_token_prelogits.weights.npz"
  dst = tmp_path / ("x" + SUFFIX[to])
  with pytest.raises(SystemExit, match="--drop_head"):
    main(capsys, src, dst, f"--to={to}")
  assert not dst.exists()
  lines = main(capsys, src, dst, f"--to={to}", "--drop_head")
  assert lines[-2].startswith(
    "read again      largest difference of pre_logits"
  )
  vit = vit_jax.load(dst, verbose=False)
  assert vit.num_classes == 0
  assert vit.config.pre_logits == (to == "hf")
  if to == "hf":
    assert "transformers.ViTModel.from_pretrained" in lines[-4]


@pytest.mark.parametrize(
  "argv, text",
  [
    (
      ["SRC", "DST.bin", "--to=npz"],
      "DST.bin', expected a name ending in .npz",
    ),
    (["none.npz", "DST", "--to=orbax"], "got 'none.npz', which does not exist"),
    (["SRC", "SRC", "--to=npz"], "which exists."),
    (["SRC", "DST", "--to=orbax", "--grid=3x4"], "got 17 rows, expected 13"),
  ],
)
def test_errors_of_the_command(tmp_path, capsys, argv, text):
  names = {
    "SRC": str(DATA / "vit_linen_names.weights.npz"),
    "DST": str(tmp_path / "x"),
    "DST.bin": str(tmp_path / "DST.bin"),
  }
  with pytest.raises(SystemExit) as e:
    main(capsys, *(names.get(w, w) for w in argv))
  assert text in str(e.value.code)
  assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  source, target = DATA / "vit_token.weights.npz", tmp_path / "file" / "x.npz"
  with pytest.raises(SystemExit) as error:
    convert_command.main([str(source), str(target), "--to=npz"])
  assert str(error.value) == (
    f"DST: got {str(target)!r}, but {tmp_path / 'file'} cannot be written to."
  )


@pytest.mark.parametrize("to", ["npz", "orbax"])
def test_what_fails_leaves_nothing(tmp_path, monkeypatch, to):
  source, suffix = DATA / "vit_token.weights.npz", convert.WRITERS[to].suffix
  target = tmp_path / f"x{suffix or ''}"

  def stop(*_):
    assert target.exists()
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(convert, "largest_difference", lambda *_: (1.0, 1.0))
    with pytest.raises(SystemExit, match="expected at most"):
      convert_command.main([str(source), str(target), f"--to={to}"])
  assert not list(tmp_path.iterdir())
  with monkeypatch.context() as patch:
    patch.setattr(convert, "largest_difference", stop)
    with pytest.raises(KeyboardInterrupt):
      convert_command.main([str(source), str(target), f"--to={to}"])
  assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
  source, target = DATA / "vit_token.weights.npz", tmp_path / "x.npz"
  (tmp_path / "x.npz.data").write_text("of the user")

  def fill(stream, **_):
    stream.write(b"PK")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(convert.np, "savez", fill)
  with pytest.raises(SystemExit, match="No space left on device"):
    convert_command.main([str(source), str(target), "--to=npz"])
  assert [path.name for path in tmp_path.iterdir()] == ["x.npz.data"]


def test_a_source_that_cannot_be_read(tmp_path, monkeypatch):
  def load(path, **_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

  monkeypatch.setattr(vit_jax, "load", load)
  with pytest.raises(SystemExit) as e:
    convert_command.main(["a.npz", str(tmp_path / "x.npz"), "--to=npz"])
  assert str(e.value) == "a.npz: Permission denied."


@pytest.mark.parametrize(
  "word, text",
  [
    ("--image_size=0", "got '0', expected a size such as 224"),
    ("--posemb_filter=x", "invalid choice: 'x'"),
    ("--patch=0", "--patch: got '0', expected a number from 1"),
    ("--num_heads=-4", "--num_heads: got '-4', expected a number from 1"),
    ("--grid=x", "--grid: got 'x', expected a size such as 224 or 224x160 (a"),
  ],
)
def test_a_wrong_flag_is_named(capsys, word, text):
  with pytest.raises(SystemExit):
    main(capsys, "a", "b", "--to=npz", word)
  assert text in capsys.readouterr().err


def test_help_has_a_meaning_for_every_format_and_filter():
  assert list(convert_command.FORMATS) == list(convert.WRITERS)
  assert list(convert_command.FILTERS) == list(resample.METHODS)
