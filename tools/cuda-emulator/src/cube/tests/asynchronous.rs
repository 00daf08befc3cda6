//! Tests of asynchronous copies, mbarriers and tensor maps.

use super::{Kernel, output};
use crate::cube::TensorMap;
use crate::fault::Fault;

/// Returns a kernel in which each thread copies its 32-bit word to shared memory with `cp.async` and then reads the
/// copy. The instructions `before_reading` stand between the copy and the read. `read` is appended to the operands of
/// `cp.async`. `read` is either empty, or a comma and the number of bytes to read.
fn copied(before_reading: &str, read: &str) -> String {
    format!(
        ".shared .align 16 .b8 tile[128];
        .reg .b32 %at, %x; .reg .b64 %in, %word;
        ld.param.u64 %in, [input0];
        mad.wide.u32 %word, %tid, 4, %in;
        shl.b32 %at, %tid, 2;
        mov.u32 %x, tile;
        add.u32 %at, %at, %x;
        cp.async.ca.shared.global [%at], [%word], 4{read};
        {before_reading}
        ld.shared.u32 %x, [%at];
        st.global.u32 [%own], %x;"
    )
}

fn with_words(body: &str) -> Kernel {
    let mut kernel = Kernel::new(body, 32);
    kernel.inputs = vec![(0..32u32).flat_map(u32::to_le_bytes).collect()];
    kernel
}

#[test]
fn awaited_copies_have_arrived() {
    for wait in [
        "cp.async.wait_all;",
        "cp.async.commit_group; cp.async.wait_group 0;",
    ] {
        let values = with_words(&copied(wait, "")).output();
        assert_eq!(values, (0..32).collect::<Vec<_>>());
    }
}

#[test]
fn read_before_a_copy_is_reported() {
    for wait in ["", "cp.async.commit_group; cp.async.wait_group 1;"] {
        let (values, outcome) = with_words(&copied(wait, "")).run().unwrap();
        assert!(
            outcome.races[0].contains("a copy has yet to bring"),
            "{:?}",
            outcome.races
        );
        // The lanes read before the copy is complete. The result therefore has the NaN bits with which shared memory is
        // filled initially.
        assert_eq!(values, [u32::MAX; 32]);
    }
}

#[test]
fn bytes_that_a_copy_does_not_read_are_zero() {
    let values = with_words(&copied("cp.async.wait_all;", ", 0")).output();
    assert_eq!(values, [0; 32]);
}

#[test]
fn copy_source_of_no_bytes_must_be_aligned() {
    for read in ["", ", 0"] {
        let body = copied("", read).replace("%tid, 4, %in", "%tid, 6, %in");
        let fault = with_words(&body).fault();
        assert!(
            matches!(fault, Fault::Misaligned { bytes: 4, .. }),
            "{fault}"
        );
    }
}

#[test]
fn copy_source_must_be_allocated() {
    let body = copied("", "").replace("%tid, 4, %in", "%tid, 8, %in");
    let fault = with_words(&body).fault();
    assert!(matches!(fault, Fault::OutOfBounds { .. }), "{fault}");
}

#[test]
fn copies_arrive_at_an_mbarrier() {
    // The polling loop contains `beside`, an instruction without an effect in the emulator. This instruction must not
    // delay the copies.
    for beside in ["", "fence.acq_rel.cta;", "bar.warp.sync 0xffffffff;"] {
        let wait = format!(
            ".shared .align 8 .b64 barrier; .reg .pred %p, %first;
            setp.eq.u32 %first, %tid, 0;
            @%first mbarrier.init.shared.b64 [barrier], 32;
            bar.sync 0;
            cp.async.mbarrier.arrive.noinc.shared.b64 [barrier];
            $WAIT:
            {beside}
            mbarrier.try_wait.parity.shared.b64 %p, [barrier], 0;
            @!%p bra $WAIT;"
        );
        let values = with_words(&copied(&wait, "")).output();
        assert_eq!(values, (0..32).collect::<Vec<_>>(), "{beside}");
    }
}

