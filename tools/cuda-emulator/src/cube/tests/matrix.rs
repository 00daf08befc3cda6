//! Tests of the matrix instructions against scalar matrix multiplication, and of the loads and stores of tiles.

use super::{Kernel, output};
use crate::numbers::{to_brain, to_half};

/// Returns the matrix element at a position. The elements are small integers, so that every dot product is exact.
fn number(row: usize, column: usize) -> f32 {
    ((row * 7 + column * 3) % 11) as f32 - 5.0
}

fn transposed(row: usize, column: usize) -> f32 {
    number(column + 2, row)
}

fn bytes(
    rows: usize,
    columns: usize,
    half: fn(f32) -> u16,
    of: fn(usize, usize) -> f32,
) -> Vec<u8> {
    (0..rows * columns)
        .flat_map(|at| half(of(at / columns, at % columns)).to_le_bytes())
        .collect()
}

fn product(rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns)
        .map(|at| {
            let (row, column) = (at / columns, at % columns);
            (0..16)
                .map(|k| number(row, k) * transposed(k, column))
                .sum()
        })
        .collect()
}

/// Returns a kernel in which a warp copies a 16 × 16 matrix and an 8 × 16 matrix to shared memory. The warp then
/// multiplies the first matrix by the transpose of the second. `half` is the PTX type of the elements, f16 or bf16.
fn mma(half: &str) -> String {
    format!(
        ".shared .align 16 .b8 left[512]; .shared .align 16 .b8 right[256];
        .reg .b64 %in, %word; .reg .b32 %at, %x, %y, %a<4>, %b<2>; .reg .f32 %c<4>; .reg .b64 %to;
        ld.param.u64 %in, [input0];
        mad.wide.u32 %word, %tid, 16, %in;
        mov.u32 %at, left;
        mad.lo.u32 %at, %tid, 16, %at;
        cp.async.cg.shared.global [%at], [%word], 16;
        ld.param.u64 %in, [input1];
        mad.wide.u32 %word, %tid, 8, %in;
        mov.u32 %at, right;
        mad.lo.u32 %at, %tid, 8, %at;
        cp.async.ca.shared.global [%at], [%word], 8;
        cp.async.wait_all;
        bar.warp.sync 0xffffffff;
        // Lanes 0 to 15 pass the addresses of rows 0 to 15 at column 0, and lanes 16 to 31 the same rows at column 8.
        mov.u32 %at, left;
        and.b32 %x, %tid, 15;
        shr.u32 %y, %tid, 4;
        mad.lo.u32 %at, %x, 32, %at;
        mad.lo.u32 %at, %y, 16, %at;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%a0, %a1, %a2, %a3}}, [%at];
        mov.u32 %at, right;
        and.b32 %x, %tid, 7;
        shr.u32 %y, %tid, 3;
        and.b32 %y, %y, 1;
        mad.lo.u32 %at, %x, 32, %at;
        mad.lo.u32 %at, %y, 16, %at;
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%b0, %b1}}, [%at];
        mov.f32 %c0, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 {{%c0, %c1, %c2, %c3}},
            {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{%c0, %c0, %c0, %c0}};
        // A lane has two neighboring columns from 2 · (lane % 4) on, in the rows lane / 4 and lane / 4 + 8.
        mad.wide.u32 %to, %tid, 8, %out;
        st.global.v2.f32 [%to], {{%c0, %c1}};
        st.global.v2.f32 [%to+256], {{%c2, %c3}};"
    )
}

#[test]
fn mma_product_equals_the_scalar_product() {
    for (name, half) in [("f16", to_half as fn(f32) -> u16), ("bf16", to_brain)] {
        let (left, right) = (
            bytes(16, 16, half, number),
            bytes(8, 16, half, |row, column| transposed(column, row)),
        );
        let mut kernel = Kernel::new(&mma(name), 32);
        kernel.words = 128;
        kernel.inputs = vec![left, right];
        let sums: Vec<f32> = kernel.output().into_iter().map(f32::from_bits).collect();
        let expected: Vec<f32> = product(16, 8).into_iter().map(|sum| sum + 1.0).collect();
        assert_eq!(sums, expected, "{name}");
    }
}

#[test]
fn wmma_product_equals_the_scalar_product() {
    for (kind, loaded, half, registers) in [
        ("f32.f32", "f16", to_half as fn(f32) -> u16, 8),
        ("f32.bf16.bf16.f32", "bf16", to_brain, 4),
    ] {
        let names: Vec<String> = (0..registers).map(|k| format!("%a{k}")).collect();
        let a = names.join(", ");
        let b = a.replace('a', "b");
        let c = (0..8)
            .map(|k| format!("%c{k}"))
            .collect::<Vec<_>>()
            .join(", ");
        // The right matrix is stored column by column, as the modifier `col` of the instruction that loads it requires.
        let body = format!(
            ".reg .b64 %in; .reg .b32 %a<8>, %b<8>; .reg .f32 %c<8>;
            ld.param.u64 %in, [input0];
            wmma.load.a.sync.aligned.row.m16n16k16.global.{loaded} {{{a}}}, [%in], 16;
            ld.param.u64 %in, [input1];
            wmma.load.b.sync.aligned.col.m16n16k16.{loaded} {{{b}}}, [%in], 16;
            ld.param.u64 %in, [input2];
            wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {{{c}}}, [%in];
            wmma.mma.sync.aligned.row.col.m16n16k16.{kind} {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}};
            wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%out], {{{c}}}, 16;"
        );
        let mut kernel = Kernel::new(&body, 32);
        kernel.words = 256;
        kernel.inputs = vec![
            bytes(16, 16, half, number),
            bytes(16, 16, half, |row, column| transposed(column, row)),
            (0..256).flat_map(|_| 2f32.to_le_bytes()).collect(),
        ];
        let sums: Vec<f32> = kernel.output().into_iter().map(f32::from_bits).collect();
        let expected: Vec<f32> = product(16, 16).into_iter().map(|sum| sum + 2.0).collect();
        assert_eq!(sums, expected, "{kind}");
    }
}

