"""Files that were made to do harm: what each reader must refuse, and how fast.

`attacks` yields them per reader. All of them leave a trace if they succeed: a
file beside them, much memory, or many seconds.
"""

import gzip
import io
import json
import os
import pathlib
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator

import numpy as np
from hostile_readers import READERS, jpeg, tar_of

TRACE = "was_here"
DEEP = b"[" * 100_000 + b"]" * 100_000
MANY = b"{" + b",".join(b'"%d":%d' % (i, i) for i in range(600_000)) + b"}"
LONG = b'{"a": "' + b"a" * (20 * 2**20) + b'"}'


class Touch:
  """Makes a file when it is unpickled."""

  def __init__(self, path: pathlib.Path):
    self.path = path

  def __reduce__(self):
    return pathlib.Path.touch, (self.path,)


def attacks(
  folder: pathlib.Path, name: str
) -> Iterator[tuple[str, pathlib.Path]]:
  """Yields (what it is, path) of the attacks on a reader, one at a time."""
  reader = READERS[name]
  sample = folder / f"{name}.sample"
  for what, attack in _attacks(name, folder / TRACE):
    work = folder / f"{name}.attack"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(sample, work, symlinks=True)
    attack(work)
    yield f"attack: {what}", reader.path(work)
    shutil.rmtree(work)


Attack = Callable[[pathlib.Path], None]


def _attacks(name: str, trace: pathlib.Path) -> Iterator[tuple[str, Attack]]:
  if name in OF:
    yield from OF[name]()
  files = [f for f in JSON_OF.get(name, ()) if f]
  for file in files:
    for what, data in (
      *(
        ("deep", DEEP),
        ("deep objects", b'{"a":' * 10**5 + b"1}"),
      ),
      *(("many keys", MANY), ("long", LONG), ("a list", b"[1]")),
      *(("twice", b'{"a": 1, "a": 2}'), ("half", b'{"a": "\\ud800"}')),
      *(("NUL", bytes(999)), ("empty", b""), ("UTF-16", "{}".encode("utf-16"))),
      *(("digits", b'{"step": ' + b"9" * 10**6 + b"}"), ("NaN", b"NaN")),
    ):
      yield f"{file}: {what}", _writes(file, data)
    yield f"{file}: a folder", _folder(file)
    if name not in ("run", "config"):  # a user's own folders
      yield f"{file}: a link out", _link(file, trace.parent / "elsewhere.json")
  payload = pickle.dumps(Touch(trace))
  for file in FILES_OF[name]:
    yield f"{file}: a pickle", _writes(file, payload)
    yield f"{file}: a zipped pickle", _writes(file, _zipped(payload))
    yield f"{file}: pickled objects", _writes(file, _objects(trace))
    yield f"{file}: pickled .npy", _writes(file, _npy_objects(trace))


def _writes(file: str, data: bytes) -> Attack:
  return lambda work: _fresh(work / file).write_bytes(data) and None


def _fresh(path: pathlib.Path) -> pathlib.Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.unlink(missing_ok=True)
  return path


def _folder(file: str) -> Attack:
  return lambda work: _fresh(work / file).mkdir()


def _link(file: str, to: pathlib.Path) -> Attack:
  """Replaces a file by a link to its contents, outside of the folder."""

  def attack(work):
    to.unlink(missing_ok=True)
    shutil.move(work / file, to)
    os.symlink(to, work / file)

  return attack


def _zipped(payload: bytes) -> bytes:
  out = io.BytesIO()
  with zipfile.ZipFile(out, "w") as archive:
    archive.writestr("archive/data.pkl", payload)
  return out.getvalue()


def _objects(trace: pathlib.Path) -> bytes:
  out = io.BytesIO()
  np.savez(out, cls=np.array([Touch(trace)], object))
  return out.getvalue()


def _npy_objects(trace: pathlib.Path) -> bytes:
  out = io.BytesIO()
  np.save(out, np.array([Touch(trace)], object))
  return out.getvalue()


def _npy(shape, data: bytes = b"", descr: str = "<f4") -> bytes:
  out = io.BytesIO()
  head = {"descr": descr, "fortran_order": False, "shape": shape}
  np.lib.format.write_array_header_2_0(out, head)
  return out.getvalue() + data


def _npz_with(members, method=zipfile.ZIP_STORED) -> Attack:
  """Adds members to the arrays of the sample."""

  def attack(work):
    with zipfile.ZipFile(work / "x.npz", "a", method) as archive:
      for name, data in members():
        archive.writestr(name, data)

  return attack


