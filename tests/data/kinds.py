"""Files of every kind that a folder of images may hold, good and bad."""

import functools
import io
import pathlib
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps


def photo(height=24, width=40):
  """Returns a smooth picture without symmetry, which JPEG keeps well."""
  y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
  rgb = np.stack([255 * x, 255 * y, 255 * (1 - x) * y], -1)
  return Image.fromarray(rgb.astype(np.uint8))


def encoded(image, kind, **options):
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


def oriented(kind, number, image=None, **options):
  exif = Image.Exif()
  exif[0x0112] = number
  return encoded(image or photo(), kind, exif=exif, **options)


def behind_metadata(jpeg):
  """Returns a JPEG whose segments after the first begin beyond 64 KiB."""
  segment = b"\xff\xed" + struct.pack(">H", 40_002) + bytes(40_000)
  return jpeg[:20] + 2 * segment + jpeg[20:]


def ycck():
  """Returns a JPEG of four channels whose first three are YCbCr."""
  data = encoded(photo().convert("CMYK"), "JPEG", quality=95)
  at = data.index(b"Adobe")
  # The byte of the transform: 2 says YCCK. The pixels become others.
  return data[: at + 11] + b"\x02" + data[at + 12 :]


def png(width, height, bits, kind, packed):
  """Returns a PNG of compressed rows; of any size that its header states."""

  def chunk(name, data):
    check = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + check

  head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
  parts = chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
  return b"\x89PNG\r\n\x1a\n" + parts


def png_16_bits(channels):
  """Returns a PNG of 16 bits, of which only the upper eight are the photo's."""
  pixels = np.asarray(photo().convert("RGB" if channels == 3 else "L"))
  deep = pixels.astype(">u2") * 256 + 77
  rows = b"".join(b"\0" + row.tobytes() for row in deep)
  return png(40, 24, 16, {1: 0, 3: 2}[channels], zlib.compress(rows))


