"""Every format written and read; the slow tests use the other libraries."""

import dataclasses
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_libraries
from flax.traverse_util import flatten_dict, unflatten_dict

import vit_jax
from vit_jax import convert, pretrained, weights
from vit_jax.config import model_config
from vit_jax.models import resample
from vit_jax.models.posemb import sincos2d
from vit_jax.weights.google import POS_EMBEDDING

HERE = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(HERE / "weights"))

import foreign  # noqa: E402

DATA = HERE / "data"
TINY = dict(variant="B/8", width=24, depth=2, mlp_dim=40, num_heads=3)
TORCH = dict(gelu="erf", ln_eps=1e-12)
AS_TIMM = dict(gn_eps=1e-5, ws_eps=1e-8, ws_eps_on="var")
SIZE = (24, 32)
SUFFIX = {"orbax": "", "npz": ".npz", "timm": ".safetensors", "hf": ""}


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


def flat(vit):
  return {
    k: np.asarray(v) for k, v in flatten_dict(vit.params, sep="/").items()
  }


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
    if to == "npz" and "grid" not in untold:
      untold |= {"image_size": image_size}  # as in no other format
    again = vit_jax.load(dst, verbose=False, **untold)
    assert again.config == dataclasses.replace(vit.config, **changes)
    assert again.image_size == image_size
    assert again.class_names == (None if to == "npz" else vit.class_names)
    if to in ("orbax", "timm"):
      assert again.ops == vit.ops
    _assert_same(again, vit)


