//! No layout and no shape costs ten times what its neighbour does: what is planned for those that once did.

use crate::case::Case;
use crate::dense::read;
use crate::devices::devices;
use attention_cube::device::{DeviceProfile, Feature, FragmentSupport};
use attention_cube::division::HeldTiles;
use attention_cube::engine::{
    BackwardKernel, Engine, ForwardKernel, Kernel,
    wgmma::plan::{GradientTiles, Scheduler},
};
use attention_cube::select::{BackwardRequest, Layouts, Operands, Pass, Selection, select};
use attention_cube::tiled::plan::GradientKernel;
use attention_cube::{
    AttentionOptions, AttentionProblem, CausalAlignment, Side, attention_with_lse,
};
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
pub(crate) fn hopper() -> DeviceProfile {
    DeviceProfile {
        name: "fabricated".into(),
        dtypes: vec![DType::F32, DType::F16, DType::BF16],
        shared_memory: 232_448,
        units_per_cube: 1024,
        bindings: 1024,
        cube_count: u32::MAX >> 1,
        processors: None,
        multiprocessors: Some(132),
        features: vec![Feature::Wgmma, Feature::Tma],
        largest_buffer: 1 << 30,
        fragments: FragmentSupport::default(),
        left_out: vec![],
        not_built: vec![],
    }
}

fn chosen(problem: &AttentionProblem, device: &DeviceProfile, pass: Pass) -> Selection {
    select(problem, Some(device), Layouts::contiguous(problem), pass)
}

/// Rows that do not start at multiples of 16 bytes stay with the fastest engine.
#[test]
fn every_width_is_hoppers() {
    for width in [9, 12, 33, 90, 100, 104, 250, 511] {
        for pass in [Pass::Forward, Pass::Backward] {
            let selection = chosen(&problem([4, 16, 2048, width]), &hopper(), pass);
            let engine = selection.kernel.engine();
            assert_eq!(engine, Engine::Wgmma, "{width}, {pass:?}: {selection:?}");
            // Which operands are copied is said.
            let are_copied = !width.is_multiple_of(8);
            let copies = format!("query: {are_copied}, key: {are_copied}, value: {are_copied}");
            let plan = format!("{selection:?}");
            assert!(plan.contains(&copies), "{width}, {pass:?}: {plan}");
        }
    }
}

/// But for a few columns, where half precision is not enough for probabilities.
#[test]
fn a_few_columns_are_for_units() {
    for width in [1, 4, 7] {
        for pass in [Pass::Forward, Pass::Backward] {
            let selection = chosen(&problem([4, 16, 2048, width]), &hopper(), pass);
            assert_eq!(selection.kernel.engine(), Engine::Unit, "{selection:?}");
        }
    }
}

/// So do queries that repeat with a stride of 0; and nothing is copied but those.
#[test]
fn what_lies_badly_is_copied_alone() {
    let problem = problem([4, 16, 2048, 128]);
    let layouts = Layouts {
        tma: Operands {
            query: false,
            ..Operands::ALL
        },
        ..Layouts::contiguous(&problem)
    };
    let expected = Operands {
        query: true,
        ..Operands::default()
    };
    for pass in [Pass::Forward, Pass::Backward] {
        let selection = select(&problem, Some(&hopper()), layouts, pass);
        let copies = match &selection.kernel {
            Kernel::Forward(ForwardKernel::Wgmma(plan)) => plan.copies,
            Kernel::Backward(BackwardKernel::Wgmma(plan)) => plan.copies,
            kernel => panic!("{kernel:?}"),
        };
        assert_eq!(copies, expected, "{pass:?}");
    }
}

/// Where documents make tiles differ, cubes stay, and each takes the next tile; the others' tiles come as they did.
#[test]
fn packed_documents_are_taken_tile_by_tile() {
    let plain = AttentionProblem {
        causal: Some(CausalAlignment::BottomRight),
        ..problem([1, 8, 65_536, 128])
    };
    let packed = AttentionProblem {
        segments: true,
        ..plain.clone()
    };
    let few = AttentionProblem {
        q_len: 2,
        ..packed.clone()
    };
    for (problem, expected) in [
        (plain, Scheduler::StaticPersistentPairs(132)),
        (packed, Scheduler::DynamicPersistent(132)),
        (few, Scheduler::SingleTile),
    ] {
        let selection = chosen(&problem, &hopper(), Pass::Forward);
        let Kernel::Forward(ForwardKernel::Wgmma(plan)) = selection.kernel else {
            panic!("{selection:?}");
        };
        assert_eq!(plan.scheduler, expected, "{problem:?}");
    }
}

