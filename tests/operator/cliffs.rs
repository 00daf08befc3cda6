//! No layout and no shape costs ten times what its neighbour does: what is planned for those that once did.

use attention_cube::plan::{DeviceProfile, Engine, Layouts, Pass, Selection, select};
use attention_cube::{AttentionOptions, AttentionProblem};
use burn::tensor::{DType, Device, Tensor};

fn problem([batch, heads, length, width]: [usize; 4]) -> AttentionProblem {
    let zeros = Tensor::<4>::zeros([1, 1, 1, width], (&Device::flex(), DType::F32));
    let problem = AttentionProblem::new(&zeros, &zeros, &zeros, &AttentionOptions::new())
        .unwrap_or_else(|error| panic!("{width}: {error}"));
    AttentionProblem {
        batch,
        q_heads: heads,
        kv_heads: heads,
        q_len: length,
        kv_len: length,
        dtype: DType::BF16,
        ..problem
    }
}

/// An H200.
fn hopper() -> DeviceProfile {
    DeviceProfile {
        name: "fabricated".into(),
        dtypes: vec![DType::F32, DType::F16, DType::BF16],
        shared_memory: 232_448,
        units_per_cube: 1024,
        bindings: 1024,
        cube_count: u32::MAX >> 1,
        processors: None,
        multiprocessors: Some(132),
        hopper: true,
    }
}

fn chosen(problem: &AttentionProblem, device: &DeviceProfile, pass: Pass) -> Selection {
    select(problem, Some(device), Layouts::contiguous(problem), pass)
}

/// Rows that do not start at multiples of 16 bytes stay with the fastest engine.
#[test]
fn every_width_is_hoppers() {
    for width in [1, 4, 33, 90, 100, 104, 250, 511] {
        for pass in [Pass::Forward, Pass::Backward] {
            let selection = chosen(&problem([4, 16, 2048, width]), &hopper(), pass);
            let engine = selection.kernel.engine();
            assert_eq!(engine, Engine::Wgmma, "{width}, {pass:?}: {selection:?}");
        }
    }
}

/// What no unit should sum alone is summed by many: a software driver, which ends loops that are too long, is asked for none.
#[test]
fn a_narrow_bias_is_summed_by_many() {
    let software = DeviceProfile {
        processors: Some(2),
        multiprocessors: None,
        hopper: false,
        ..hopper()
    };
    for shape in [
        [1, 1, 1, 1],
        [1, 16, 1, 1],
        [16, 1, 1, 1],
        [1, 1, 1, 2048],
        [1, 16, 1, 2048],
        [1, 1, 2048, 1],
    ] {
        let problem = AttentionProblem {
            bias: Some((shape, DType::F32)),
            dtype: DType::F32,
            ..problem([16, 16, 2048, 64])
        };
        let selection = chosen(&problem, &software, Pass::Backward);
        let engine = selection.kernel.engine();
        assert_eq!(engine, Engine::Unit, "{shape:?}: {selection:?}");
    }
}
