//! Every line of inline PTX, behind names: barriers, the bulk copy engine (TMA), fences and small arithmetic
//! of NVIDIA's Hopper (sm_90a). The matrix products' texts are in `hopper/wgmma.rs` and `matmul/text.rs`.
//!
//! Addresses are those of the shared window (`.shared`), in bytes. In a text `%N` is the N-th register of
//! the operands, outputs first, in order; every operand is also named once in a trailing comment, as
//! `gpu_asm!` demands.

use crate::hopper::Half;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// The value of a local. `gpu_asm!` takes values, and a mutable local is a place.
#[cube]
pub fn value_of<T: CubePrimitive>(x: T) -> T {
    intrinsic!(|scope| { x.read_value(scope).into() })
}

/// A text without operands.
#[cube]
fn plain(#[comptime] text: String) {
    gpu_asm!("{text}");
}

/// A text with one u32.
#[cube]
fn with_one(a: u32, #[comptime] text: String) {
    gpu_asm!("{text} // {a}\n", a = in(_) value_of::<u32>(a));
}

/// A text with two u32.
#[cube]
fn with_two(a: u32, b: u32, #[comptime] text: String) {
    gpu_asm!("{text} // {a} {b}\n", a = in(_) value_of::<u32>(a), b = in(_) value_of::<u32>(b));
}

/// Where `memory` starts in the shared window.
#[cube]
pub fn shared_address(memory: &Shared<[u32]>) -> u32 {
    // SAFETY: only the address is taken.
    generic_to_shared::<u32>(unsafe { memory.as_slice().as_ptr_unchecked() })
}

