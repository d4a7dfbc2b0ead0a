"""Every format written and read; the slow tests use the other libraries."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_libraries
from converting import SUFFIX, assert_same
from flax.traverse_util import unflatten_dict

import vit_jax
from vit_jax import convert, pretrained, weights
from vit_jax.config import model_config
from vit_jax.config.preprocessing import parse_ops
from vit_jax.models.stacking import stack_blocks
from vit_jax.weights import labels

HERE = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(HERE / "weights"))

import foreign  # noqa: E402

TINY = dict(variant="B/8", width=24, depth=2, mlp_dim=40, num_heads=3)
TORCH = dict(gelu="erf", ln_eps=1e-12)
AS_TIMM = dict(gn_eps=1e-5, ws_eps=1e-8, ws_eps_on="var")
SIZE = (24, 32)


def make(num_classes=5, image_size=SIZE, names="abcde", **fields):
  """A model of random weights."""
  config = model_config(**fields)
  params = foreign.random_params(config, num_classes, image_size)
  return pretrained.Pretrained(
    config=config,
    params=jax.tree.map(jnp.asarray, unflatten_dict(params, sep="/")),
    num_classes=num_classes,
    image_size=image_size,
    class_names=tuple(names) if names else None,
    ops=f"decode|resize({image_size})",
    loss="softmax",
    report=weights.Report("random", {}, {}, (), ()),
  )


# A model and what becomes of it: {} as it was; a dict: these options are others
# then; a text: refused so.
NO_POOL = "config.model.pool: got {!r}, expected 'token'."
NO_TABLE = "config.model.posemb: got {!r}, expected learn, sincos2d or none"
TO_LEARN = dict(posemb="learn", cls_row=False)
CASES = {
  "token": (dict(TINY), {}, {}),
  "torch_s": (dict(TINY, **TORCH), {}, {}),
  # 12 heads are those of B, so no option tells them.
  "12_heads": (dict(TINY, num_heads=None), {}, {}),
  "no_row": (dict(TINY, cls_row=False), {}, {"cls_row": True}),
  "sincos2d": (
    dict(TINY, posemb="sincos2d"),
    TO_LEARN,
    {"posemb": "learn"},
  ),
  "none": (dict(TINY, posemb="none"), {}, {"posemb": "learn"}),
  "gap": (dict(TINY, pool="gap"), {}, NO_POOL.format("gap")),
  "gap_sincos2d": (
    dict(TINY, pool="gap", posemb="sincos2d"),
    TO_LEARN,
    NO_POOL.format("gap"),
  ),
  "map": (dict(TINY, pool="map", **TORCH), {}, NO_POOL.format("map")),
  "learn2d": (
    dict(TINY, posemb="learn2d"),
    NO_TABLE.format("learn2d"),
    NO_TABLE.format("learn2d"),
  ),
  "relative": (
    dict(TINY, posemb="relative"),
    NO_TABLE.format("relative"),
    NO_TABLE.format("relative"),
  ),
  "pre_logits": (
    dict(TINY, pre_logits=True),
    "pre_logits: got a tanh layer before the head, expected none: timm has no"
    " place for it. Write the model without it and the head: --drop_head.",
    "Leave out the head, and the tanh layer becomes the pooler of a ViTModel:"
    " --drop_head.",
  ),
  "hybrid": (
    dict(TINY, variant="R50+B/16", stage_blocks=(1, 1), stage_width=0.5),
    {},
    "config.model.variant: got the hybrid 'R50+B/16', expected a ViT on pixels",
  ),
  "hybrid_of_timm": (
    dict(TINY, variant="R+B/8", stage_width=0.5, gelu="erf", **AS_TIMM),
    {},
    "got the hybrid 'R+B/8'",
  ),
  "bit": (
    dict(
      name="bit",
      variant="R50x0.5",
      stage_blocks=(1, 1),
      root_pad="nothing",
      **AS_TIMM,
    ),
    {},
    "config.model.name: got 'bit', expected 'vit'.",
  ),
  "bit_v1": (
    dict(name="bit_v1", variant="R50x0.5", stage_blocks=(1, 1)),
    "config.model.name: got 'bit_v1', expected 'bit' or 'vit': timm has no"
    " ResNet with weight standardisation after activation on its own.",
    "config.model.name: got 'bit_v1', expected 'vit'.",
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(tmp_path, name):
  fields, as_timm, as_hf = CASES[name]
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
    untold = convert._untold(vit) if to == "npz" else {}
    again = vit_jax.load(dst, verbose=False, **untold)
    assert again.config == dataclasses.replace(vit.config, **changes)
    assert again.image_size == image_size
    assert again.class_names == (None if to == "npz" else vit.class_names)
    if to in ("orbax", "timm"):
      assert again.ops == vit.ops
    assert_same(again, vit)


@pytest.mark.parametrize(
  "name, to, notes",
  [
    (
      "token",
      "npz",
      [
        "under the names of vision_transformer and timm",
        "without class names: .npz has no place for them",
        "load it with grid=(3, 4): .npz has no place to say so, and Google's"
        " codes do otherwise",
      ],
    ),
    (
      "12_heads",
      "npz",
      ["under the names of vision_transformer and timm", "without class names"],
    ),
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
      "bit",
      "npz",
      [
        "under the names of BiT's own code, big_vision and timm",
        "without class names",
        "load it with gn_eps=1e-05, ws_eps=1e-08, ws_eps_on='var',"
        " root_pad='nothing', image_size=(64, 64): .npz has no place to say so,"
        " and Google's codes do otherwise",
      ],
    ),
    (
      "bit_v1",
      "npz",
      [
        "under the names of big_vision",
        "without class names",
        "load it with image_size=(64, 64): .npz has no place to say so",
      ],
    ),
    (
      "gap_sincos2d",
      "npz",
      [
        "under the names of big_vision",
        "without class names",
        "load it with image_size=(24, 32): .npz has no place to say so",
      ],
    ),
    (
      "learn2d",
      "npz",
      ["under the names of vit_jax alone", "without class names"],
    ),
    (
      "none",
      "npz",
      [
        "under the names of vit_jax alone",
        "without class names",
        "load it with posemb='none', image_size=(24, 32): .npz has no place",
      ],
    ),
    (
      "torch_s",
      "timm",
      [
        "timm.create_model('vit_base_patch8_224', checkpoint_path='DST',"
        " num_classes=5, img_size=[24, 32], embed_dim=24, depth=2, num_heads=3,"
        " mlp_ratio=1.6666666666666667)",
        "LayerNorm adds 1e-06 to the variance, this model 1e-12; the argument",
      ],
    ),
    (
      "hybrid_of_timm",
      "timm",
      ["timm has no name for this model; the arrays have the names of its own"],
    ),
    (
      "token",
      "hf",
      [
        "transformers.ViTForImageClassification.from_pretrained('DST')",
        "images there: decode(dct='accurate')|resize_torch((24, 32),"
        " 'bilinear'), the nearest that transformers has to"
        " decode|resize((24, 32))",
      ],
    ),
    (
      "token",
      "orbax",
      ["vit_jax.load('DST'), --config.init=DST, or Orbax alone: see docs/weig"],
    ),
  ],
)
def test_what_a_user_is_told(tmp_path, name, to, notes):
  fields = CASES[name][0]
  size = {"12_heads": (16, 16), "hybrid_of_timm": (64, 64)}.get(name, SIZE)
  size = (64, 64) if name.startswith("bit") else size
  dst = str(tmp_path / ("x" + SUFFIX[to]))
  got = convert.convert(make(image_size=size, **fields), dst, to)
  got = [note.replace(dst, "DST") for note in got]
  assert len(got) == len(notes), got
  for one, start in zip(got, notes, strict=True):
    assert one.startswith(start), one


@pytest.mark.parametrize("names", [None, "birds", "imagenet"])
def test_a_npz_has_no_class_names(tmp_path, names):
  known = labels.known(1000)
  birds = tuple(f"bird {i}" for i in range(1000))
  names = {"birds": birds, "imagenet": known, None: None}[names]
  vit = make(1000, (16, 16), names, **CASES["12_heads"][0])
  _, *notes = convert.convert(vit, str(tmp_path / "x.npz"), "npz")
  assert notes == (names == birds) * [
    "without class names: .npz has no place for them, and this width is taken"
    " for ImageNet's: n01440764 ..."
  ]


def test_a_npz_has_no_preprocessing(tmp_path):
  vit = make(image_size=(16, 16), names=None, **CASES["12_heads"][0])
  vit = dataclasses.replace(vit, ops="decode|resize_small(18)|central_crop(16)")
  path = str(tmp_path / "x.npz")
  _, *notes = convert.convert(vit, path, "npz")
  assert notes == [
    "images there: decode|resize(16), since .npz has no place to say"
    " decode|resize_small(18)|central_crop(16)"
  ]
  assert vit_jax.load(path, verbose=False).ops == "decode|resize(16)"


@pytest.mark.parametrize("to", SUFFIX)
def test_blocks_of_a_scan_are_written_one_by_one(tmp_path, to):
  vit = make(image_size=(16, 16), **CASES["12_heads"][0])
  stacked = dataclasses.replace(
    vit, config=vit.config.stacked(), params=stack_blocks(vit.params)
  )
  dst = tmp_path / ("x" + SUFFIX[to])
  convert.convert(stacked, str(dst), to)
  assert_same(vit_jax.load(dst, verbose=False), vit)


@pytest.mark.parametrize("loss", ["sigmoid", "bce"])
@pytest.mark.parametrize("to", SUFFIX)
def test_a_sigmoid_is_not_forgotten(tmp_path, to, loss):
  vit = dataclasses.replace(
    make(image_size=(16, 16), **CASES["12_heads"][0]), loss=loss
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
  vit = make(image_size=(16, 16), **CASES["12_heads"][0])
  dst = tmp_path / "x"
  notes = convert.convert(dataclasses.replace(vit, ops=ops), str(dst), "hf")
  again = vit_jax.load(dst, verbose=False)
  names = [op.name.removesuffix("_torch") for op in parse_ops(again.ops)]
  assert names == ["decode", "resize_small", "central_crop"]
  # All that differs is told, and the card is of what the folder does.
  told = [
    f"images there: {again.ops}, the nearest that transformers has to {ops}"
  ]
  assert notes[1:] == (told if again.ops != ops else [])
  assert f"`{again.ops}`, then" in (dst / "README.md").read_text()


def test_what_is_there_stays(tmp_path):
  vit = make(**TINY)
  for to, suffix in SUFFIX.items():
    dst = tmp_path / f"x{to}{suffix}"
    dst.write_text("mine")
    with pytest.raises(FileExistsError) as e:
      convert.convert(vit, str(dst), to)
    assert (
      str(e.value) == f"DST: got '{dst}', which exists; expected a new one."
    )
    assert dst.read_text() == "mine"


def test_a_place_that_cannot_be_written(tmp_path, capsys):
  """It is refused before the model is loaded, which is not there either."""
  (tmp_path / "file").write_text("mine")
  dst = f"{tmp_path}/file/new/x.npz"
  with pytest.raises(SystemExit) as e:
    convert.main([str(tmp_path / "none"), dst, "--to=npz"])
  assert str(e.value) == (
    f"DST: got '{dst}', but no files can be written to {tmp_path}/file; name"
    " another place."
  )


@pytest.mark.parametrize("to", ["npz", "timm"])
def test_the_suffix_must_be_right(tmp_path, to):
  with pytest.raises(ValueError) as e:
    convert.convert(make(**TINY), str(tmp_path / "x.bin"), to)
  assert str(e.value) == (
    f"DST: got '{tmp_path}/x.bin', expected a name ending in {SUFFIX[to]}."
  )
  assert not list(tmp_path.iterdir())


def test_a_head_that_is_left_out():
  vit = make(**TINY, pre_logits=True)
  for_hf = convert.without_head(vit, "hf")
  assert for_hf.num_classes == 0 and for_hf.class_names is None
  assert for_hf.config.pre_logits and "pre_logits" in for_hf.params
  assert "head" not in for_hf.params and "head" in vit.params
  for_timm = convert.without_head(vit, "timm")
  assert not for_timm.config.pre_logits and "pre_logits" not in for_timm.params


# Read by the other libraries. Differences are shares of the largest logit:
# some 20 to 80 layers in float32, each in another order of sums.


@pytest.fixture(scope="module")
def timm():
  return torch_libraries.load("timm")


def _check_logits(vit, theirs):
  images = foreign.image(vit.image_size)
  with jax.default_matmul_precision("highest"):
    ours, _ = vit(images)
  logits = foreign.torch_logits(theirs, images, "float32")
  error = foreign.error(ours, getattr(logits, "logits", logits))
  print(f"{vit.config.variant}: {error:.1e}")
  assert error < 1e-4


@pytest.mark.parametrize(
  "name, fields",
  [
    pytest.param(
      "vit_base_patch16_224",
      dict(variant="B/16", gelu="erf"),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      "vit_base_r50_s16_224",
      dict(variant="R50+B/16", gelu="erf", **AS_TIMM),
      marks=pytest.mark.nightly,
    ),
    pytest.param(
      "resnetv2_50x1_bit",
      dict(name="bit", variant="R50x1", **AS_TIMM),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_timm_s_own_loader_of_google_s_files(tmp_path, timm, name, fields):
  vit = make(1000, (224, 224), names=None, **fields)
  path = str(tmp_path / "x.npz")
  convert.convert(vit, path, "npz")
  theirs = timm.create_model(name, num_classes=1000)
  theirs.load_pretrained(path)
  _check_logits(vit, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token", "no_row", "gap_sincos2d", "map"])
def test_timm_takes_the_call_that_is_told(tmp_path, timm, name):
  fields = CASES[name][0] | {"ln_eps": 1e-6}
  vit = make(**fields)
  notes = convert.convert(vit, str(tmp_path / "x.safetensors"), "timm")
  assert len(notes) == 1
  theirs = eval(notes[0], {"timm": timm})
  _check_logits(vit, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token", "torch_s", "no_row", "none"])
def test_hugging_face_takes_the_call_that_is_told(tmp_path, monkeypatch, name):
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  transformers = torch_libraries.load("transformers")
  vit, path = make(**CASES[name][0]), str(tmp_path / "vit")
  call, _ = convert.convert(vit, path, "hf")
  theirs = eval(call, {"transformers": transformers})
  _check_logits(vit, theirs)
  assert theirs.config.id2label == dict(enumerate("abcde"))
  pixels = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8)
  for kind in ("AutoImageProcessor", "ViTImageProcessor"):
    processor = getattr(transformers, kind).from_pretrained(path)
    got = processor(pixels, return_tensors="np")["pixel_values"][0]
    expected = (pixels / 127.5 - 1).transpose(2, 0, 1)
    np.testing.assert_allclose(got, expected, atol=1e-6)
