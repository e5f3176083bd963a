"""What is read of compiled programs: collectives, how often they run, and bytes moved."""

import pytest

from examples.kit.aot.hlo import Collective, collectives, counts
from examples.kit.aot.traffic import LoopError, hbm_bytes, hbm_range


def test_collectives_are_counted_with_their_bytes():
    text = """
      %a = (f32[], f32[12]{0}, /*index=2*/bf16[2,3]{1,0}) all-reduce(%x, %y, %z), channel_id=1
      ROOT %b = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%x), dimensions={0}
      %c = f32[8] add(%all-reduce.1, %q)
    """
    assert collectives(text) == [
        Collective("all-reduce", 4 + 48 + 12, 48),
        Collective("all-gather", 128, 128),
    ]
    assert counts(collectives(text)) == {"all-reduce": 1, "all-gather": 1}


LOOP = """HloModule m

%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = f32[8]{0} all-reduce(%x), channel_id=3, to_apply=%add
}

%outer_condition (p: (s32[])) -> pred[] {
  %n = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%inner_condition (p: (s32[])) -> pred[] {
  ROOT %lt = pred[] fusion(%i, %n), kind=kLoop, calls=%compare
}

%outer (p: (s32[])) -> (s32[]) {
  %inner = (s32[], f32[8]) while(%t), condition=%inner_condition, body=%body.1, \
backend_config={"known_trip_count":{"n":"4"},"other":[]}
  %start = f32[6]{0} fusion(%x), kind=kOutput, calls=%gather_begins
  %done = f32[6]{0} fusion(%start), kind=kOutput, calls=%gather_ends
}

%gather_begins (p: f32[3]) -> f32[6] {
  ROOT %g = f32[6]{0} all-gather(%p), channel_id=7, dimensions={0}
}

%gather_ends (p: f32[3]) -> f32[6] {
  ROOT %h = f32[6]{0} all-gather(%p), channel_id=7, dimensions={0}
}

ENTRY %main (p: s32[]) -> s32[] {
  %w = (s32[]) while(%t), condition=%outer_condition, body=%outer
  %permute = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=8
}
"""


def test_loops_multiply_and_a_collective_in_parts_is_one():
    # Callees first, as XLA prints them.
    parts = LOOP.split("\n\n")
    text = "\n\n".join([*parts[:4], *parts[5:7], parts[4], parts[7]])
    assert sorted(collectives(text)) == [
        Collective("all-gather", 24, 24, 5),
        Collective("all-reduce", 32, 32, 20),
        Collective("collective-permute", 8, 8, 1),
    ]


UNROLLED = """
  %a = f32[8]{0} all-gather(%x), channel_id=2, dimensions={0}
  %b = f32[8]{0} all-gather(%a), channel_id=2, dimensions={0}
"""


def test_copies_in_an_unrolled_loop_share_a_channel():
    assert collectives(UNROLLED) == [Collective("all-gather", 32, 32)] * 2


TRAFFIC = """HloModule m

%fused (p: f32[8]) -> f32[8] {
  %never = f32[1000]{0} negate(%p)
}

ENTRY %main (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0:T(1024)} parameter(0)
  %q = f32[1024]{0:T(1024)} parameter(1)
  %s = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) copy-start(%p)
  %d = f32[1024]{0:T(1024)S(1)} copy-done(%s)
  %h = ((f32[1024]{0:T(1024)}), f32[256]{0:T(256)S(1)}, s32[]) slice-start(%q), slice={[0:256]}
  %e = f32[256]{0:T(256)S(1)} slice-done(%h)
  %b = f32[256]{0:T(256)} custom-call(%e), custom_call_target="ConcatBitcast"
  %f = (f32[1024]{0:T(1024)}, bf16[1024]{0:T(1024)}) fusion(%d, %q, %e), kind=kLoop, calls=%fused
  %g = f32[1024]{0:T(1024)} get-tuple-element(%f), index=0
  ROOT %r = f32[1024]{0:T(1024)S(1)} add(%g, %d), metadata={op_name="a), b(%q"}
}
"""


def test_traffic_counts_what_crosses_to_slow_memory_once():
    copied = 4096 + 1024
    fused = 4096 + (4096 + 2048)  # reads q, writes two arrays; %d and %e are in fast memory
    added = 4096
    assert hbm_bytes(TRAFFIC) == copied + fused + added


BRANCHES = """\
%drop (p: (f32[8])) -> f32[8] {
  %p = (f32[8]{0}) parameter(0)
  ROOT %x = f32[8]{0} get-tuple-element(%p), index=0
}
%keep (p: (f32[8])) -> f32[8] {
  %p = (f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  ROOT %y = f32[8]{0} negate(%x)
}
ENTRY %m (c: pred[], x: f32[8]) -> f32[8] {
  %c = pred[] parameter(0)
  %x = f32[8]{0} parameter(1)
  %z = f32[8]{0} negate(%x)
  %t = (f32[8]{0}) tuple(%z)
  ROOT %r = f32[8]{0} conditional(%c, %t, %t), NAMES
}
"""


@pytest.mark.parametrize(
    "names",
    ["branch_computations={%drop, %keep}", "true_computation=%keep, false_computation=%drop"],
)
def test_traffic_of_branches_is_a_range(names):
    text = BRANCHES.replace("NAMES", names)
    assert hbm_range(text) == (64, 128)
    with pytest.raises(LoopError, match="varies from 64 to 128 bytes with its branches"):
        hbm_bytes(text)
    assert hbm_bytes(text.replace("%keep,", "%drop,").replace(", %keep", ", %drop")) == 64


def test_traffic_of_a_loop_is_refused():
    with pytest.raises(LoopError, match="has a while, w"):
        hbm_bytes("ENTRY %m (p: s32[]) -> s32[] {\n  %w = (s32[]) while(%t), body=%b\n}\n")