def bomb_png(width=14_000, height=14_000):
  """Returns a PNG of one bit a pixel: 25 kB, 0.2 billion pixels."""
  row = b"\0" + bytes(-(-width // 8))
  packer = zlib.compressobj(9)
  rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
  return png(width, height, 1, 0, rows)


def bomb_jpeg(side=65_500, **options):
  """Returns a small JPEG whose header states far more pixels than it has."""
  data = bytearray(encoded(photo(), "JPEG", **options))
  at = data.index(b"\xff\xc2" if options else b"\xff\xc0")
  data[at + 5 : at + 9] = struct.pack(">HH", side, side)
  return bytes(data)


def bomb_gif(side=65_500):
  data = bytearray(encoded(photo(), "GIF"))
  data[6:10] = struct.pack("<HH", side, side)
  return bytes(data)


def bomb_bmp(side=40_000):
  data = bytearray(encoded(photo(), "BMP"))
  data[18:26] = struct.pack("<ii", side, side)
  return bytes(data)


@functools.cache
def good():
  """Returns name -> bytes of what must come out as Pillow has it, upright."""
  image, other = photo(), photo().rotate(180)
  alpha = image.convert("RGBA")
  alpha.putalpha(Image.linear_gradient("L").resize(image.size))
  frames = {"save_all": True, "append_images": [other], "duration": 50}
  jpeg = encoded(image, "JPEG", quality=95)
  files = {
    "plain.jpg": jpeg,
    "progressive.jpg": encoded(image, "JPEG", quality=95, progressive=True),
    "grey.jpg": encoded(image.convert("L"), "JPEG", quality=95),
    "cmyk.jpg": encoded(image.convert("CMYK"), "JPEG", quality=95),
    "ycck.jpg": ycck(),
    "rgb_colours.jpg": encoded(image, "JPEG", quality=95, keep_rgb=True),
    "padded.jpg": jpeg + b"\0" * 7,
    "two_in_one.jpg": jpeg + encoded(other, "JPEG"),
    "metadata.jpg": encoded(image, "JPEG", quality=95, icc_profile=b"x" * 99),
    "plain.png": encoded(image, "PNG"),
    "grey.png": encoded(image.convert("L"), "PNG"),
    "bits.png": encoded(image.convert("1"), "PNG"),
    "palette.png": encoded(image.convert("P"), "PNG"),
    "clear_palette.png": encoded(image.convert("P"), "PNG", transparency=3),
    "alpha.png": encoded(alpha, "PNG"),
    "grey_alpha.png": encoded(alpha.convert("LA"), "PNG"),
    "deep_grey.png": png_16_bits(1),
    "deep.png": png_16_bits(3),
    "animated.png": encoded(image, "PNG", **frames),
    "plain.webp": encoded(image, "WEBP", lossless=True),
    "lossy.webp": encoded(image, "WEBP"),
    "alpha.webp": encoded(alpha, "WEBP", lossless=True, exact=True),
    "animated.webp": encoded(image, "WEBP", lossless=True, **frames),
    "animated.gif": encoded(image, "GIF", **frames),
    "plain.bmp": encoded(image, "BMP"),
    "palette.bmp": encoded(image.convert("P"), "BMP"),
    "plain.tif": encoded(image, "TIFF"),
    "plain.ppm": encoded(image, "PPM"),
    "no_end.png": encoded(image, "PNG")[:-6],
    "really_png.jpg": encoded(image, "PNG"),
    "really_jpeg.png": jpeg,
    "really_gif.jpg": encoded(image, "GIF"),
    "dot.png": encoded(image.resize((1, 1)), "PNG"),
    "dot.jpg": encoded(image.resize((1, 1)), "JPEG"),
    "wide.png": encoded(photo(2, 30_000), "PNG"),
    "wide.jpg": encoded(photo(2, 30_000), "JPEG"),
    "turned_6.tif": oriented("TIFF", 6),
    "turned_8.png": oriented("PNG", 8),
    "turned_5.webp": oriented("WEBP", 5, lossless=True),
    "turned_6_progressive.jpg": oriented("JPEG", 6, progressive=True),
    "turned_6_late.jpg": behind_metadata(oriented("JPEG", 6, quality=95)),
    "strange_exif.jpg": encoded(image, "JPEG", exif=b"Exif\0\0II*\0nonsense"),
  }
  for number in range(1, 9):
    files[f"turned_{number}.jpg"] = oriented("JPEG", number, quality=95)
  return files


@functools.cache
def broken():
  """Returns name -> bytes without pixels, and a part of the reason."""
  image = photo(96, 160)
  jpeg, png = encoded(image, "JPEG"), encoded(image, "PNG")
  thumbnail = oriented("JPEG", 1, image, comment=b"\xff\xd9")[:-2]
  progressive = encoded(image, "JPEG", progressive=True)
  bomb = bomb_jpeg(12_000, progressive=True)
  return {
    "empty.jpg": (b"", "no bytes"),
    "text.jpg": (b"buy milk", "no image"),
    "half.jpg": (jpeg[: len(jpeg) // 2], "cut off"),
    "no_end.jpg": (jpeg[:-2], "cut off"),
    "thumbnail.jpg": (thumbnail, "cut off"),
    "half_progressive.jpg": (progressive[:600], "cut off"),
    "half.png": (png[: len(png) // 2], "cannot be decoded"),
    "half.gif": (encoded(image, "GIF")[:999], "cannot be decoded"),
    "half.webp": (encoded(image, "WEBP")[:200], "cannot be decoded"),
    "half.bmp": (encoded(image, "BMP")[:999], "cannot be decoded"),
    "bytes.png": (png[:90] + b"\0" * 400 + png[490:], "cannot be decoded"),
    "bomb.png": (bomb_png(), "196,000,000 pixels"),
    "bomb.jpg": (bomb_jpeg(), "4,290,250,000 pixels"),
    "bomb_progressive.jpg": (bomb, "12,000 x 12,000 pixels"),
    "bomb.gif": (bomb_gif(), "4,290,250,000 pixels"),
    "bomb.bmp": (bomb_bmp(), "1,600,000,000 pixels"),
  }


def write_classes(root, files, small=3, side=(24, 40)):
  """Writes files to class a, plain images to class b; returns the name."""
  plain = {f"b/{i}.png": encoded(photo(*side), "PNG") for i in range(small)}
  classes = {f"a/{name}": data for name, data in files.items()}
  for name, data in (classes | plain).items():
    path = pathlib.Path(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  return f"folder:{root}"


def expected(data):
  """Returns the pixels as Pillow has them, upright, in 8 bits."""
  with Image.open(io.BytesIO(data)) as image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
      grey = (np.asarray(image) >> 8).astype(np.uint8)
      return np.repeat(grey[..., None], 3, -1)
    return np.asarray(image.convert("RGB"))
