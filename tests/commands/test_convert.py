"""`vit-jax convert`: every format is read again, by us and by its library."""

import dataclasses
import json
import pathlib
import shutil
from unittest import mock

import huggingface_hub
import jax
import numpy as np
import pytest
import torch_libraries
from converting import AS_TIMM, MODELS, SIZE, assert_same, foreign, make

import vit_jax
from vit_jax import class_names
from vit_jax.commands import convert as convert_command
from vit_jax.families.vit import ViTConfig
from vit_jax.models.stacking import stack_blocks
from vit_jax.tools.exporting import convert
from vit_jax.weights import safetensors_file
from vit_jax.weights.weights_file import POS_EMBEDDING

DATA = pathlib.Path(__file__).parents[1] / "data"
TOKEN = DATA / "vit_token.weights.npz"
LINEN = DATA / "vit_linen_names.weights.npz"  # 32 px, 11 classes
SUFFIX = {"orbax": "", "npz": ".npz", "timm": ".safetensors", "hf": ""}
SLOW = pytest.mark.slow


# What becomes of a model in .npz, in timm and in Hugging Face: {} as it was; a
# dict: these options are others then; a text: the option for which it is
# refused; None: see tests/weights/test_round_trip.py.
TO_LEARN = dict(posemb="learn", cls_row=False)
CASES = {
  "token": ({}, {}, {}),
  "no_row": ({}, {}, {"cls_row": True}),
  "gap_sincos2d": ({}, TO_LEARN, {"posemb": "learn"}),
  "map": ({}, {}, "config.model.pool"),
  "relative": ({}, "config.model.posemb", "config.model.posemb"),
  "pre_logits": ({}, "pre_logits", "config.model.pre_logits"),
  "hybrid": ({}, {}, "config.model.variant"),
  "bit": ({}, {}, "config.model.name"),
  "bit_v1": ({}, "config.model.name", "config.model.name"),
  "swiglu": ("config.model.name", None, None),
  "distilled": ("config.model.name", None, None),
}


@pytest.mark.parametrize(
  "name",
  [pytest.param(n, marks=[] if n == "token" else SLOW) for n in CASES],
)
def test_there_and_back(tmp_path, name):
  """Model, sizes, names, preprocessing and loss, too; a .npz says its needs."""
  image_size = (64, 96) if "R" in MODELS[name]["variant"] else SIZE
  vit = make(image_size=image_size, loss="bce", **MODELS[name])
  for to, changes in zip(SUFFIX, ({}, *CASES[name]), strict=True):
    dst = tmp_path / (to + SUFFIX[to])
    if changes is None:
      continue
    if isinstance(changes, str):
      with pytest.raises(ValueError, match=changes):
        convert.convert(vit, str(dst), to)
      assert not dst.exists()
      continue
    notes = convert.convert(vit, str(dst), to)
    missing = convert.missing_arguments(vit) if to == "npz" else {}
    for key, value in missing.items():
      assert any(f"{key}={value!r}" in note for note in notes)
    again = vit_jax.load(dst, verbose=False, **missing)
    assert again.config == dataclasses.replace(vit.config, **changes)
    assert again.image_size == image_size
    assert again.class_names == (None if to == "npz" else vit.class_names)
    if to in ("orbax", "timm"):
      assert again.ops == vit.ops
    # Hugging Face has one name for both losses of sigmoids.
    assert again.loss == ("sigmoid" if to == "hf" else "bce")
    assert_same(again, vit, but=[POS_EMBEDDING] if changes else [])


SQUARE = dict(image_size=(16, 16), **MODELS["token"])


def test_what_a_npz_has_no_place_for(tmp_path):
  """Names, preprocessing and options; a width of 1,000 is ImageNet's."""
  known = class_names.known(1000)

  def notes(names=known, **changes):
    vit = dataclasses.replace(make(1000, names=names, **SQUARE), **changes)
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npz"
    return "".join(convert.convert(vit, str(path), "npz")[1:])

  assert "bird" not in notes() and "resize" not in notes()
  text = notes(tuple(f"bird {i}" for i in range(1000)))
  assert "class names" in text and "n01440764" in text
  ops = "decode(background='black')|resize_small(18)|central_crop(16)"
  text = notes(ops=ops)
  assert "decode|resize(16)" in text and ops in text
  vit = make(**MODELS["token"], posemb_at="shared")  # in every block there
  with pytest.raises(ValueError, match="posemb_at='shared'"):
    convert.convert(vit, str(tmp_path / "x.npz"), "npz")
  assert not (tmp_path / "x.npz").exists()