/// Returns a kernel in which one warp writes a word four times and another warp reads the word after each write. The
/// reader always waits for the writer. The writer waits for the reader if `waits_for_reader` is true.
fn turns(waits_for_reader: bool) -> String {
    let wait = if waits_for_reader {
        "xor.b32 %parity, %phase, 1;
        $EMPTY:
        mbarrier.try_wait.parity.shared.b64 %p, [empty], %parity;
        @!%p bra $EMPTY;"
    } else {
        ""
    };
    format!(
        ".shared .align 8 .b64 full; .shared .align 8 .b64 empty; .shared .align 4 .b32 word;
        .reg .b32 %turn, %phase, %parity, %x, %sum; .reg .pred %p, %first;
        setp.eq.u32 %first, %tid, 0;
        @%first mbarrier.init.shared.b64 [full], 1;
        @%first mbarrier.init.shared.b64 [empty], 1;
        bar.sync 0;
        mov.u32 %turn, 0;
        mov.u32 %sum, 0;
        setp.ge.u32 %p, %tid, 32;
        @%p bra $READER;
        $WRITE:
        and.b32 %phase, %turn, 1;
        {wait}
        mad.lo.u32 %x, %turn, %turn, 1;
        @%first st.shared.u32 [word], %x;
        @%first mbarrier.arrive.shared.b64 _, [full];
        add.u32 %turn, %turn, 1;
        setp.lt.u32 %p, %turn, 4;
        @%p bra $WRITE;
        exit;
        $READER:
        and.b32 %phase, %turn, 1;
        $FULL:
        mbarrier.try_wait.parity.shared.b64 %p, [full], %phase;
        @!%p bra $FULL;
        ld.shared.u32 %x, [word];
        add.u32 %sum, %sum, %x;
        setp.eq.u32 %first, %tid, 32;
        @%first mbarrier.arrive.shared.b64 _, [empty];
        add.u32 %turn, %turn, 1;
        setp.lt.u32 %p, %turn, 4;
        @%p bra $READER;
        st.global.u32 [%own], %sum;"
    )
}

#[test]
fn mbarrier_phases_alternate() {
    // The writer writes the words 1, 2, 5 and 10: the squares of 0 to 3, plus 1. The reader sums these words to 18.
    assert_eq!(output(&turns(true), 64)[32..], [18; 32]);
}

#[test]
fn phase_without_wait_is_reported() {
    let outcome = Kernel::new(&turns(false), 64).run();
    let told = match outcome {
        Ok((_, outcome)) => !outcome.races.is_empty(),
        // If the writer does not wait for the reader, a fault other than a race is also correct. The writer may arrive
        // more often than the barrier expects, or both warps may deadlock.
        Err(fault) => matches!(fault.fault, Fault::Barrier(_) | Fault::Deadlock(_)),
    };
    assert!(told);
}

#[test]
fn mbarrier_without_arrivals_is_a_deadlock() {
    let fault = Kernel::new(
        ".shared .align 8 .b64 barrier; .reg .pred %p;
        mbarrier.init.shared.b64 [barrier], 2;
        $WAIT:
        mbarrier.try_wait.parity.shared.b64 %p, [barrier], 0;
        @!%p bra $WAIT;",
        1,
    )
    .fault();
    assert!(matches!(fault, Fault::Deadlock(_)), "{fault}");
}

/// Returns a kernel with two inputs. The second input is a tensor, and the first input is the tensor map of that
/// tensor. The tensor has 3 rows of 12 halves, with a row stride of 32 bytes. Each element is 100 · row + column.
fn with_tensor(body: &str) -> Kernel {
    let mut tensor = vec![0xff; 96 + 16];
    let start = tensor.as_ptr().align_offset(16);
    for (at, half) in tensor[start..start + 96].chunks_exact_mut(2).enumerate() {
        let (row, column) = (at as u16 / 16, at as u16 % 16);
        if column < 12 {
            half.copy_from_slice(&(100 * row + column).to_le_bytes());
        }
    }
    let map = TensorMap {
        rank: 2,
        element: 2,
        swizzle: 0,
        start: tensor[start..].as_ptr() as u64,
        sizes: [12, 3, 0, 0, 0],
        boxes: [8, 4, 0, 0, 0],
        strides: [0, 32, 0, 0, 0],
    };
    let mut kernel = Kernel::new(body, 16);
    kernel.inputs = vec![map.to_bytes().to_vec(), tensor];
    kernel
}

