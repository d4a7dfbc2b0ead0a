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

# What becomes of a model: {} as it was; a dict: these options are others then;
# a text: refused so.
NO_TABLE = (
  "config.model.posemb: got {!r}, expected 'learn', 'sincos2d' or 'none'"
)
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
  "map": ({}, "config.model.pool: got 'map', expected 'token'"),
  "learn2d": (NO_TABLE.format("learn2d"), NO_TABLE.format("learn2d")),
  "relative": (NO_TABLE.format("relative"), NO_TABLE.format("relative")),
  "pre_logits": (
    "got 'pre_logits/bias', 'pre_logits/kernel', which the library has no",
    "config.model.pre_logits: got True, expected False",
  ),
  "hybrid": (
    {},
    "config.model.variant: got the hybrid 'R50+B/16', expected a ViT on pixels",
  ),
  "hybrid_of_timm": ({}, "got the hybrid 'R+B/8'"),
  "bit": ({}, "config.model.name: got 'bit', expected 'vit' or"),
  "bit_v1": (
    "config.model.name: got 'bit_v1', expected 'bit', 'vit' or 'modern'",
    "config.model.name: got 'bit_v1', expected 'vit' or",
  ),
}


@pytest.mark.parametrize(
  "name",
  [pytest.param(n, marks=[pytest.mark.slow] * (n == "hybrid")) for n in CASES],
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
      continue  # it holds whatever there is
    dst = tmp_path / (to + SUFFIX[to])
    if isinstance(changes, str):
      with pytest.raises(ValueError) as e:
        convert.convert(vit, str(dst), to)
      assert changes in str(e.value) and not dst.exists()
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


@pytest.mark.parametrize("name", ["swiglu", "distilled"])
def test_parts_there_and_back(tmp_path, name):
  vit = make(**MODELS[name])
  convert.convert(vit, str(tmp_path / "orbax"), "orbax")
  again = vit_jax.load(tmp_path / "orbax", verbose=False)
  assert again.config == vit.config
  assert_same(again, vit)
  with pytest.raises(ValueError, match="config.model.name='modern'"):
    convert.convert(vit, str(tmp_path / "x.npz"), "npz")


@pytest.mark.parametrize(
  "name, to, notes",
  [
    (
      "map",
      "npz",
      [
        "under the names of big_vision",
        "without class names",
        "load it with gelu='erf', ln_eps=1e-12, grid=(3, 4): .npz has no",
      ],
    ),
    (
      "torch_s",
      "timm",
      [
        "timm has no name for this model",
        "config.model.ln_eps=1e-12 here, 1e-06 in the library's model",
      ],
    ),
    (
      "token",
      "hf",
      [
        "transformers.ViTForImageClassification.from_pretrained('DST')",
        "preprocessing there: decode(dct='accurate')|resize_torch((24, 32),"
        " 'bilinear'), transformers' nearest to decode|resize((24, 32))",
      ],
    ),
    (
      "token",
      "orbax",
      ["vit_jax.load('DST'), --config.init=DST"],
    ),
  ],
)
def test_notes_for_the_user(tmp_path, name, to, notes):
  fields = MODELS[name]
  dst = str(tmp_path / ("x" + SUFFIX[to]))
  got = convert.convert(make(**fields), dst, to)
  got = [note.replace(dst, "DST") for note in got]
  assert len(got) == len(notes), got
  for one, start in zip(got, notes, strict=True):
    assert one.startswith(start), one


@pytest.mark.parametrize("names", ["birds", "imagenet"])
def test_a_npz_has_no_class_names(tmp_path, names):
  known = class_names.known(1000)
  birds = tuple(f"bird {i}" for i in range(1000))
  names = {"birds": birds, "imagenet": known}[names]
  vit = make(1000, (16, 16), names, **MODELS["12_heads"])
  _, *notes = convert.convert(vit, str(tmp_path / "x.npz"), "npz")
  assert notes == (names == birds) * [
    "without class names: .npz has no place for them, and this width is taken"
    " for ImageNet's: n01440764 ..."
  ]


def test_a_npz_has_no_preprocessing(tmp_path):
  vit = make(image_size=(16, 16), names=None, **MODELS["12_heads"])
  vit = dataclasses.replace(vit, ops="decode|resize_small(18)|central_crop(16)")
  path = str(tmp_path / "x.npz")
  _, *notes = convert.convert(vit, path, "npz")
  assert notes == [
    "preprocessing there: decode|resize(16), because .npz has no place for"
    " decode|resize_small(18)|central_crop(16)"
  ]
  assert vit_jax.load(path, verbose=False).ops == "decode|resize(16)"
  black = dataclasses.replace(vit, ops="decode(background='black')|resize(16)")
  _, note = convert.convert(black, str(tmp_path / "black.npz"), "npz")
  assert note == "load it with background='black': .npz has no place for it"


def test_blocks_of_a_scan_are_written_one_by_one(tmp_path):
  vit = make(image_size=(16, 16), **MODELS["12_heads"])
  stacked = dataclasses.replace(
    vit, config=vit.config.stacked(), params=stack_blocks(vit.params, ViTConfig)
  )
  dst = tmp_path / "x.npz"
  convert.convert(stacked, str(dst), "npz")
  assert_same(vit_jax.load(dst, verbose=False), vit)


@pytest.mark.parametrize(
  "to, loss",
  [("orbax", "sigmoid"), ("timm", "sigmoid"), ("npz", "bce"), ("hf", "bce")],
)
def test_a_sigmoid_is_not_forgotten(tmp_path, to, loss):
  vit = dataclasses.replace(
    make(image_size=(16, 16), **MODELS["12_heads"]), loss=loss
  )
  dst = str(tmp_path / ("x" + SUFFIX[to]))
  notes = convert.convert(vit, dst, to)
  again = vit_jax.load(dst, verbose=False)
  if to == "npz":
    assert any("load it with" in n and f"loss={loss!r}" in n for n in notes)
    again = vit_jax.load(dst, loss=loss, verbose=False)
  # Hugging Face has one name for both.
  assert again.loss == ("sigmoid" if to == "hf" else loss)
  if to == "hf":
    card = (tmp_path / "x" / "README.md").read_text()
    assert "- probabilities: each class on its own (sigmoid)\n" in card


@pytest.mark.parametrize(
  "ops",
  [
    "decode(dct='accurate')|resize_small_torch(40)|central_crop_torch(16)",
    "decode|resize_small(40)|central_crop(16)",
  ],
)
def test_hugging_face_gets_the_crop(tmp_path, ops):
  vit = make(image_size=(16, 16), **MODELS["12_heads"])
  dst = tmp_path / "x"
  notes = convert.convert(dataclasses.replace(vit, ops=ops), str(dst), "hf")
  again = vit_jax.load(dst, verbose=False)
  names = [op.name.removesuffix("_torch") for op in parse_ops(again.ops)]
  assert names == ["decode", "resize_small", "central_crop"]
  # All differences are notes, and the card describes the folder.
  expected = [
    f"preprocessing there: {again.ops}, transformers' nearest to {ops}"
  ]
  assert notes[1:] == (expected if again.ops != ops else [])
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