/// `2^x`, subnormals flushed, within 2 units in the last place.
#[cube]
pub fn exp2(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("ex2.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) value_of::<f32>(x), options(pure, nomem));
    y
}

/// `1 / x` within a unit in the last place, subnormals flushed.
#[cube]
pub fn reciprocal(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("rcp.approx.ftz.f32 {y}, {x};", y = out(_) y, x = in(_) value_of::<f32>(x), options(pure, nomem));
    y
}

/// The smaller of two numbers; none where one is none.
#[cube]
pub fn smaller_or_none(a: f32, b: f32) -> f32 {
    let y: f32;
    gpu_asm!(
        "min.NaN.f32 {y}, {a}, {b};",
        y = out(_) y,
        a = in(_) value_of::<f32>(a),
        b = in(_) value_of::<f32>(b),
        options(pure, nomem)
    );
    y
}

/// What all lanes of the plane have alike: the result is in a uniform register, and what is computed from it is too.
#[cube]
pub fn uniform(x: u32) -> u32 {
    let y: u32;
    gpu_asm!(
        "redux.sync.or.b32 {y}, {x}, 0xFFFFFFFF;",
        y = out(_) y,
        x = in(_) value_of::<u32>(x)
    );
    y
}

/// Two values rounded to half precision, the first in the low bits.
#[cube]
pub fn pack(low: f32, high: f32, #[comptime] half: Half) -> u32 {
    let name = comptime!(half.ptx());
    let y: u32;
    gpu_asm!(
        "cvt.rn.{name}x2.f32 {y}, {high}, {low};",
        y = out(_) y,
        high = in(_) value_of::<f32>(high),
        low = in(_) value_of::<f32>(low),
        options(pure, nomem)
    );
    y
}

/// A pointer as a number. It is one only for `gpu_asm!`: its type stays what it is.
#[cube]
pub(crate) fn number_of<T: CubePrimitive>(pointer: *const T) -> u64 {
    // SAFETY: nothing is read: the place is an expression of the kernel's, and its value the pointer.
    intrinsic!(|scope| unsafe { *pointer }.value(scope).into())
}

/// Where the `index`-th word after `start` lies in global memory.
#[cube]
pub fn word_address<T: CubePrimitive>(start: *const T, index: u64) -> u64 {
    element_address::<T>(start, index, 4usize)
}

/// Where the `index`-th element of `bytes` bytes after `start` lies in global memory.
#[cube]
pub fn element_address<T: CubePrimitive>(
    start: *const T,
    index: u64,
    #[comptime] bytes: usize,
) -> u64 {
    let address: u64;
    gpu_asm!(
        "mad.lo.u64 {address}, {index}, {bytes}, {start};",
        address = out(_) address,
        index = in(_) value_of::<u64>(index),
        start = in(_) number_of::<T>(start),
        options(pure, nomem)
    );
    address
}

/// The `offset`-th word after an address in global memory that nobody writes to.
#[cube]
pub fn load_word(address: u64, #[comptime] offset: usize) -> u32 {
    let bytes = comptime!(4 * offset);
    let word: u32;
    gpu_asm!(
        "ld.global.nc.b32 {word}, [{address}+{bytes}];",
        word = out(_) word,
        address = in(_) value_of::<u64>(address)
    );
    word
}

/// Adds 1 to the word at an address in global memory; what it was before.
#[cube]
pub fn count_up(address: u64) -> u32 {
    let before: u32;
    gpu_asm!(
        "atom.global.relaxed.gpu.add.u32 {before}, [{address}], 1;",
        before = out(_) before,
        address = in(_) value_of::<u64>(address)
    );
    before
}

/// The two values of a word, the one in the low bits first.
#[cube]
pub fn unpack(word: u32, #[comptime] half: Half) -> Vector<f32, Const<2>> {
    let name = comptime!(half.ptx());
    let both: Vector<f32, Const<2>>;
    gpu_asm!(
        "{{.reg .b16 low, high; mov.b32 {{low, high}}, %2; cvt.f32.{name} %0, low; cvt.f32.{name} %1, high;}} // {both} {word}\n",
        both = out(_) both,
        word = in(_) value_of::<u32>(word),
        options(pure, nomem)
    );
    both
}

/// The smaller of the low halves, and of the high ones; a number where the other is none.
#[cube]
pub fn smaller_halves(a: u32, b: u32, #[comptime] half: Half) -> u32 {
    let name = comptime!(half.ptx());
    let y: u32;
    gpu_asm!(
        "min.{name}x2 {y}, {a}, {b};",
        y = out(_) y,
        a = in(_) value_of::<u32>(a),
        b = in(_) value_of::<u32>(b),
        options(pure, nomem)
    );
    y
}

/// Registers of each thread of this warpgroup from here on, fewer than it was launched with.
#[cube]
pub fn setmaxnreg_dec(#[comptime] registers: usize) {
    plain(comptime!(format!(
        "setmaxnreg.dec.sync.aligned.u32 {registers};\n"
    )));
}

/// Registers of each thread of this warpgroup from here on, more than it was launched with.
#[cube]
pub fn setmaxnreg_inc(#[comptime] registers: usize) {
    plain(comptime!(format!(
        "setmaxnreg.inc.sync.aligned.u32 {registers};\n"
    )));
}

/// Makes a barrier at `address` that a phase of `arrivals` completes.
#[cube]
pub fn barrier_init(address: u32, #[comptime] arrivals: usize) {
    with_one(
        address,
        comptime!(format!("mbarrier.init.shared::cta.b64 [%0], {arrivals};\n")),
    );
}

/// Shows new barriers to the copy engine. The cube's other threads see them after a sync.
#[cube]
pub fn barrier_init_fence() {
    plain(comptime!(
        "fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;\n".to_string()
    ));
}

/// Waits in a text for the phase of parity `parity` of the barrier at `address + offset`; needs a
/// predicate `waited`, and a `label` that is unique in the text's braces.
pub fn wait_text(label: &str, address: &str, offset: usize, parity: &str) -> String {
    format!(
        "W{label}:\nmbarrier.try_wait.parity.shared::cta.b64 waited, [{address}+{offset}], {parity};\n\
         @waited bra D{label};\nbra W{label};\nD{label}:\n"
    )
}

/// Arrives in a text `times` times at the barrier at `address`, where the predicate `elected` holds.
pub fn arrive_text(address: &str, times: usize) -> String {
    arrive_where_text("elected", address, times)
}

/// [`arrive_text`] by another predicate.
pub fn arrive_where_text(predicate: &str, address: &str, times: usize) -> String {
    format!("@{predicate} mbarrier.arrive.release.cta.shared::cta.b64 _, [{address}], {times};\n")
}

/// Waits until the phase of parity `parity` is complete.
#[cube]
pub fn barrier_wait(address: u32, parity: u32) {
    with_two(
        address,
        parity,
        comptime!(format!(
            "{{\n.reg .pred waited;\n{}}}\n",
            wait_text("", "%0", 0, "%1")
        )),
    );
}

/// Waits at two barriers, and asks both before it waits at one.
#[cube]
pub fn barrier_wait_both(first: u32, first_parity: u32, second: u32, second_parity: u32) {
    let text = comptime!(wait_both_text());
    gpu_asm!(
        "{text} // {first} {first_parity} {second} {second_parity}\n",
        first = in(_) value_of::<u32>(first),
        first_parity = in(_) value_of::<u32>(first_parity),
        second = in(_) value_of::<u32>(second),
        second_parity = in(_) value_of::<u32>(second_parity)
    );
}

/// Waits at two barriers: address and parity of one, of the other.
fn wait_both_text() -> String {
    let ask = |predicate: &str, address: usize| {
        let parity = address + 1;
        format!("mbarrier.try_wait.parity.shared::cta.b64 {predicate}, [%{address}], %{parity};\n")
    };
    let wait = |predicate: &str, address: usize| {
        let text = wait_text(
            predicate,
            &format!("%{address}"),
            0,
            &format!("%{}", address + 1),
        );
        format!("@{predicate} bra {predicate}_done;\n{text}{predicate}_done:\n")
    };
    format!(
        "{{\n.reg .pred waited, first, second;\n{}{}{}{}}}\n",
        ask("first", 0),
        ask("second", 2),
        wait("first", 0),
        wait("second", 2)
    )
}

/// Arrives at a barrier where `elected` is not 0.
#[cube]
pub fn barrier_arrive(address: u32, elected: u32) {
    with_two(
        address,
        elected,
        comptime!(format!(
            "{{\n.reg .pred elected;\nsetp.ne.b32 elected, %1, 0;\n{}}}\n",
            arrive_text("%0", 1)
        )),
    );
}

/// Arrives at a barrier that `bytes` of copies will complete.
#[cube]
pub fn barrier_expect(address: u32, #[comptime] bytes: usize) {
    with_one(
        address,
        comptime!(format!(
            "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], {bytes};\n"
        )),
    );
}

/// Arrives at a barrier that `bytes` of copies will complete, a number known only now.
#[cube]
pub fn barrier_expect_bytes(address: u32, bytes: u32) {
    with_two(
        address,
        bytes,
        comptime!(
            "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n".to_string()
        ),
    );
}

/// Copies a box of the tensor `[batch, heads, length, columns]` behind `map` to `target`, and tells `barrier`.
#[cube]
pub fn tma_load(target: u32, map: u64, batch: u32, head: u32, row: i32, column: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{target}], [{map}, {{{column}, {row}, {head}, {batch}}}], [{barrier}];",
        target = in(_) value_of::<u32>(target),
        map = in(_) value_of::<u64>(map),
        column = in(_) value_of::<u32>(column),
        row = in(_) value_of::<i32>(row),
        head = in(_) value_of::<u32>(head),
        batch = in(_) value_of::<u32>(batch),
        barrier = in(_) value_of::<u32>(barrier)
    );
}