def _bomb(num_bytes: int, name: str = "head/kernel.npy") -> Attack:
  def members():
    side = num_bytes // 4
    yield name, _npy((1, side), bytes(num_bytes))

  return _npz_with(members, zipfile.ZIP_DEFLATED)


def _head_of_zeros(num_classes: int) -> Attack:
  """A whole model, whose head is the most that may be loaded."""

  def attack(work):
    with np.load(work / "x.npz") as file:
      arrays = dict(file)
    width = len(arrays["head/kernel"])
    arrays["head/kernel"] = np.zeros((width, num_classes), np.float32)
    arrays["head/bias"] = np.zeros(num_classes, np.float32)
    np.savez_compressed(work / "x.npz", **arrays)

  return attack


def _npz() -> Iterator[tuple[str, Attack]]:
  one = lambda name, data: _npz_with(lambda: [(name, data)])
  for name in ("../../evil.npy", "/tmp/evil.npy", "a\\..\\evil.npy"):
    yield f"member {name}", one(name, _npy((1,), bytes(4)))
  yield "terabytes", one("x.npy", _npy((2**40,), bytes(64)))
  yield "two negative sides", one("x.npy", _npy((-4, -4), bytes(64)))
  yield "nothing times much", one("x.npy", _npy((0, 2**62)))
  yield (
    "blocks without end",
    one("Transformer/encoderblock/x.npy", _npy((2**31 - 1, 0))),
  )
  yield "a name twice", one("cls.npy", _npy((1, 1, 1), bytes(4)))
  yield (
    "a block alone",
    one(
      "Transformer/encoderblock_99999999999/LayerNorm_0/scale.npy",
      _npy((1,), bytes(4)),
    ),
  )
  yield (
    "20,000 arrays",
    _npz_with(
      lambda: ((f"{i}.npy", _npy((1,), bytes(4))) for i in range(20_000))
    ),
  )
  yield "a bomb of 400 MB", _bomb(4 * 10**8)
  yield "a bomb below the limit", _bomb(2**27 - 2**20, "x.npy")
  yield "a head of zeros below the limit", _head_of_zeros(3_600_000)
  deep = np.lib.format.magic(2, 0) + (9000).to_bytes(4, "little") + b"(" * 9000
  yield "brackets", one("x.npy", deep)


def _head(text: bytes) -> Attack:
  data = len(text).to_bytes(8, "little") + text
  return _writes("model.safetensors", data + bytes(64))


def _timm() -> Iterator[tuple[str, Attack]]:
  array = '{"dtype": "F32", "shape": %s, "data_offsets": %s}'

  def one(shape: str, at: str = "[0, 4]") -> bytes:
    return ('{"a": ' + array % (shape, at) + "}").encode()

  yield "terabytes", _head(one(f"[{2**40}]", f"[0, {2**42}]"))
  yield (
    "a header of terabytes",
    _writes(
      "model.safetensors", (2**42).to_bytes(8, "little") + b"{" + bytes(99)
    ),
  )
  yield "negative", _head(one("[-1]"))
  yield "overflow", _head(one(f"[{2**62}, 4]"))
  yield "nothing times much", _head(one(f"[0, {2**62}]", "[0, 0]"))
  yield "deep", _head(b'{"__metadata__":' + DEEP + b"}")
  yield "twice", _head(one("[1]")[:-1] + b', "a": 1}')
  many = (
    f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    for i in range(60_000)
  )
  yield "60,000 arrays", _head(("{" + ",".join(many) + "}").encode())
  for number in ("999", "99999999999", "9" * 400):
    text = array % ("[1]", "[0, 4]")
    names = ("patch_embed.proj.weight", f"blocks.{number}.x", "blocks.0.y")
    yield (
      f"block {number[:12]}",
      _head(("{" + ",".join(f'"{n}": {text}' for n in names) + "}").encode()),
    )