def _assert_same(again, vit):
  """Bit for bit; a table that was not there before holds the same numbers."""
  got, expected = flat(again), flat(vit)
  if again.config.name == "vit" and again.config.posemb == "learn":
    table = got.pop(POS_EMBEDDING)
    grid = tuple(side // 8 for side in again.image_size)
    own = {
      "sincos2d": sincos2d(*grid, table.shape[-1])[None],
      "none": np.zeros((1, math.prod(grid), table.shape[-1]), np.float32),
      "learn": expected.pop(POS_EMBEDDING, None),
    }[vit.config.posemb]
    rows = table.shape[1] - own.shape[1]  # one of zeros for cls
    assert rows == (
      again.config.pool == "token"
      and again.config.cls_row
      and not (vit.config.cls_row and vit.config.posemb == "learn")
    )
    np.testing.assert_array_equal(table[:, rows:], own)
    assert not table[:, :rows].any()
  assert got.keys() == expected.keys()
  for path, array in expected.items():
    np.testing.assert_array_equal(got[path], array, path)


@pytest.mark.parametrize(
  "name, to, notes",
  [
    (
      "token",
      "npz",
      [
        "under the names that vision_transformer and timm read",
        "load it with grid=(3, 4): .npz has no place to say so, and Google's"
        " codes do otherwise",
      ],
    ),
    ("12_heads", "npz", ["under the names that vision_transformer and timm"]),
    (
      "map",
      "npz",
      [
        "under the names that big_vision read",
        "load it with gelu='erf', ln_eps=1e-12, grid=(3, 4): .npz has no",
      ],
    ),
    (
      "bit",
      "npz",
      [
        "under the names that BiT's own code, big_vision and timm read",
        "load it with gn_eps=1e-05, ws_eps=1e-08, ws_eps_on='var',"
        " root_pad='nothing': .npz has no place",
      ],
    ),
    ("bit_v1", "npz", ["under the names that big_vision read"]),
    (
      "none",
      "npz",
      [
        "under the names that vision_transformer and timm read",
        "load it with posemb='none': .npz has no place",
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
      ["transformers.ViTForImageClassification.from_pretrained('DST')"],
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


@pytest.mark.parametrize("to", SUFFIX)
def test_a_sigmoid_is_not_forgotten(tmp_path, to):
  vit = dataclasses.replace(
    make(image_size=(16, 16), **CASES["12_heads"][0]), loss="sigmoid"
  )
  dst = str(tmp_path / ("x" + SUFFIX[to]))
  notes = convert.convert(vit, dst, to)
  again = vit_jax.load(dst, verbose=False)
  if to == "npz":
    assert any("load it with" in n and "loss='sigmoid'" in n for n in notes)
    again = vit_jax.load(dst, loss="sigmoid", verbose=False)
  assert again.loss == "sigmoid"


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


# The command line.


@pytest.fixture
def quick_to_compile():
  """Compiles what the command compares, in half of the usual time."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def main(capsys, *argv):
  convert.main([str(word) for word in argv])
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
    "model           --config.model.variant=B/8 --config.model.width=48"
    " --config.model.depth=2 --config.model.mlp_dim=96"
    " --config.model.num_heads=4",
    "images          48x48, decode|resize(48)",
    f"written         {dst}",
    f"{'':<16}transformers.ViTForImageClassification.from_pretrained('{dst}')",
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
  _assert_same(vit_jax.load(dst, verbose=False), expected)


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
  with pytest.raises(SystemExit, match="State it: num_heads"):
    main(capsys, bare, tmp_path / "d", "--to=orbax")
  main(
    capsys, bare, tmp_path / "d", "--to=orbax", "--num_heads=4", "--grid=4x6"
  )
  _assert_same(vit_jax.load(tmp_path / "d", verbose=False), vit)

  # No table: fixed positions, or none.
  src = DATA / "bv_gap_sincos2d_rep.weights.npz"
  main(
    capsys, src, tmp_path / "e", "--to=orbax", "--posemb=none",
    "--image_size=32",
  )  # fmt: skip
  assert vit_jax.load(tmp_path / "e", verbose=False).config.posemb == "none"
  # A table whose first row is no class token's.
  src = DATA / "bv_token.weights.npz"
  with pytest.raises(SystemExit, match="got 15 patches .with a row for the cl"):
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
    assert "transformers.ViTModel.from_pretrained" in lines[-3]


@pytest.mark.parametrize(
  "words, text",
  [
    (
      ["SRC", "DST.bin", "--to=npz"],
      "DST.bin', expected a name ending in .npz",
    ),
    (["none.npz", "DST", "--to=orbax"], "got 'none.npz', which does not exist"),
    (["SRC", "SRC", "--to=npz"], "which exists; expected a new one."),
    (["SRC", "DST", "--to=orbax", "--image_size=33"], "got images of 33 x 33"),
    (["SRC", "DST", "--to=orbax", "--grid=3x4"], "got 17 rows, expected 13"),
    (
      ["SRC", "DST", "--to=orbax", "--num_heads=5"],
      "not divide the width of 48",
    ),
  ],
)
def test_the_command_ends_with_the_text(tmp_path, capsys, words, text):
  names = {
    "SRC": str(DATA / "vit_linen_names.weights.npz"),
    "DST": str(tmp_path / "x"),
    "DST.bin": str(tmp_path / "DST.bin"),
  }
  with pytest.raises(SystemExit) as e:
    main(capsys, *(names.get(w, w) for w in words))
  assert text in str(e.value.code)
  assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  source, target = DATA / "vit_token.weights.npz", tmp_path / "file" / "x.npz"
  with pytest.raises(SystemExit) as error:
    convert.main([str(source), str(target), "--to=npz"])
  assert str(error.value) == (
    f"DST: got {str(target)!r}, but no files can be written to"
    f" {tmp_path / 'file'}; name another place."
  )


@pytest.mark.parametrize(
  "word, text",
  [
    ("--to=keras", "invalid choice: 'keras'"),
    ("--image_size=0", "invalid size (224 or 224x160) value: '0'"),
    ("--grid=1x2x3", "invalid size (224 or 224x160) value: '1x2x3'"),
    ("--cls_row=maybe", "invalid true or false value: 'maybe'"),
    ("--posemb_filter=x", "invalid choice: 'x'"),
  ],
)
def test_the_command_names_a_faulty_flag(capsys, word, text):
  with pytest.raises(SystemExit):
    main(capsys, "a", "b", "--to=npz", word)
  assert text in capsys.readouterr().err


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


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, fields",
  {
    "vit_base_patch16_224": dict(variant="B/16", gelu="erf"),
    "vit_base_r50_s16_224": dict(variant="R50+B/16", gelu="erf", **AS_TIMM),
    "resnetv2_50x1_bit": dict(name="bit", variant="R50x1", **AS_TIMM),
  }.items(),
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
  (call,) = convert.convert(vit, path, "hf")
  theirs = eval(call, {"transformers": transformers})
  _check_logits(vit, theirs)
  assert theirs.config.id2label == dict(enumerate("abcde"))
  pixels = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8)
  for kind in ("AutoImageProcessor", "ViTImageProcessor"):
    processor = getattr(transformers, kind).from_pretrained(path)
    got = processor(pixels, return_tensors="np")["pixel_values"][0]
    expected = (pixels / 127.5 - 1).transpose(2, 0, 1)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_help_has_a_meaning_for_every_format_and_filter():
  assert list(convert.FORMATS) == list(convert.WRITERS)
  assert list(convert.FILTERS) == list(resample.METHODS)
