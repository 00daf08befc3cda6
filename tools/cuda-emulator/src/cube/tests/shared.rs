//! Tests of shared, local and global memory, and of the barriers of a thread block.

use super::{Kernel, output};

/// Returns a kernel in which each of two warps writes one word per thread to shared memory, and then reads the other
/// warp's words. The instructions `between` are between the write and the read.
fn exchange(between: &str) -> String {
    format!(
        ".shared .align 4 .b8 tile[256];
        .reg .b32 %at, %x, %y;
        shl.b32 %at, %tid, 2;
        mov.u32 %x, tile;
        add.u32 %at, %at, %x;
        st.shared.u32 [%at], %tid;
        {between}
        xor.b32 %y, %tid, 32;
        shl.b32 %y, %y, 2;
        add.u32 %y, %y, %x;
        ld.shared.u32 %y, [%y];
        st.global.u32 [%own], %y;"
    )
}

#[test]
fn barrier_orders_accesses_of_warps() {
    let expected: Vec<u32> = (0..64).map(|thread| thread ^ 32).collect();
    assert_eq!(output(&exchange("bar.sync 0;"), 64), expected);
    assert_eq!(
        output(&exchange("barrier.sync.aligned 3, 64;"), 64),
        expected
    );
}

#[test]
fn missing_barrier_is_reported() {
    let races = Kernel::new(&exchange(""), 64).races();
    assert!(!races.is_empty());
    assert!(races[0].contains(".shared.u32 ["), "{}", races[0]);
    assert!(races[0].contains("kernel"), "{}", races[0]);
    // A warp barrier orders only the accesses of one warp, so the race between the two warps must still be reported.
    let races = Kernel::new(&exchange("bar.warp.sync 0xffffffff;"), 64).races();
    assert!(!races.is_empty());
}

#[test]
fn missing_barrier_before_a_write_is_reported() {
    let body = exchange("bar.sync 0;") + "st.shared.u32 [%at], 1;";
    let races = Kernel::new(&body, 64).races();
    assert!(!races.is_empty());
    let body = exchange("bar.sync 0;") + "bar.sync 0; st.shared.u32 [%at], 1;";
    assert!(Kernel::new(&body, 64).races().is_empty());
}

#[test]
fn arrival_orders_earlier_accesses() {
    // `bar.arrive` lets the second warp wait for the first warp, but the first warp does not wait. The first warp's
    // store after `bar.arrive` must therefore be reported as a race.
    let body = |after: &str| {
        format!(
            ".shared .align 4 .b32 word;
            .reg .b32 %x; .reg .pred %second;
            setp.ge.u32 %second, %tid, 32;
            @%second bra $SECOND;
            st.shared.u32 [word], 5;
            bar.arrive 1, 64;
            {after}
            exit;
            $SECOND:
            bar.sync 1, 64;
            ld.shared.u32 %x, [word];
            st.global.u32 [%own], %x;"
        )
    };
    assert_eq!(output(&body(""), 64)[32..], [5; 32]);
    let races = Kernel::new(&body("st.shared.u32 [word], 6;"), 64).races();
    assert!(!races.is_empty());
}

#[test]
fn atomics_need_no_barrier_among_themselves() {
    let body = |between: &str| {
        format!(
            ".shared .align 4 .b32 word;
            .reg .b32 %x; .reg .pred %first;
            setp.eq.u32 %first, %tid, 0;
            @%first st.shared.u32 [word], 0;
            bar.sync 0;
            red.shared.add.u32 [word], %tid;
            {between}
            ld.shared.u32 %x, [word];
            st.global.u32 [%own], %x;"
        )
    };
    assert_eq!(output(&body("bar.sync 0;"), 64), [2016; 64]);
    assert!(!Kernel::new(&body(""), 64).races().is_empty());
}

#[test]
fn shared_memory_starts_as_nan() {
    let words = output(
        ".shared .align 4 .b32 word; .reg .b32 %x;
        ld.shared.u32 %x, [word];
        st.global.u32 [%own], %x;",
        32,
    );
    assert!(f32::from_bits(words[0]).is_nan());
}

#[test]
fn generic_addresses_reach_every_memory_space() {
    let values = output(
        ".shared .align 8 .b8 tile[256];
        .local .align 8 .b8 own[16];
        .reg .b64 %shared, %local, %global; .reg .b32 %x, %y; .reg .b64 %offset; .reg .pred %is;
        mul.wide.u32 %offset, %tid, 8;
        mov.u64 %shared, tile;
        cvta.shared.u64 %shared, %shared;
        add.s64 %shared, %shared, %offset;
        mov.u64 %local, own;
        cvta.local.u64 %local, %local;
        cvta.global.u64 %global, %own;
        st.v2.u32 [%shared], {%tid, 1000};
        st.u32 [%local+8], 10;
        ld.u32 %x, [%shared+4];
        ld.u32 %y, [%local+8];
        add.u32 %x, %x, %y;
        ld.u32 %y, [%shared];
        add.u32 %x, %x, %y;
        isspacep.shared %is, %shared;
        @%is add.u32 %x, %x, 10000;
        isspacep.shared %is, %local;
        @%is add.u32 %x, %x, 10000;
        st.u32 [%global], %x;",
        32,
    );
    let expected: Vec<u32> = (0..32).map(|lane| 11010 + lane).collect();
    assert_eq!(values, expected);
}

#[test]
fn narrow_loads_are_sign_extended() {
    let input: Vec<u8> = vec![0x80, 0xff, 0x7f, 0x01];
    let mut kernel = Kernel::new(
        ".reg .b64 %in; .reg .b32 %x; .reg .b16 %h;
        ld.param.u64 %in, [input0];
        ld.global.s8 %x, [%in];
        st.global.u32 [%out], %x;
        ld.global.u8 %x, [%in];
        st.global.u32 [%out+4], %x;
        ld.global.s16 %h, [%in];
        cvt.s32.s16 %x, %h;
        st.global.u32 [%out+8], %x;
        st.global.u16 [%out+14], %h;",
        1,
    );
    kernel.words = 4;
    kernel.inputs = vec![input];
    assert_eq!(
        kernel.output(),
        [0xffff_ff80, 0x80, 0xffff_ff80, 0xff80_0000]
    );
}

#[test]
fn atomics_of_several_blocks_add_up() {
    let mut kernel = Kernel::new(
        ".reg .b32 %old; .reg .f32 %f;
        atom.global.add.u32 %old, [%out], 1;
        red.relaxed.gpu.global.max.s32 [%out+4], %tid;
        red.global.add.f32 [%out+8], 0f3f000000;
        atom.global.cas.b32 %old, [%out+12], 0, 7;",
        64,
    );
    kernel.cubes = 4;
    kernel.words = 4;
    assert_eq!(kernel.output(), [256, 63, 128f32.to_bits(), 7]);
}
