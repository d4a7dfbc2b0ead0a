"""Reading compiled modules, compared with another reader of the same text."""

import gzip
import math
import pathlib

import pytest

from vit_jax.devices import CHIPS
from vit_jax.tools.planning.hlo import Module, estimate

DATA = pathlib.Path(__file__).parents[1] / "data"
V5E = CHIPS["v5e"]


def test_sums_are_those_of_another_reader():
  """Three scanned blocks, two microbatches, fsdp=2, compiled for v5e:2x2."""
  text = gzip.decompress((DATA / "tiny_v5e_2x2.hlo.gz").read_bytes())
  looped, once = Module(text.decode()).totals(V5E)
  assert looped.cycles == 1_543_088
  assert looped.flops == 241_594_368
  # Most of the products are in the six runs of a block (two by three).
  assert 5.4 < looped.flops / once.flops < 6
  assert looped.bytes == 198_164
  assert looped.roof_seconds == pytest.approx(1.46815001e-06, rel=1e-8)
  assert looped.collectives == {
    "all-gather": [24, 67_968],
    # The other reader counts 14, every trip of a loop through which it passes.
    "all-gather(fused)": [2, 393_216],
    "all-to-all": [2, 34_816],
    "all-reduce": [83, 3_036_192],
  }
  passed = 67_968 + 393_216 + 34_816 + 2 * 3_036_192
  assert looped.link_seconds(V5E) == pytest.approx(passed / 200e9)


LOOP = """
HloModule x

%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i, %two)
  %y = f32[8,16]{1,0:T(8,128)} add(%x, %x), \
backend_config={"estimated_cycles":"7"}
  ROOT %t = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) tuple(%next, %y)
}

%cond (p: (s32[], f32[8,16])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %n = s32[]{:T(128)} constant(9)
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[8,16], w: f32[16,32]) -> f32[8,32] {
  %a = f32[8,16]{1,0:T(8,128)} parameter(0)
  %w = f32[16,32]{1,0:T(8,128)S(1)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) tuple(%zero, %a)
  %loop = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}) while(%start), \
condition=%cond, body=%body
  %x = f32[8,16]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %sum = f32[8,16]{1,0:T(8,128)} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %dot = f32[8,32]{1,0:T(8,128)} dot(%sum, %w), \
lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
backend_config={"estimated_cycles":"100"}
}
"""


def test_a_module_in_closed_form():
  module = Module(LOOP)
  looped, once = module.totals(V5E)
  # From 0 to 9 in steps of 2: five trips of one addition of 7 cycles; its next
  # counter, as every instruction, counts with its traffic.
  assert (looped.cycles, once.cycles) == (5 * 7 + 100, 7 + 100)
  assert looped.flops == once.flops == 2 * 8 * 16 * 32
  assert looped.collectives == {"all-reduce": [1, 8 * 16 * 4]}
  assert looped.link_seconds(V5E) == 2 * 8 * 16 * 4 / 200e9
  # A tile has 8 x 128 numbers, whatever of it is used: 4,096 bytes a matrix;
  # scalars have 4, and `w` is in the fast memory already.
  assert looped.bytes == 5 * (3 * 4 + 3 * 4096) + 2 * 4096
  # Cycles that XLA does not know are those of arithmetic or traffic.
  unknown = LOOP.replace('"7"', f'"{2**63 - 1}"')
  looped, once = Module(unknown).totals(V5E)
  cycles = round(3 * 4096 / V5E.hbm_bandwidth * V5E.clock)
  assert (looped.cycles, once.cycles) == (5 * cycles + 100, cycles + 100)


SPARSE = """\
%sent (p: bf16[4,128]) -> bf16[64,128] {
  %p = bf16[4,128]{1,0} parameter(0)
  ROOT %g = bf16[64,128]{1,0} all-gather(%p), channel_id=1, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (a: bf16[4,128]) -> bf16[64,128] {
  %a = bf16[4,128]{1,0} parameter(0)
  %begun = ((), (), (s32[1]{0:S(2)})) call-start(), to_apply=%sent
  %on = ((bf16[4,128]{1,0}), bf16[64,128]{1,0}) call-update(%begun, %a)
  ROOT %done = bf16[64,128]{1,0} call-done(%on)
}
"""
BETWEEN_SLICES = """\
ENTRY %main (b: f32[]) -> f32[] {
  ROOT %s = (bf16[6,8,128]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}, token[]) \
send(%b, %t), channel_id=3, is_host_transfer=true, frontend_attributes=\
{_xla_host_transfer_handler_name="xla_megascale_runtime"}
}
"""


@pytest.mark.parametrize(
  "text, kind, size, seconds",
  [
    (SPARSE, "all-gather", 64 * 128 * 2, 64 * 128 * 2 / 200e9),
    # At the rate of the network.
    (BETWEEN_SLICES, "between-slices", 6 * 8 * 128 * 2, 2 * 12_288 / 3.125e9),
  ],
)
def test_what_other_processors_send_counts_as_traffic_of_links_alone(
  text, kind, size, seconds
):
  looped, _ = Module(text).totals(V5E)
  assert looped.collectives == {kind: [1, size]} and looped.bytes == 0
  assert looped.link_seconds(V5E) == seconds


CONVOLUTION = """\
ENTRY %main (l: f32[1,5,5,4], r: f32[3,3,4,2]) -> f32[] {
  %l = f32[1,5,5,4]{3,2,1,0} parameter(0)
  %r = f32[3,3,4,2]{3,2,1,0} parameter(1)
  ROOT %c = f32[1,SIDE,SIDE,2]{3,2,1,0} convolution(%l, %r), \
window={size=3x3STRIDE pad=1_1x1_1}, dim_labels=b01f_01io->b01f
}
"""


@pytest.mark.parametrize(
  "side, stride, pairs", [("5", "", 13), ("3", " stride=2x2", 7)]
)
def test_what_meets_the_padding_does_not_count(side, stride, pairs):
  """Of 15 pairs of a place and a number of the kernel along a side, 13 do."""
  text = CONVOLUTION.replace("SIDE", side).replace("STRIDE", stride)
  looped, _ = Module(text).totals(V5E)
  assert looped.flops == 2 * pairs * pairs * 4 * 2


def test_the_roofline_counts_every_trip_of_a_loop():
  looped, once = Module(LOOP).totals(V5E)
  costs = {"optimal_seconds": 1.0, "flops": 0, "bytes accessed": 1}
  result = estimate(LOOP, costs, V5E)
  assert result["optimal_seconds"] == looped.roof_seconds / once.roof_seconds
  # 135 cycles, and an all-reduce.
  cycles = 135 / V5E.clock + looped.link_seconds(V5E)
  assert result["cycles_seconds"] == pytest.approx(cycles)
  assert result["price_seconds"] == math.sqrt(
    result["cycles_seconds"] * result["optimal_seconds"]
  )
  # It is no less than what the instructions take at full rates.
  result = estimate(LOOP, costs | {"optimal_seconds": 1e-12}, V5E)
  assert result["optimal_seconds"] == looped.roof_seconds
