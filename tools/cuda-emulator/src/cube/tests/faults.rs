//! Tests of faults that end a launch, and of PTX that the decoder refuses before a launch.

use super::Kernel;
use crate::fault::Fault;
use crate::ptx::Module;

fn fault(body: &str, threads: u32) -> Fault {
    Kernel::new(body, threads).fault()
}

#[test]
fn access_outside_of_allocations_is_a_fault() {
    let beyond = fault("st.global.u32 [%own+4], %tid;", 32);
    assert!(
        matches!(beyond, Fault::OutOfBounds { bytes: 4, .. }),
        "{beyond}"
    );
    let nowhere = fault(
        ".reg .b32 %x; .reg .b64 %a; mov.u64 %a, 0; ld.global.u32 %x, [%a];",
        1,
    );
    assert!(
        matches!(nowhere, Fault::OutOfBounds { address: 0, .. }),
        "{nowhere}"
    );
    let shared = fault(
        ".shared .align 4 .b32 word; .reg .b32 %x; ld.shared.u32 %x, [word+1024];",
        1,
    );
    assert!(
        matches!(
            shared,
            Fault::OutOfBounds {
                memory: "shared memory",
                ..
            }
        ),
        "{shared}"
    );
    let null = fault(".reg .b32 %x; mov.u32 %x, 0; ld.shared.u32 %x, [%x];", 1);
    assert!(matches!(null, Fault::OutOfBounds { .. }), "{null}");
}

#[test]
fn misaligned_access_is_a_fault() {
    let wide = fault("st.global.v2.u32 [%out+4], {%tid, %tid};", 1);
    assert!(matches!(wide, Fault::Misaligned { bytes: 8, .. }), "{wide}");
}

#[test]
fn fault_names_its_location() {
    let kernel = Kernel::new("st.global.u32 [%own+4], %tid;", 64);
    let fault = kernel.run().unwrap_err();
    assert_eq!(fault.kernel, "kernel");
    let (warp, instruction) = fault.place.unwrap();
    assert_eq!(
        (warp, instruction.as_str()),
        (1, "st.global.u32 [%own+4], %tid")
    );
}

#[test]
fn barrier_that_not_all_warps_reach_is_a_deadlock() {
    let missing = fault("bar.sync 1, 96;", 64);
    assert!(matches!(missing, Fault::Deadlock(_)), "{missing}");
    let apart = fault(
        ".reg .pred %p;
        setp.lt.u32 %p, %tid, 32;
        @%p bar.sync 1, 64;
        @!%p bar.sync 2, 64;",
        64,
    );
    assert!(matches!(apart, Fault::Deadlock(_)), "{apart}");
}

#[test]
fn lanes_that_wait_for_each_other_are_a_deadlock() {
    let lanes = fault(
        ".reg .pred %p; .reg .b32 %x;
        setp.lt.u32 %p, %tid, 16;
        @%p bra $FIRST;
        redux.sync.add.u32 %x, %tid, 0xffffffff;
        exit;
        $FIRST:
        redux.sync.max.u32 %x, %tid, 0xffffffff;",
        32,
    );
    assert!(matches!(lanes, Fault::Deadlock(_)), "{lanes}");
}

#[test]
fn invalid_use_of_barriers_is_a_fault() {
    let uneven = fault(
        ".reg .pred %p;
        setp.lt.u32 %p, %tid, 32;
        @%p bar.arrive 1, 64;
        @!%p bar.sync 1, 96;",
        64,
    );
    assert!(matches!(uneven, Fault::Barrier(_)), "{uneven}");
    let absent = fault(
        ".shared .align 8 .b64 barrier; .reg .pred %p;
        mbarrier.try_wait.parity.shared.b64 %p, [barrier], 0;",
        1,
    );
    assert!(matches!(absent, Fault::Barrier(_)), "{absent}");
}

#[test]
fn trap_ends_the_launch() {
    assert_eq!(fault("trap;", 1), Fault::Trap);
}

#[test]
fn unsupported_instruction_is_refused_by_name() {
    for (instruction, named) in [
        (
            "tex.2d.v4.f32.s32 {%x, %x, %x, %x}, [%out, {%x, %x}];",
            "tex",
        ),
        ("cvt.rn.satfinite.e4m3x2.f32 %h, %x, %x;", "cvt"),
        ("add.cc.u32 %x, %x, %x;", ".cc"),
        ("div.rm.f32 %x, %x, %x;", "div"),
        (
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%x, %x, %x, %x}, {%x, %x, %x, %x}, {%x, %x}, {%x, %x, %x, %x};",
            "mma",
        ),
        ("ld.acquire.cta.shared.u32 %x, [%x];", "acquire"),
        ("barrier.cluster.arrive;", "barrier"),
        ("call f;", "call"),
    ] {
        let body = format!(".reg .b32 %x; .reg .b16 %h; {instruction}");
        let source = Kernel::new(&body, 1).source();
        let refused = Module::parse(&source).unwrap_err().to_string();
        assert!(refused.contains(named), "{refused}");
        assert!(refused.contains("kernel"), "{refused}");
    }
}
