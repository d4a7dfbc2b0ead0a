"""Changes of valid files: at random, by the format, and drawn by Hypothesis."""

import io
import json
import pathlib
import random
import struct
import tarfile
import zipfile
from typing import Any

import numpy as np

DEEP = "@deep@"  # stands for brackets in brackets, which json cannot write
MANY = "@many@"  # stands for many values
VALUES = (
  *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 2**31, 2**63, -(2**63)),
  *(10**30, 10**400, 0.0, -0.5, 0.3, 1e-300, 1e308),
  *(float("nan"), float("inf"), float("-inf")),
  *("", "a", "vit", "../../etc/passwd", "/etc/passwd", "\0", "\ud800", "None"),
  *("9" * 30, "9" * 5000, "a" * 100_000, "B/999999999999", "R50x99999999999"),
  *("<script>", "decode|resize(" * 300, "decode|resize({[]})", "{}" * 9),
  *([], {}, [[]], [None], [0, 0], [-1, -1], [2**62, 2**62], ["a"] * 3, [1e308]),
  *({"": None}, {"a": {"b": []}}, [True, False], [0.5, float("nan"), "x"]),
  *(DEEP, MANY, [1] * 1000, {str(i): i for i in range(1000)}),
)


def changed(path: pathlib.Path, rng: random.Random) -> tuple[bytes, str]:
  """Returns the changed contents of a file, and what was done."""
  data = path.read_bytes()
  if rng.random() < 0.4:
    return at_random(data, rng)
  head = data[:8]
  try:
    if is_json(path, data):
      return in_json(data, rng)
    if head[:4] == b"PK\x03\x04":
      return in_zip(data, rng)
    if data[8:9] == b"{":
      return in_safetensors(data, rng)
    if head[:6] == b"\x93NUMPY":
      return in_npy(data, rng), "npy"
    if data[257:262] == b"ustar":
      return in_tar(data, rng)
  except (ValueError, KeyError, struct.error, OverflowError):
    pass  # it was none of these; or the new value has no place in the format
  return at_random(data, rng)


def is_json(path: pathlib.Path, data: bytes) -> bool:
  return data[:1] in (b"{", b"[") and path.suffix != ".safetensors"


def at_random(data: bytes, rng: random.Random) -> tuple[bytes, str]:
  """Flips, cuts, inserts, repeats or fills bytes."""
  done = []
  for _ in range(rng.choice((1, 1, 1, 2, 5, 40))):
    at = rng.randrange(len(data) + 1)
    # Heads and tables of contents are at the ends.
    at = rng.choice((at, min(at, rng.randrange(200)), max(0, len(data) - at)))
    size = rng.choice((1, 1, 2, 4, 8, 100, len(data)))
    kind = rng.randrange(7)
    if kind == 0:
      data = data[:at]
    elif kind == 1:
      data = data[:at] + data[at + size :]
    elif kind == 2:
      data = data[:at] + rng.randbytes(min(size, 1000)) + data[at:]
    elif kind == 3:
      new = rng.choice((b"\0", b"\xff", b"9", b"[", b'"', b"\x80"))
      data = data[:at] + new * min(size, 5000) + data[at + size :]
    elif kind == 4:
      data = data[:at] + data[at : at + size] + data[at:]
    else:
      data = bytearray(data)
      for i in range(at, min(at + min(size, 8), len(data))):
        data[i] ^= 1 << rng.randrange(8) if kind == 5 else rng.randrange(256)
      data = bytes(data)
    done.append(f"{kind}@{at}+{size}")
  return data, f"bytes {' '.join(done[:3])}"


def in_json(data: bytes, rng: random.Random) -> tuple[bytes, str]:
  """Changes a value, a name, or the order of a JSON text, or of one line."""
  lines = data.splitlines() if data.count(b"\n{") else [data]
  at = rng.randrange(len(lines))
  values = json.loads(lines[at])
  what = ""
  for _ in range(rng.choice((1, 1, 1, 2, 4))):
    parent, key = _place(values, rng)
    if parent is None:
      values, what = rng.choice(VALUES), "top"
    elif (kind := rng.randrange(8)) == 0:
      del parent[key]
      what = f"without {key!r}"
    elif kind == 1 and isinstance(parent, dict):
      parent[rng.choice(("", "a" * 1000, "\ud800", "step", "0"))] = parent[key]
      what = f"{key!r} renamed"
    else:
      parent[key] = rng.choice(VALUES)
      what = f"{key!r} = {str(parent[key])[:40]!r}"
  text = json.dumps(values)
  if rng.random() < 0.05:
    text = '{"a": 1, ' + text[1:-1] + ', "a": 2, "a": 3}'
  depth = rng.choice((90, 1000, 100_000))
  text = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth)
  text = text.replace(f'"{MANY}"', f"[{'1,' * rng.choice((999, 10**5))}1]")
  lines[at] = text.encode("utf-8", "surrogatepass")
  return b"\n".join(lines), f"JSON {what}"