/// Loads the box at column 8 and row −1, and stores each word of the box to the output. Only 4 columns and 3 rows of
/// the box are inside the tensor.
const LOAD: &str = ".shared .align 128 .b8 tile[64]; .shared .align 8 .b64 barrier;
    .reg .b64 %map; .reg .b32 %at, %x; .reg .pred %p, %first;
    ld.param.u64 %map, [input0];
    setp.eq.u32 %first, %tid, 0;
    @%first mbarrier.init.shared.b64 [barrier], 1;
    bar.sync 0;
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [barrier], 64;
    mov.u32 %at, tile;
    mov.u32 %x, barrier;
    @%first cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%at], [%map, {8, -1}], [%x];";

const WAIT: &str = "$WAIT:
    mbarrier.try_wait.parity.shared.b64 %p, [barrier], 0;
    @!%p bra $WAIT;";

#[test]
fn box_outside_of_its_tensor_is_zero() {
    let body = format!(
        "{LOAD} {WAIT}
        mad.lo.u32 %at, %tid, 4, %at;
        ld.shared.u32 %x, [%at];
        st.global.u32 [%own], %x;"
    );
    let kernel = with_tensor(&body);
    let pair = |low: u32, high: u32| low | high << 16;
    let row = |first: u32| {
        [
            pair(first + 8, first + 9),
            pair(first + 10, first + 11),
            0,
            0,
        ]
    };
    assert_eq!(
        kernel.output(),
        [[0; 4], row(0), row(100), row(200)].concat()
    );
}

#[test]
fn read_before_a_box_is_reported() {
    let body = format!("{LOAD} ld.shared.u32 %x, [%at];");
    let kernel = with_tensor(&body);
    let races = kernel.races();
    assert!(races[0].contains("a copy has yet to bring"), "{races:?}");
}

#[test]
fn box_store_writes_only_inside_of_its_tensor() {
    let store = |before: &str, after: &str| {
        format!(
            ".shared .align 128 .b8 tile[64];
            .reg .b64 %map; .reg .b32 %at, %x; .reg .pred %first;
            ld.param.u64 %map, [input0];
            setp.eq.u32 %first, %tid, 0;
            mov.u32 %x, tile;
            mad.lo.u32 %at, %tid, 4, %x;
            st.shared.u32 [%at], 0x00070007;
            {before}
            bar.sync 0;
            @%first cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%map, {{8, 2}}], [%x];
            @%first cp.async.bulk.commit_group;
            {after}
            @%first cp.async.bulk.wait_group.read 0;"
        )
    };
    let fence = "fence.proxy.async.shared::cta;";
    let body = store(fence, "");
    let kernel = with_tensor(&body);
    kernel.output();
    let tensor: Vec<u16> = kernel.inputs[1]
        .chunks_exact(2)
        .map(|half| u16::from_le_bytes([half[0], half[1]]))
        .collect();
    let start = kernel.inputs[1].as_ptr().align_offset(16) / 2;
    assert_eq!(
        tensor[start + 32..start + 48],
        [
            200, 201, 202, 203, 204, 205, 206, 207, 7, 7, 7, 7, 0xffff, 0xffff, 0xffff, 0xffff
        ]
    );

    let body = store("", "");
    let kernel = with_tensor(&body);
    assert!(kernel.races()[0].contains("no proxy fence"));
    let body = store(fence, "st.shared.u32 [%at], 0;");
    let kernel = with_tensor(&body);
    assert!(kernel.races()[0].contains("is reading"));
}
