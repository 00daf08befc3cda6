//! Tests of lanes: their control flow, and operations across lanes.

use super::{Kernel, output};

#[test]
fn diverged_lanes_reconverge() {
    // If the lanes reconverge after the branches, `redux` sums the values of all lanes. The 16 odd lanes contribute 1
    // each, and the 16 even lanes contribute 100 each.
    let sums = output(
        ".reg .b32 %x, %y; .reg .pred %odd;
        and.b32 %x, %tid, 1;
        setp.ne.u32 %odd, %x, 0;
        @%odd bra $ODD;
        mov.u32 %x, 100;
        bra.uni $TOGETHER;
        $ODD:
        mov.u32 %x, 1;
        $TOGETHER:
        redux.sync.add.u32 %y, %x, 0xffffffff;
        st.global.u32 [%own], %y;",
        32,
    );
    assert_eq!(sums, [16 * 101; 32]);
}

#[test]
fn lanes_loop_independently() {
    let turns = output(
        ".reg .b32 %n; .reg .pred %more;
        mov.u32 %n, 0;
        $AGAIN:
        add.u32 %n, %n, 3;
        setp.lt.u32 %more, %n, %tid;
        @%more bra $AGAIN;
        bar.warp.sync 0xffffffff;
        st.global.u32 [%own], %n;",
        32,
    );
    let expected: Vec<u32> = (0..32u32).map(|lane| lane.div_ceil(3).max(1) * 3).collect();
    assert_eq!(turns, expected);
}

#[test]
fn exited_lanes_are_not_waited_for() {
    let sums = output(
        ".reg .b32 %x; .reg .pred %leaves;
        setp.ge.u32 %leaves, %tid, 8;
        @%leaves exit;
        redux.sync.add.u32 %x, %tid, 0xffffffff;
        bar.sync 0;
        st.global.u32 [%own], %x;",
        32,
    );
    assert_eq!(sums[..8], [28; 8]);
    assert_eq!(sums[8..], [0; 24]);
}

/// Compares the two halves of each word, as f16, with the halves of a constant. The low half of a word holds the bits
/// of the lane's index. The high half holds the same bits in lanes 0 to 15, and NaN in lanes 16 to 31.
#[test]
fn set_of_f16_pairs_compares_each_half() {
    let masks = output(
        ".reg .b32 %x, %y; .reg .pred %nan;
        mul.lo.u32 %x, %tid, 0x10001;
        setp.ge.u32 %nan, %tid, 16;
        @%nan or.b32 %x, %x, 0x7e000000;
        mov.u32 %y, 0x80010003;
        set.gt.u32.f16x2 %y, %x, %y;
        st.global.u32 [%own], %y;",
        32,
    );
    let expected: Vec<u32> = (0..32)
        .map(|lane| match lane {
            ..4 => 0xFFFF_0000,
            4..16 => 0xFFFF_FFFF,
            _ => 0xFFFF,
        })
        .collect();
    assert_eq!(masks, expected);
}

/// Compares the halves of a word as f16. The comparison includes NaN, and writes the f16 number 1 for true.
#[test]
fn set_of_f16_pairs_writes_numbers() {
    let numbers = output(
        ".reg .b32 %x, %y;
        mov.u32 %x, 0x3c007e00;
        mov.u32 %y, 0x38003800;
        set.leu.f16x2.f16x2 %x, %x, %y;
        st.global.u32 [%own], %x;",
        1,
    );
    assert_eq!(numbers, [0x3C00]);
}

#[test]
fn shuffle_reads_within_its_segment() {
    let shuffled = |mode: &str, by: u32, segment: u32| {
        let body = format!(
            ".reg .b32 %x; .reg .pred %inside;
            shfl.sync.{mode}.b32 %x|%inside, %tid, {by}, {segment}, 0xffffffff;
            @!%inside add.u32 %x, %x, 100;
            st.global.u32 [%own], %x;"
        );
        output(&body, 32)
    };
    let expected = |of: fn(u32) -> u32| (0..32).map(of).collect::<Vec<_>>();
    assert_eq!(shuffled("bfly", 16, 31), expected(|lane| lane ^ 16));
    assert_eq!(shuffled("idx", 5, 31), [5; 32]);
    assert_eq!(
        shuffled("down", 1, 31),
        expected(|lane| if lane == 31 { 131 } else { lane + 1 })
    );
    assert_eq!(
        shuffled("up", 2, 0),
        expected(|lane| if lane < 2 { lane + 100 } else { lane - 2 })
    );
    // The value `24 << 8` in the last operand restricts the shuffle to segments of eight lanes.
    assert_eq!(
        shuffled("idx", 3, 24 << 8 | 31),
        expected(|lane| lane / 8 * 8 + 3)
    );
    assert_eq!(
        shuffled("down", 6, 24 << 8 | 31),
        expected(|lane| if lane % 8 < 2 { lane + 6 } else { lane + 100 })
    );
}