def _place(values: Any, rng: random.Random) -> tuple[Any, Any]:
  """Returns a random place in a tree: what holds it, and its name there."""
  parent = key = None
  while isinstance(values, dict | list) and values and rng.random() < 0.8:
    keys = list(values) if isinstance(values, dict) else range(len(values))
    parent, key = values, rng.choice(keys)
    values = parent[key]
  return parent, key


def in_safetensors(data: bytes, rng: random.Random) -> tuple[bytes, str]:
  """Changes the header's length, its JSON, or the JSON in its metadata."""
  size = int.from_bytes(data[:8], "little")
  header, rest = data[8 : 8 + size], data[8 + size :]
  if rng.random() < 0.1:
    length = rng.choice((0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1))
    return length.to_bytes(8, "little") + header + rest, f"length {length}"
  values = json.loads(header)
  texts = values.get("__metadata__", {})
  if texts and rng.random() < 0.4:
    key = rng.choice(list(texts))
    try:
      new, what = in_json(texts[key].encode(), rng)
    except ValueError:  # no JSON
      new, what = rng.choice((b"", b"{", b"[1]")), "no JSON"
    texts[key], what = new.decode("utf-8", "replace"), f"{key}: {what}"
    header = json.dumps(values).encode()
  else:
    header, what = in_json(header, rng)
  return len(header).to_bytes(8, "little") + header + rest, what


def in_npy(data: bytes, rng: random.Random) -> bytes:
  """Changes the head of an array."""
  array = np.load(io.BytesIO(data))
  shapes = (
    *((), (0,), (-1,), array.shape[::-1], (*array.shape, 1), (2**62, 2**62)),
    *((0, 2**62), (-3, -5), (True, 2), (1.5,), "abc", None, ((1,),)),
    *((10**30,), array.shape + (1,) * 100, (float("nan"),), [3, 4], (0, 0, 0)),
  )
  types = (
    *("<f4", "<f2", ">f8", "|O", "O8", "<U9", "|V2", "<i8", "<c16", "<M8[ns]"),
    *("f4,f4", "(99999999,)f4", "", "<f99999", [("a", "<f4")], {}, None, 7),
    *("{}", ["x"] * 50, [("a", "O")], "|b1", "<f4\0", "M8[99999999999s]"),
  )
  head = {
    "descr": array.dtype.str if rng.random() < 0.6 else rng.choice(types),
    "fortran_order": rng.choice((False, False, True, 7, "x")),
    "shape": array.shape if rng.random() < 0.4 else rng.choice(shapes),
  }
  if rng.random() < 0.1:
    del head[rng.choice(list(head))]
  text = repr(head)
  if rng.random() < 0.15:
    text = rng.choice(
      (
        *("(" * 9000, "-" * 9000 + "1", "{" + "[" * 5000, "1" * 9000, "\0"),
        *("__import__('os')", "{'shape': 9**9**9}", " " * 60_000, "  x\n x"),
        *("{'descr': '<f4', 'descr': '|O'}", "'" * 7, "lambda: 0", "b'\\xff'"),
      )
    )
  version = rng.choice(((1, 0), (1, 0), (2, 0), (3, 0), (9, 9)))
  form = "<H" if version == (1, 0) else "<I"
  length = len(text) if rng.random() < 0.9 else rng.choice((0, 65_535))
  return (
    b"\x93NUMPY"
    + bytes(version)
    + struct.pack(form, min(length, 65_535))
    + text.encode("latin1")
    + array.tobytes()
  )


