"""Every format written and read again."""

import dataclasses

import pytest
from converting import MODELS, SIZE, SUFFIX, assert_same, make

import vit_jax
from vit_jax import class_names
from vit_jax.data.preprocessing import parse_ops
from vit_jax.families.vit import ViTConfig
from vit_jax.models.stacking import stack_blocks
from vit_jax.tools.exporting import convert

# What becomes of a model in timm and in Hugging Face: {} as it was; a dict:
# these options are others then; a text: the option for which it is refused.
TO_LEARN = dict(posemb="learn", cls_row=False)
CASES = {
  "token": ({}, {}),
  "torch_s": ({}, {}),
  "12_heads": ({}, {}),
  "no_row": ({}, {"cls_row": True}),
  "sincos2d": (TO_LEARN, {"posemb": "learn"}),
  "none": ({}, {"posemb": "learn"}),
  "gap": ({}, {}),
  "gap_sincos2d": (TO_LEARN, {"posemb": "learn"}),
  "map": ({}, "config.model.pool"),
  "learn2d": ("config.model.posemb", "config.model.posemb"),
  "relative": ("config.model.posemb", "config.model.posemb"),
  "pre_logits": ("pre_logits", "config.model.pre_logits"),
  "hybrid": ({}, "config.model.variant"),
  "hybrid_of_timm": ({}, "config.model.variant"),
  "bit": ({}, "config.model.name"),
  "bit_v1": ("config.model.name", "config.model.name"),
}
MARKS = {
  **{"token": [], "torch_s": [pytest.mark.slow], "map": [pytest.mark.slow]},
  **{"hybrid": [pytest.mark.slow], "bit": [pytest.mark.slow]},
}
SQUARE = dict(image_size=(16, 16), **MODELS["12_heads"])


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=MARKS.get(name, [pytest.mark.nightly]))
    for name in CASES
  ],
)
def test_there_and_back(tmp_path, name):
  fields, (as_timm, as_hf) = MODELS[name], CASES[name]
  image_size = (64, 96) if "R" in fields["variant"] else SIZE
  if name == "12_heads":
    image_size = (16, 16)  # a square, too
  vit = make(image_size=image_size, **fields)
  for to, changes in (
    ("orbax", {}),
    ("npz", {}),
    ("timm", as_timm),
    ("hf", as_hf),
  ):
    if to == "orbax" and name not in ("torch_s", "relative", "bit_v1"):
      continue  # it stores whatever there is
    dst = tmp_path / (to + SUFFIX[to])
    if isinstance(changes, str):
      with pytest.raises(ValueError, match=changes):
        convert.convert(vit, str(dst), to)
      assert not dst.exists()
      continue
    notes = convert.convert(vit, str(dst), to)
    assert all(isinstance(note, str) for note in notes)
    missing = convert.missing_arguments(vit) if to == "npz" else {}
    again = vit_jax.load(dst, verbose=False, **missing)
    assert again.config == dataclasses.replace(vit.config, **changes)
    assert again.image_size == image_size
    assert again.class_names == (None if to == "npz" else vit.class_names)
    if to in ("orbax", "timm"):
      assert again.ops == vit.ops
    assert_same(again, vit)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swiglu", "distilled"])
def test_parts_there_and_back(tmp_path, name):
  vit = make(**MODELS[name])
  convert.convert(vit, str(tmp_path / "orbax"), "orbax")
  again = vit_jax.load(tmp_path / "orbax", verbose=False)
  assert again.config == vit.config
  assert_same(again, vit)
  with pytest.raises(ValueError, match="config.model.name"):
    convert.convert(vit, str(tmp_path / "x.npz"), "npz")


def test_what_a_npz_has_no_place_for_is_noted(tmp_path):
  """Names, preprocessing and options; a width of 1,000 is ImageNet's."""
  known = class_names.known(1000)

  def notes(names=known, **changes):
    vit = dataclasses.replace(make(1000, names=names, **SQUARE), **changes)
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npz"
    return convert.convert(vit, str(path), "npz")[1:]

  assert notes() == []
  (note,) = notes(tuple(f"bird {i}" for i in range(1000)))
  assert "class names" in note and "n01440764" in note
  ops = "decode|resize_small(18)|central_crop(16)"
  (note,) = notes(ops=ops)
  assert "decode|resize(16)" in note and ops in note
  (note,) = notes(ops="decode(background='black')|resize(16)")
  assert "background='black'" in note


@pytest.mark.slow
def test_blocks_of_a_scan_are_written_one_by_one(tmp_path):
  vit = make(**SQUARE)
  stacked = dataclasses.replace(
    vit, config=vit.config.stacked(), params=stack_blocks(vit.params, ViTConfig)
  )
  dst = tmp_path / "x.npz"
  convert.convert(stacked, str(dst), "npz")
  assert_same(vit_jax.load(dst, verbose=False), vit)


@pytest.mark.parametrize(
  "to, loss",
  [
    ("npz", "bce"),
    pytest.param("hf", "bce", marks=pytest.mark.slow),
    pytest.param("timm", "sigmoid", marks=pytest.mark.slow),
    pytest.param("orbax", "sigmoid", marks=pytest.mark.slow),
  ],
)
def test_a_sigmoid_is_not_forgotten(tmp_path, to, loss):
  vit = dataclasses.replace(make(**SQUARE), loss=loss)
  dst = str(tmp_path / ("x" + SUFFIX[to]))
  notes = convert.convert(vit, dst, to)
  again = vit_jax.load(dst, verbose=False)
  if to == "npz":
    assert any("load it with" in n and f"loss={loss!r}" in n for n in notes)
    again = vit_jax.load(dst, loss=loss, verbose=False)
  # Hugging Face has one name for both.
  assert again.loss == ("sigmoid" if to == "hf" else loss)
  if to == "hf":
    assert "(sigmoid)" in (tmp_path / "x" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
  "ops",
  [
    "decode(dct='accurate')|resize_small_torch(40)|central_crop_torch(16)",
    "decode|resize_small(40)|central_crop(16)",
  ],
)
def test_hugging_face_gets_the_crop(tmp_path, ops):
  """All differences are notes, and the card describes the folder."""
  dst = tmp_path / "x"
  vit = dataclasses.replace(make(**SQUARE), ops=ops)
  _, *notes = convert.convert(vit, str(dst), "hf")
  again = vit_jax.load(dst, verbose=False)
  names = [op.name.removesuffix("_torch") for op in parse_ops(again.ops)]
  assert names == ["decode", "resize_small", "central_crop"]
  assert len(notes) == (again.ops != ops)
  assert all(again.ops in note and ops in note for note in notes)
  assert f"`{again.ops}`, then" in (dst / "README.md").read_text()


def test_a_npz_has_positions_once(tmp_path):
  vit = make(**MODELS["token"], posemb_at="shared")
  with pytest.raises(ValueError, match="posemb_at='shared'"):
    convert.convert(vit, str(tmp_path / "x.npz"), "npz")
  assert not list(tmp_path.iterdir())


def test_a_head_that_is_left_out():
  vit = make(**MODELS["token"], pre_logits=True)
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