#[test]
fn votes_matches_and_elections_cover_the_lanes() {
    let body = |instructions: &str| {
        let body = format!(
            ".reg .b32 %x, %y; .reg .pred %p, %q;
            setp.lt.u32 %p, %tid, 3;
            and.b32 %x, %tid, 3;
            {instructions}
            st.global.u32 [%own], %y;"
        );
        output(&body, 32)
    };
    assert_eq!(body("vote.sync.ballot.b32 %y, %p, 0xffffffff;"), [7; 32]);
    assert_eq!(
        body("vote.sync.any.pred %q, %p, 0xffffffff; selp.u32 %y, 1, 0, %q;"),
        [1; 32]
    );
    assert_eq!(
        body("vote.sync.all.pred %q, !%p, 0xffffffff; selp.u32 %y, 1, 0, %q;"),
        [0; 32]
    );
    let same = body("match.any.sync.b32 %y, %x, 0xffffffff;");
    assert_eq!(
        same[..4],
        [0x1111_1111, 0x2222_2222, 0x4444_4444, 0x8888_8888]
    );
    let elected = body("elect.sync _|%q, 0xffffffff; selp.u32 %y, 1, 0, %q;");
    assert_eq!((elected[0], elected[1..].iter().sum::<u32>()), (1, 0));
    assert_eq!(body("redux.sync.or.b32 %y, %x, 0xffffffff;"), [3; 32]);
    assert_eq!(body("redux.sync.max.s32 %y, %tid, 0xffffffff;"), [31; 32]);
}

#[test]
fn activemask_contains_the_active_lanes() {
    let masks = output(
        ".reg .b32 %x; .reg .pred %p;
        setp.lt.u32 %p, %tid, 4;
        mov.u32 %x, 0;
        @%p bra $FEW;
        bra $END;
        $FEW:
        activemask.b32 %x;
        $END:
        st.global.u32 [%own], %x;",
        32,
    );
    assert_eq!(masks[..5], [15, 15, 15, 15, 0]);
}

#[test]
fn guard_applies_to_its_lanes_only() {
    let values = output(
        ".reg .b32 %x, %y; .reg .pred %p, %q;
        setp.gt.s32 %p|%q, %tid, 15;
        mov.u32 %x, 1;
        @%p mov.u32 %x, 2;
        selp.u32 %y, 10, 20, %q;
        add.u32 %x, %x, %y;
        st.global.u32 [%own], %x;",
        32,
    );
    assert_eq!(values[..16], [11; 16]);
    assert_eq!(values[16..], [22; 16]);
}

#[test]
fn special_registers_give_thread_and_block_indices() {
    let mut kernel = Kernel::new(
        ".reg .b32 %x; .reg .b64 %at;
        mov.u32 %x, %ctaid.x;
        mad.lo.u32 %x, %x, 64, %tid;
        mad.wide.u32 %at, %x, 4, %out;
        st.global.u32 [%at], %x;",
        64,
    );
    kernel.cubes = 5;
    kernel.words = 320;
    assert_eq!(kernel.output(), (0..320).collect::<Vec<_>>());
}

#[test]
fn registers_are_packed_and_unpacked() {
    let values = output(
        ".reg .b32 %x, %low, %high; .reg .b64 %wide; .reg .b16 %a, %b;
        mov.b64 %wide, {%tid, 7};
        mov.b64 {%low, %high}, %wide;
        add.u32 %x, %low, %high;
        mov.b32 {%a, %b}, %x;
        mov.b32 %x, {%b, %a};
        st.global.u32 [%own], %x;",
        32,
    );
    assert_eq!(values[5], 12 << 16);
}

#[test]
fn register_names_are_scoped_to_their_block() {
    let values = output(
        ".reg .b32 %x;
        mov.u32 %x, 1;
        {
        .reg .b32 %x;
        mov.u32 %x, 2;
        st.global.u32 [%own], %x;
        bra $OUT;
        $OUT:
        }
        {
        .reg .pred %p;
        bra $OUT;
        st.global.u32 [%own], 9;
        $OUT:
        }
        add.u32 %x, %x, %x;
        ld.global.u32 %tid, [%own+0];
        add.u32 %x, %x, %tid;
        st.global.u32 [%own], %x;",
        32,
    );
    assert_eq!(values, [4; 32]);
}