def in_zip(data: bytes, rng: random.Random) -> tuple[bytes, str]:
  """Changes a member, its name, or what the table of contents says of it."""
  old, out = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
  infos = old.infolist()
  at, kind = rng.randrange(len(infos)), rng.randrange(6)
  names = ("../x.npy", "/etc/x.npy", "", "a" * 60_000, "é\n.npy", "x/.npy")
  with zipfile.ZipFile(out, "w") as new:
    for i, info in enumerate(infos):
      content, name = old.read(info), info.filename
      if i == at and kind in (0, 1, 2) and name.endswith(".npy"):
        content = in_npy(content, rng)
      elif i == at and kind == 3:
        name = rng.choice((*names, infos[at - 1].filename))
      elif i == at and kind == 4:
        continue
      method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
      new.writestr(zipfile.ZipInfo(name), content, method)
  data = bytearray(out.getvalue())
  if kind == 5:  # sizes, flags, method or place in the table of contents
    place = data.rfind(b"PK\x01\x02") + rng.choice((8, 10, 16, 20, 24, 28, 42))
    data[place : place + 2] = rng.choice((b"\xff\xff", b"\0\0", b"\x01\x08"))
  return bytes(data), f"zip {kind} of {infos[at].filename}"


def in_tar(data: bytes, rng: random.Random) -> tuple[bytes, str]:
  """Changes the header of a member, with its checksum."""
  with tarfile.open(fileobj=io.BytesIO(data)) as tar:
    offsets = [m.offset for m in tar.getmembers()]
  at = rng.choice(offsets)
  head = bytearray(data[at : at + 512])
  field, new = rng.choice(
    (
      *((0, b"../../../tmp/x.jpg\0"), (0, b"/tmp/x.jpg\0"), (0, b"\xff" * 100)),
      *((124, b"77777777777\0"), (124, b"\x80" + b"\xff" * 11), (124, b"-1\0")),
      *((124, b"\xff" * 12), (124, b"99999999999\0"), (124, b"0" * 11 + b"\0")),
      *((156, b"1"), (156, b"2"), (156, b"3"), (156, b"5"), (156, b"6")),
      *((156, b"L"), (156, b"K"), (156, b"S"), (156, b"x"), (156, b"g")),
      *((157, b"/etc/passwd\0"), (136, b"\x80" + b"\xff" * 11), (329, b"\xff")),
    )
  )
  head[field : field + len(new)] = new
  head[148:156] = b" " * 8
  head[148:156] = b"%06o\0 " % sum(head)
  what = f"tar {field}={new[:20]!r} at {at}"
  return data[:at] + head + data[at + 512 :], what


def drawn(count: int, seed: int) -> list[tuple]:
  """Returns changes that Hypothesis drew: see `edited`."""
  from hypothesis import HealthCheck, Phase, given, settings
  from hypothesis import seed as seeded
  from hypothesis import strategies as st

  leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=50)
  )
  values = st.recursive(
    leaves,
    lambda inner: (
      st.lists(inner, max_size=5)
      | st.dictionaries(st.text(max_size=9), inner, max_size=5)
    ),
    max_leaves=20,
  )
  share = st.floats(0, 1)
  cuts = st.tuples(share, st.integers(0, 64), st.binary(max_size=64))
  edit = st.tuples(
    st.lists(cuts, min_size=1, max_size=4), st.lists(share, max_size=6), values
  )
  found: list[tuple] = []

  @seeded(seed)
  @settings(
    max_examples=count,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
  )
  @given(edit)
  def draw(one):
    found.append(one)

  draw()
  return found[:count]


def edited(data: bytes, path: pathlib.Path, edit: tuple) -> tuple[bytes, str]:
  """Returns contents with what Hypothesis drew put in their place.

  Args:
    data: The contents; of JSON, a value is replaced, of others, bytes.
    path: The file.
    edit: (place, bytes left out, bytes put in), ...; the way to a place in a
      tree; and a value for that place.
  """
  cuts, way, value = edit
  if is_json(path, data):
    lines = data.splitlines() if data.count(b"\n{") else [data]
    at = int(way[0] * (len(lines) - 1)) if way else 0
    values = json.loads(lines[at])
    parent, key, here = None, None, values
    for share in way[1:]:
      if not isinstance(here, dict | list) or not here:
        break
      keys = list(here) if isinstance(here, dict) else range(len(here))
      parent, key = here, keys[int(share * (len(keys) - 1))]
      here = parent[key]
    if parent is None:
      values = value
    else:
      parent[key] = value
    lines[at] = json.dumps(values).encode("utf-8", "surrogatepass")
    return b"\n".join(lines), f"Hypothesis {key!r} = {value!r}"[:80]
  for share, size, new in cuts:
    at = int(share * len(data))
    data = data[:at] + new + data[at + size :]
  return data, "Hypothesis bytes"