/// The same of the tensor `[batch, heads, subtiles, length, 64]`, from a subtile on.
#[cube]
pub fn tma_load_subtiles(
    target: u32,
    map: u64,
    batch: u32,
    head: u32,
    row: i32,
    subtile: u32,
    barrier: u32,
) {
    gpu_asm!(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [{target}], [{map}, {{{column}, {row}, {subtile}, {head}, {batch}}}], [{barrier}];",
        target = in(_) value_of::<u32>(target),
        map = in(_) value_of::<u64>(map),
        column = in(_) 0u32,
        row = in(_) value_of::<i32>(row),
        subtile = in(_) value_of::<u32>(subtile),
        head = in(_) value_of::<u32>(head),
        batch = in(_) value_of::<u32>(batch),
        barrier = in(_) value_of::<u32>(barrier)
    );
}

/// Brings a box of the tensor `[batch, heads, subtiles, length, 64]` behind `map` into the L2 cache.
#[cube]
pub fn tma_prefetch_subtiles(map: u64, batch: u32, head: u32, row: i32, subtile: u32) {
    gpu_asm!(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [{map}, {{{column}, {row}, {subtile}, {head}, {batch}}}];",
        map = in(_) value_of::<u64>(map),
        column = in(_) 0u32,
        row = in(_) value_of::<i32>(row),
        subtile = in(_) value_of::<u32>(subtile),
        head = in(_) value_of::<u32>(head),
        batch = in(_) value_of::<u32>(batch)
    );
}