def _index() -> Iterator[tuple[str, Attack]]:
  file = "model.safetensors.index.json"
  for name in (
    *("../index.sample/model-0.safetensors", "/etc/passwd", ".", "", "a/b"),
    *("model-0.safetensors/../../index.sample/model-0.safetensors", "a\\b"),
    *("model-9.safetensors", "\0", "x" * 5000),
  ):
    text = json.dumps({"weight_map": {"cls": name}})
    yield f"names {name[:40]!r}", _writes(file, text.encode())
  names = {str(i): f"{i}.safetensors" for i in range(100_000)}
  yield (
    "100,000 files",
    _writes(file, json.dumps({"weight_map": names}).encode()),
  )
  yield (
    "a part that is a link out",
    lambda work: _link(
      "model-0.safetensors", work.parent / "elsewhere.safetensors"
    )(work),
  )


def _hf() -> Iterator[tuple[str, Attack]]:
  yield (
    "weights that are a link out",
    lambda work: _link(
      "model.safetensors", work.parent / "elsewhere.safetensors"
    )(work),
  )


def _tars() -> Iterator[tuple[str, Attack]]:
  def tar(**changes) -> Attack:
    info = tarfile.TarInfo("a/0.jpg")
    for key, value in changes.items():
      setattr(info, key, value)
    head = info.tobuf(tarfile.GNU_FORMAT)
    data = head + jpeg().ljust(1024, b"\0")[:1024]
    whole = data + tar_of({"a/1.jpg": jpeg(), "a/1.cls": b"1"})
    return _writes("train.tar", whole)

  for name in ("../../../x.jpg", "/tmp/x.jpg", "a/\n.jpg", "\udcff.jpg"):
    yield (
      f"member {name!r}",
      _writes("train.tar", tar_of({name: jpeg(), name[:-3] + "cls": b"0"})),
    )
  yield "terabytes", tar(size=2**43)
  yield "8 GiB", tar(size=2**33 - 1)
  for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
    yield f"a link {kind!r}", tar(type=kind, linkname="/etc/passwd")
  for kind in (tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE):
    yield f"type {kind!r}", tar(type=kind, size=2**33)
  for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE):
    yield f"a header of 8 GiB {kind!r}", tar(type=kind, size=2**33 - 1)
  info = tarfile.TarInfo("././@LongLink")
  info.type, info.size = tarfile.GNUTYPE_LONGNAME, 0
  heads = info.tobuf(tarfile.GNU_FORMAT) * 5000
  yield "headers without end", _writes("train.tar", heads + bytes(1024))
  empty = tarfile.TarInfo("a/0.x").tobuf()
  yield "members without end", _writes("train.tar", empty * 3000 + bytes(1024))
  twice = {"a/0.jpg": jpeg(), "a/0.JPG": jpeg(), "a/0.cls": b"1"}
  yield "a name twice", _writes("train.tar", tar_of(twice))
  long = {"a/0.jpg": jpeg(), "a/0.cls": b"9" * 10**6, "b/1.cls": b"9" * 900}
  yield "a label of a million digits", _writes("train.tar", tar_of(long))


def _gz() -> Iterator[tuple[str, Attack]]:
  for what, size in (("an image of 200 MB", 2 * 10**8), ("60 MB", 6 * 10**7)):
    data = tar_of({"a/0.jpg": jpeg() + bytes(size), "a/0.cls": b"1"})
    yield f"a bomb: {what}", _writes("train.tar.gz", gzip.compress(data, 1))
  empty = tarfile.TarInfo("a/0.x").tobuf() * 30_000
  yield (
    "members without end",
    _writes("train.tar.gz", gzip.compress(empty + bytes(1024), 1)),
  )


def _parquet() -> Iterator[tuple[str, Attack]]:
  def table(values, label, **options) -> Attack:
    import pyarrow as pa
    from pyarrow import parquet

    def attack(work):
      columns = pa.table({"image": values, "label": label})
      parquet.write_table(columns, work / "train.parquet", **options)

    return attack

  yield (
    "a bomb",
    table(
      [bytes(2 * 10**8), b"a"], [0, 1], compression="zstd", use_dictionary=False
    ),
  )
  yield "long labels", table([b"a"] * 2, ["a" * 10**7, "b"])
  yield "labels of a million digits", table([b"a"] * 2, ["9" * 10**6, "1"])
  yield "labels that are lists", table([b"a"] * 2, [[1], [2]])
  yield "floats", table([b"a"] * 2, [0.5, float("nan")])
  yield "huge labels", table([b"a"] * 2, [2**62, -(2**62)])