@pytest.mark.slow
def test_preprocessing_that_transformers_lacks_is_noted(tmp_path):
  ops = "decode|resize_small(40)|central_crop(16)"
  vit = dataclasses.replace(make(**SQUARE), ops=ops)
  _, note = convert.convert(vit, str(tmp_path / "x"), "hf")
  again = vit_jax.load(tmp_path / "x", verbose=False)
  assert "torch" in again.ops and again.ops in note and ops in note


@pytest.mark.slow
def test_blocks_of_a_scan_are_written_one_by_one(tmp_path):
  vit = make(**SQUARE)
  stacked = dataclasses.replace(
    vit, config=vit.config.stacked(), params=stack_blocks(vit.params, ViTConfig)
  )
  dst = tmp_path / "x.npz"
  convert.convert(stacked, str(dst), "npz")
  missing = convert.missing_arguments(vit)
  assert_same(vit_jax.load(dst, verbose=False, **missing), vit)


def test_a_head_that_is_left_out():
  vit = make(**MODELS["pre_logits"])
  for_hf = convert.without_head(vit, "hf")
  assert for_hf.num_classes == 0 and for_hf.class_names is None
  assert for_hf.config.pre_logits and "pre_logits" in for_hf.params
  assert "head" not in for_hf.params and "head" in vit.params
  for_timm = convert.without_head(vit, "timm")
  assert not for_timm.config.pre_logits and "pre_logits" not in for_timm.params


@pytest.mark.parametrize("name", ["x", "x.npz", "x.onnx"])
def test_what_is_stopped_leaves_nothing(tmp_path, name):
  """A folder, a file, or two files; what is the user's stays."""
  own = tmp_path / "x.npz.data"
  own.write_text("of the user")
  with pytest.raises(KeyboardInterrupt):
    with convert.whole_or_none(str(tmp_path / name)):
      if name == "x":
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("")
      else:
        (tmp_path / name).write_text("")
      if name == "x.onnx":
        (tmp_path / "x.onnx.data").write_text("")
      raise KeyboardInterrupt
  assert list(tmp_path.iterdir()) == [own]


# The command.


def main(*argv):
  convert_command.main([str(word) for word in argv])


@pytest.mark.slow
def test_the_command_writes_checks_and_says_how_to_load(tmp_path, capsys):
  dst = tmp_path / "new" / "vit"
  main(LINEN, dst, "--to=hf", "--image_size=48", "--posemb_filter=bicubic")
  text = capsys.readouterr().out
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
    LINEN, image_size=48, posemb_filter="bicubic", verbose=False
  )
  assert_same(vit_jax.load(dst, verbose=False), expected)


@pytest.mark.slow
def test_what_a_file_does_not_state_is_an_option(tmp_path, monkeypatch):
  monkeypatch.setattr(convert, "largest_difference", lambda *_: (0.0, 1.0))
  write = lambda src, name, *argv: main(src, tmp_path / name, *argv)
  load = lambda name: vit_jax.load(tmp_path / name, verbose=False)
  size = "--patch=4", "--image_size=16x24"
  write(LINEN, "b.safetensors", "--to=timm", "--gelu=erf", *size)
  vit = load("b.safetensors")
  assert (vit.config.variant, vit.config.gelu) == ("B/4", "erf")
  assert vit.image_size == (16, 24)
  # A file of timm's own cannot say how many heads there are.
  arrays = safetensors_file.open_safetensors(tmp_path / "b.safetensors")[0]
  bare = tmp_path / "c.safetensors"
  arrays = {k: np.asarray(v) for k, v in arrays.items()}
  safetensors_file.write(bare, arrays, {})
  with pytest.raises(SystemExit, match="num_heads"):
    write(bare, "d", "--to=orbax")
  write(bare, "d", "--to=orbax", "--num_heads=4", "--grid=4x6")
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
  vit = vit_jax.load(TOKEN, verbose=False)
  monkeypatch.setattr(vit_jax, "load", lambda *_, **__: vit)
  dst, writer = tmp_path / "x.npz", convert.WRITERS["npz"]
  for factor in (2, np.nan):

    def read(vit, path, factor=factor):
      assert dst.exists()
      return lambda images: factor * np.asarray(vit(images)[0])

    monkeypatch.setitem(convert.WRITERS, "npz", writer._replace(read=read))
    with pytest.raises(SystemExit, match="x.npz: got logits .*at most 0.001"):
      main(TOKEN, dst, "--to=npz")
    assert not list(tmp_path.iterdir())