/// What no unit should sum alone is summed by many: a software driver, which ends loops that are too long, is asked for none.
#[test]
fn a_narrow_bias_is_summed_by_many() {
    let software = DeviceProfile {
        processors: Some(2),
        multiprocessors: None,
        features: vec![],
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

/// A bias that is the same for all keys has the gradient that the scores give, with sinks and without, where queries see nothing, too.
#[test]
fn constant_biases() {
    for extent in [
        [false; 4],
        [false, true, false, false],
        [true, false, true, false],
        [true, true, true, false],
    ] {
        for sinks in [false, true] {
            Case {
                bias: Some(extent),
                sinks,
                softcap: Some(3.0),
                kv_lengths: Some(vec![30, 0]),
                ..Case::new([2, 4, 2, 66, 40, 16, 16])
            }
            .check();
        }
    }
}

const NOTHING: BackwardRequest = BackwardRequest {
    query: false,
    key: false,
    value: false,
    bias: false,
    sinks: false,
};

fn asking([query, key, value]: [bool; 3]) -> BackwardRequest {
    BackwardRequest {
        query,
        key,
        value,
        ..NOTHING
    }
}

/// Every choice of query, keys and values.
fn choices() -> impl Iterator<Item = [bool; 3]> {
    (0..8).map(|bits| [0, 1, 2].map(|index| bits >> index & 1 == 1))
}

/// No kernel runs for what is frozen.
#[test]
fn hopper_launches_what_is_asked_for() {
    for width in [64, 128, 192, 256, 512] {
        let selection = chosen(&problem([4, 16, 2048, width]), &hopper(), Pass::Backward);
        let Kernel::Backward(BackwardKernel::Wgmma(plan)) = selection.kernel else {
            panic!("{width}: {selection:?}");
        };
        for [query, key, value] in choices() {
            let kernels = plan.kernels(asking([query, key, value]));
            let gives = |side: Side, is_given: fn(&GradientTiles) -> bool| {
                let of_side = |tiles: &&GradientTiles| tiles.side() == side;
                kernels.iter().filter(of_side).any(is_given)
            };
            let context = format!("{width}, {query}, {key}, {value}: {kernels:?}");
            assert_eq!(gives(Side::Queries, |_| true), query, "{context}");
            // Up to 128 columns one kernel gives both.
            let both = width <= 128 && (key || value);
            let keys = gives(Side::Keys, |tiles| tiles.sums().has_dots());
            assert_eq!(keys, key || both, "{context}");
            let values = gives(Side::Keys, |tiles| tiles.sums().has_values());
            assert_eq!(values, value || both, "{context}");
        }
    }
}

/// The same with the portable engine, whose kernels of keys give both gradients; a software driver has one for all.
#[test]
fn other_devices_launch_what_is_asked_for() {
    let card = DeviceProfile {
        features: vec![],
        ..hopper()
    };
    let software = DeviceProfile {
        processors: Some(2),
        ..card.clone()
    };
    for (device, are_apart) in [(card, true), (software, false)] {
        let problem = AttentionProblem {
            dtype: DType::F32,
            ..problem([1, 2, 256, 64])
        };
        let selection = chosen(&problem, &device, Pass::Backward);
        let Kernel::Backward(BackwardKernel::Unit(plan)) = selection.kernel else {
            panic!("{selection:?}");
        };
        for [query, key, value] in choices() {
            let kernels = plan.kernels(asking([query, key, value]));
            let expected = match are_apart {
                true => [
                    query.then_some(GradientKernel::Query),
                    (key || value).then_some(GradientKernel::KeyValue),
                ],
                false => {
                    let parts = plan.parts.expect("one kernel for all");
                    let is_launched = query || key || value;
                    [
                        is_launched.then_some(GradientKernel::Together { parts }),
                        None,
                    ]
                }
            };
            let expected: Vec<_> = expected.into_iter().flatten().collect();
            assert_eq!(kernels, expected, "{query}, {key}, {value}");
        }
    }
}

/// What is trained gets the gradient that it gets where all is, and what is frozen gets none.
#[test]
fn frozen_inputs_get_no_gradient() {
    let case = Case {
        causal: Some(CausalAlignment::BottomRight),
        ..Case::new([2, 4, 2, 70, 90, 32, 24])
    };
    let inputs = case.inputs();
    for device in devices() {
        let device_name = device.name;
        let device = device.device.clone().autodiff();
        let tensors = [
            &inputs.query,
            &inputs.key,
            &inputs.value,
            &inputs.output_gradient,
        ]
        .map(|dense| dense.tensor(&device, case.dtype));
        let gradients = |trained: [bool; 3]| {
            let operands = [0, 1, 2].map(|index: usize| match trained[index] {
                true => tensors[index].clone().detach().require_grad(),
                false => tensors[index].clone().detach(),
            });
            let [query, key, value] = operands.clone();
            let (output, lse) =
                attention_with_lse(query, key, value, AttentionOptions::new().causal())
                    .unwrap_or_else(|error| panic!("{case:?}: {error}"));
            let weighed = (output * tensors[3].clone()).sum().cast(DType::F32);
            let gradients = (weighed + lse.sum()).backward();
            operands.map(|operand| operand.grad(&gradients).map(read))
        };
        let all = gradients([true; 3]);
        for trained in choices().filter(|trained| trained.contains(&true)) {
            for (index, gradient) in gradients(trained).into_iter().enumerate() {
                let expected = all[index].clone().filter(|_| trained[index]);
                assert!(gradient == expected, "{device_name}, {trained:?}, {index}");
            }
        }
    }
}