def _runs() -> Iterator[tuple[str, Attack]]:
  line = b'{"step": 1, "time": 1.0, "train/loss": 1.0}\n'
  for what, text in (
    *(("deep", b'{"step": 1, "a": ' + DEEP + b"}\n"), ("long", LONG)),
    *(("lists", b"[1]\n" * 9999), ("a million digits", b"9" * 10**6)),
    *(("a name", b'{"step": 1, "' + b"a" * 10**5 + b'": 1}\n'), ("NUL", b"\0")),
    *(("true", b'{"step": true}\n'), ("step", b'{"step": -1}\n' + line)),
    *(("shots", b'{"step": 1, "few/' + b"9" * 150 + b'shot": 1}\n'), ("", b"")),
    *(("odd", b'{"step": 1, "time": "x", "train/loss": [1]}\n'),),
  ):
    yield f"metrics: {what}", _writes("metrics.jsonl", text + line)
  big = _npy((2**40,), bytes(64))

  def lies(work):
    with zipfile.ZipFile(work / "predictions.npz", "w") as archive:
      archive.writestr("image.npy", big)

  yield "predictions of terabytes", lies


def _config() -> Iterator[tuple[str, Attack]]:
  for what, values in (
    ("no text", {"model": {"name": [1]}, "optim": {}}),
    ("many options", {"optim": {str(i): i for i in range(50_000)}}),
    (
      "many evaluators",
      {"optim": {}, "evals": {str(i): 1 for i in range(9999)}},
    ),
    ("a long name", {"optim": {"name": "a" * 10**7}}),
    ("huge", {"optim": {"lr": 10**18}, "model": {"depth": 10**9}}),
  ):
    yield what, _writes("config.json", json.dumps(values).encode())


def _classes() -> Iterator[tuple[str, Attack]]:
  yield "bytes", _writes("classes.txt", b"\xff\xfe\0a\n")
  yield "long", _writes("classes.txt", b"a" * (40 * 2**20))
  yield "many", _writes("classes.txt", b"a\n" * (2 * 10**6))


def _zarr() -> Iterator[tuple[str, Attack]]:
  def with_values(**changes) -> Attack:
    def attack(work):
      file = next((work / "tree").rglob("*head.kernel/.zarray"))
      file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return attack

  for what, changes in (
    ("terabytes", {"shape": [2**20, 2**20]}),
    ("chunks of terabytes", {"chunks": [2**40, 2**20]}),
    ("large chunks", {"chunks": [2**15, 2**15]}),
    ("negative", {"shape": [-1, 3]}),
    ("objects", {"dtype": "|O"}),
    ("texts", {"dtype": "<U999999999"}),
    ("another order", {"order": "F"}),
    ("no codec", {"compressor": {"id": "pickle"}}),
    ("a filter", {"filters": [{"id": "pickle"}]}),
  ):
    yield what, with_values(**changes)


OF = {
  "zarr": _zarr,
  "npz": _npz,
  "timm": _timm,
  "index": _index,
  "hf": _hf,
  "webdataset": _tars,
  "webdataset_gz": _gz,
  "parquet": _parquet,
  "run": _runs,
  "config": _config,
  "classes": _classes,
}
# Files of the sample that are JSON, and those that are read as something else.
JSON_OF = {
  "timm_config": ("config.json",),
  "hf": ("config.json", "preprocessor_config.json"),
  "index": ("model.safetensors.index.json",),
  "run": ("config.json", "metadata.json", "process.json"),
  "config": ("config.json",),
  "checkpoint": ("3/metadata/metadata", "3/params/_METADATA"),
}
FILES_OF = {name: () for name in READERS} | {
  "npz": ("x.npz",),
  "npy": ("x.npy",),
  "timm": ("model.safetensors",),
  "hf": ("model.safetensors", "config.json", "pytorch_model.bin"),
  "index": ("model-0.safetensors", "model.safetensors.index.json"),
  "torch_zip": ("x.pth",),
  "torch_pickle": ("x.bin",),
  "onnx": ("x.onnx",),
  "checkpoint": ("3/metadata/metadata", "3/params/_METADATA"),
  "orbax": ("tree/_METADATA", "tree/manifest.ocdbt"),
  "zarr": ("tree/_METADATA",),
  "webdataset": ("train.tar",),
  "webdataset_gz": ("train.tar.gz",),
  "imagenet21k": ("n00000001.tar",),
  "imagenet21k_outer": ("all.tar",),
  "parquet": ("train.parquet",),
  "classes": ("classes.txt",),
  "run": ("config.json", "metrics.jsonl", "predictions.npz"),
  "config": ("config.json",),
}