# Hugging Face's hub.


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """A stand-in for `HfApi` with its signatures; `hub.files` has uploads."""
  hub = mock.create_autospec(huggingface_hub.HfApi, instance=True)
  hub.files = tmp_path / "hub"
  hub.create_repo.return_value = "https://hub/me/vit"
  hub.upload_folder.side_effect = lambda repo_id, folder_path, **_: (
    shutil.copytree(folder_path, hub.files / repo_id)
  )
  monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
  monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
  return hub


@pytest.mark.slow
def test_a_converted_folder_is_uploaded(tmp_path, hub, capsys):
  folder = tmp_path / "vit"
  main(TOKEN, folder, "--to=hf", "--push=me/vit")
  assert "uploaded to https://hub/me/vit" in capsys.readouterr().out
  hub.create_repo.assert_called_once_with("me/vit", private=True, exist_ok=True)
  contents = lambda path: {p.name: p.read_bytes() for p in path.iterdir()}
  files = contents(hub.files / "me" / "vit")
  assert files == contents(folder)
  assert {"config.json", "model.safetensors", "README.md"} < set(files)
  assert b"vit_jax.load('hf-hub:me/vit')" in files["README.md"]


def test_what_the_hub_refuses(tmp_path, hub, monkeypatch):
  response = mock.Mock(status_code=403, headers={})
  hub.create_repo.side_effect = huggingface_hub.errors.HfHubHTTPError(
    "no rights.", response=response
  )
  with pytest.raises(ValueError, match="(?s)no rights.*hf upload me/vit") as e:
    convert.push(tmp_path, "me/vit")
  assert "secret" not in str(e.value)
  hub.upload_folder.assert_not_called()
  # Without a login, before the weights are read.
  monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
  with pytest.raises(SystemExit, match="`hf auth login`"):
    main("none.npz", tmp_path / "x", "--to=hf", "--push=me/vit")


# The other libraries. Differences are shares of the largest logit: some 20 to
# 80 layers in float32, each in another order of sums.


def check_logits(vit, theirs):
  images = foreign.image(vit.image_size)
  with jax.default_matmul_precision("highest"):
    ours, _ = vit(images)
  logits = foreign.torch_logits(theirs, images, "float32")
  assert foreign.error(ours, getattr(logits, "logits", logits)) < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize(
  "name, fields",
  [
    ("vit_tiny_patch16_224", dict(variant="Ti/16", gelu="erf")),
    ("vit_base_r50_s16_224", dict(variant="R50+B/16", gelu="erf", **AS_TIMM)),
    ("resnetv2_50x1_bit", dict(name="bit", variant="R50x1", **AS_TIMM)),
  ],
)
def test_timm_s_own_loader_of_google_s_files(tmp_path, name, fields):
  vit = make(1000, (224, 224), names=None, **fields)
  path = str(tmp_path / "x.npz")
  convert.convert(vit, path, "npz")
  theirs = torch_libraries.load("timm").create_model(name, num_classes=1000)
  theirs.load_pretrained(path)
  check_logits(vit, theirs)


@pytest.mark.nightly
def test_timm_takes_the_call_in_the_note(tmp_path):
  vit = make(variant="Ti/16", image_size=(64, 96))
  note, *_ = convert.convert(vit, str(tmp_path / "x.safetensors"), "timm")
  check_logits(vit, eval(note, {"timm": torch_libraries.load("timm")}))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["token", "no_row"])
def test_hugging_face_takes_the_call_in_the_note(tmp_path, monkeypatch, name):
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  transformers = torch_libraries.load("transformers")
  vit, path = make(**MODELS[name]), str(tmp_path / "vit")
  call, *_ = convert.convert(vit, path, "hf")
  theirs = eval(call, {"transformers": transformers})
  check_logits(vit, theirs)
  assert theirs.config.id2label == dict(enumerate("abcde"))
  pixels = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8)
  processor = transformers.AutoImageProcessor.from_pretrained(path)
  got = processor(pixels, return_tensors="np")["pixel_values"][0]
  expected = (pixels / 127.5 - 1).transpose(2, 0, 1)
  np.testing.assert_allclose(got, expected, atol=1e-6)