/// Copies a box from `source` to the tensor `[batch, heads, length, columns]` behind `map`, as far as it goes.
#[cube]
pub fn tma_store(map: u64, source: u32, batch: u32, head: u32, row: i32, column: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [{map}, {{{column}, {row}, {head}, {batch}}}], [{source}];\ncp.async.bulk.commit_group;",
        map = in(_) value_of::<u64>(map),
        source = in(_) value_of::<u32>(source),
        batch = in(_) value_of::<u32>(batch),
        head = in(_) value_of::<u32>(head),
        row = in(_) value_of::<i32>(row),
        column = in(_) value_of::<u32>(column)
    );
}

/// Waits until this thread's stores have read their sources.
#[cube]
pub fn tma_store_wait() {
    plain(comptime!("cp.async.bulk.wait_group.read 0;\n".to_string()));
}

/// Shows this thread's writes to shared memory to the matrix unit and the copy engine.
#[cube]
pub fn async_proxy_fence() {
    plain(comptime!("fence.proxy.async.shared::cta;\n".to_string()));
}

/// A meeting of `units` threads; `id` from 1 to 15, 0 is `sync_cube`'s.
#[cube]
pub fn named_barrier(id: u32, #[comptime] units: usize) {
    with_one(id, comptime!(format!("bar.sync %0, {units};\n")));
}

/// Arrives at a meeting without waiting for it.
#[cube]
pub fn named_barrier_arrive(id: u32, #[comptime] units: usize) {
    with_one(id, comptime!(format!("bar.arrive %0, {units};\n")));
}

/// Sets bits of a word in shared memory.
#[cube]
pub fn or_shared(address: u32, bits: u32) {
    with_two(
        address,
        bits,
        comptime!("red.shared::cta.or.b32 [%0], %1;\n".to_string()),
    );
}

/// Writes a word to shared memory.
#[cube]
pub fn store_shared(address: u32, value: u32) {
    with_two(
        address,
        value,
        comptime!("st.shared::cta.b32 [%0], %1;\n".to_string()),
    );
}

/// Writes 16 bytes of zeros.
#[cube]
pub fn zero_fill_shared(address: u32) {
    with_one(
        address,
        comptime!(
            "{\n.reg .b32 zero;\nmov.b32 zero, 0;\nst.shared::cta.v4.b32 [%0], {zero, zero, zero, zero};\n}\n"
                .to_string()
        ),
    );
}

/// Reads a word of shared memory.
#[cube]
pub fn load_shared(address: u32) -> u32 {
    let x: u32;
    gpu_asm!("ld.shared::cta.b32 {x}, [{a}];", x = out(_) x, a = in(_) value_of::<u32>(address));
    x
}

/// Two numbers that lie together, at a multiple of 8 bytes.
#[cube]
pub fn load_shared_pair(address: u32) -> Vector<f32, Const<2>> {
    let text = comptime!("ld.shared::cta.v2.f32 {%0, %1}, [%2];\n".to_string());
    let pair: Vector<f32, Const<2>>;
    gpu_asm!(
        "{text} // {pair} {x}\n",
        pair = out(_) pair,
        x = in(_) value_of::<u32>(address)
    );
    pair
}

/// Stores four 8 × 8 matrices of halves, a row's 16 bytes at each lane's address.
#[cube]
pub fn store_matrices(address: u32, a: u32, b: u32, c: u32, d: u32) {
    gpu_asm!(
        "stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [{x}], {{{a}, {b}, {c}, {d}}};",
        x = in(_) value_of::<u32>(address),
        a = in(_) value_of::<u32>(a),
        b = in(_) value_of::<u32>(b),
        c = in(_) value_of::<u32>(c),
        d = in(_) value_of::<u32>(d)
    );
}

/// Loads what [`store_matrices`] stores.
#[cube]
pub fn load_matrices(address: u32) -> Vector<u32, Const<4>> {
    let text = comptime!(
        "ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];\n".to_string()
    );
    let matrices: Vector<u32, Const<4>>;
    gpu_asm!(
        "{text} // {matrices} {x}\n",
        matrices = out(_) matrices,
        x = in(_) value_of::<u32>(address)
    );
    matrices
}