#[test]
fn stmatrix_after_transposed_ldmatrix_transposes() {
    let values = output(
        ".shared .align 16 .b8 tile[128]; .reg .b32 %at, %x;
        mov.u32 %at, tile;
        and.b32 %x, %tid, 7;
        mad.lo.u32 %at, %x, 16, %at;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%at], {%tid};
        bar.warp.sync 0xffffffff;
        ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%x}, [%at];
        st.global.u32 [%own], %x;",
        32,
    );
    // Before the transposition, lane 4r + k stores two elements in row r: the lane's index in column 2k, and 0 in
    // column 2k + 1.
    let element = |row: usize, column: usize| match column % 2 {
        0 => (4 * row + column / 2) as u32,
        _ => 0,
    };
    for (lane, value) in values.iter().enumerate() {
        let (row, column) = (lane / 4, 2 * (lane % 4));
        let expected = element(column, row) | element(column + 1, row) << 16;
        assert_eq!(*value, expected, "lane {lane}");
    }
}

/// Returns a kernel in which a warpgroup multiplies a 64 × 16 matrix by a 16 × 8 matrix. Both matrices are in shared
/// memory, in swizzled rows of 128 bytes. The instructions `fence` run after the copies of the matrices to shared
/// memory. The instructions `wait` run after the `wgmma` group is committed.
fn wgmma(fence: &str, wait: &str) -> String {
    format!(
        ".reg .b64 %in, %word, %to, %a, %b; .reg .b32 %at, %x, %y, %row, %v<4>; .reg .f32 %d<4>; .reg .pred %p;
        ld.param.u64 %in, [input0];
        // Two threads copy a row of 16 halves to its swizzled place.
        shr.u32 %row, %tid, 1;
        and.b32 %x, %tid, 1;
        and.b32 %y, %row, 7;
        xor.b32 %x, %x, %y;
        shl.b32 %x, %x, 4;
        mad.lo.u32 %x, %row, 128, %x;
        mov.u32 %at, dynamic;
        add.u32 %at, %at, %x;
        mad.wide.u32 %word, %tid, 16, %in;
        ld.global.v4.u32 {{%v0, %v1, %v2, %v3}}, [%word];
        st.shared.v4.u32 [%at], {{%v0, %v1, %v2, %v3}};
        // The eight rows of the right operand follow.
        ld.param.u64 %in, [input1];
        mad.wide.u32 %word, %tid, 16, %in;
        setp.lt.u32 %p, %tid, 16;
        @%p ld.global.v4.u32 {{%v0, %v1, %v2, %v3}}, [%word];
        @%p st.shared.v4.u32 [%at+8192], {{%v0, %v1, %v2, %v3}};
        {fence}
        bar.sync 0;
        // The descriptor has the address in units of 16 bytes, a distance of 64 units between groups of eight rows,
        // and the swizzle.
        mov.u32 %at, dynamic;
        shr.u32 %x, %at, 4;
        cvt.u64.u32 %a, %x;
        or.b64 %a, %a, 0x4000004000000000;
        add.s64 %b, %a, 512;
        setp.ne.b32 %p, 0, 1;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%d0, %d1, %d2, %d3}}, %a, %b, 0, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned;
        {wait}
        shr.u32 %x, %tid, 5;
        and.b32 %y, %tid, 31;
        mad.wide.u32 %to, %x, 512, %out;
        mad.wide.u32 %to, %y, 8, %to;
        st.global.v2.f32 [%to], {{%d0, %d1}};
        st.global.v2.f32 [%to+256], {{%d2, %d3}};"
    )
}

const FENCE: &str = "fence.proxy.async;";
const WAIT: &str = "wgmma.wait_group.sync.aligned 0;";

fn with_operands(body: &str) -> Kernel {
    let (left, right) = (
        bytes(64, 16, to_half, number),
        bytes(8, 16, to_half, |row, column| transposed(column, row)),
    );
    let mut kernel = Kernel::new(body, 128);
    kernel.words = 512;
    kernel.dynamic_shared = 9216;
    kernel.inputs = vec![left, right];
    kernel
}

#[test]
fn wgmma_product_equals_the_scalar_product() {
    let sums = with_operands(&wgmma(FENCE, WAIT)).output();
    let sums: Vec<f32> = sums.into_iter().map(f32::from_bits).collect();
    assert_eq!(sums, product(64, 8));
}

#[test]
fn operand_overwritten_before_the_wait_is_reported() {
    let overwritten = |before: &str, after: &str| {
        let body = wgmma(FENCE, &format!("{before} st.shared.u32 [%at], 0; {after}"));
        with_operands(&body).races()
    };
    let races = overwritten("", WAIT);
    assert!(races[0].contains("is reading"), "{races:?}");
    // A warp's wait covers only its own `wgmma`. Without a barrier after the wait, the store may overwrite a matrix
    // that another warp's `wgmma` still reads.
    let races = overwritten(WAIT, "");
    assert!(!races.is_empty());
    assert_eq!(
        overwritten(
            &format!("{WAIT} bar.sync 0; setp.eq.u32 %p, %tid, 0; @%p"),
            ""
        ),
        [""; 0]
    );
}

#[test]
fn operand_without_proxy_fence_is_reported() {
    let races = with_operands(&wgmma("", WAIT)).races();
    assert!(races[0].contains("no proxy fence"), "{races:?}");
}
