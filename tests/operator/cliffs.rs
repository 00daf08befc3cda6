//! Tests of the kernel plans for layouts and shapes that once ran ten times slower than similar layouts and shapes.

use crate::case::Case;
use crate::dense::read;
use crate::devices::devices;
use attention_cube::internals::Side;
use attention_cube::internals::device::{DeviceProfile, Feature, FragmentSupport};
use attention_cube::internals::engine::portable::common::plan::GradientKernel;
use attention_cube::internals::engine::tensor_core::wgmma::plan::{Scheduler, WgmmaGradientTiles};
use attention_cube::internals::engine::tiling::BackwardTiles;
use attention_cube::internals::engine::{BackwardKernel, Engine, ForwardKernel, Kernel};
use attention_cube::internals::select::{
    BackwardRequest, Layouts, Operands, Pass, Selection, select,
};
use attention_cube::{AttentionOptions, AttentionProblem, CausalAlignment, attention_with_lse};
use burn::tensor::{DType, Device, Tensor};

pub(crate) fn problem([batch, heads, length, width]: [usize; 4]) -> AttentionProblem {
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

/// Returns the device properties of an H200. Engines plan kernels from these properties.
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
        disabled_engines: vec![],
        not_built: vec![],
    }
}

pub(crate) fn chosen(problem: &AttentionProblem, device: &DeviceProfile, pass: Pass) -> Selection {
    select(problem, Some(device), Layouts::contiguous(problem), pass)
}

/// Checks that wgmma, the fastest engine, also serves inputs whose rows do not start at multiples of 16 bytes.
#[test]
fn plan_unaligned_head_dim_selects_wgmma() {
    for width in [9, 12, 33, 90, 100, 104, 250, 511] {
        for pass in [Pass::Forward, Pass::Backward] {
            let selection = chosen(&problem([4, 16, 2048, width]), &hopper(), pass);
            let engine = selection.kernel.engine();
            assert_eq!(engine, Engine::Wgmma, "{width}, {pass:?}: {selection:?}");
            // If the head size is not a multiple of 8, the operator first copies the inputs, so that the rows of the
            // copies are aligned. The plan lists the inputs that the operator copies.
            let are_copied = !width.is_multiple_of(8);
            let copies = format!("query: {are_copied}, key: {are_copied}, value: {are_copied}");
            let plan = format!("{selection:?}");
            assert!(plan.contains(&copies), "{width}, {pass:?}: {plan}");
        }
    }
}

/// Checks that head sizes below 8 run on the unit engine. The other engines round the probabilities P to half
/// precision. At such small head sizes, this rounding would cause most of their error.
#[test]
fn plan_head_dim_below_eight_selects_unit() {
    for width in [1, 4, 7] {
        for pass in [Pass::Forward, Pass::Backward] {
            let selection = chosen(&problem([4, 16, 2048, width]), &hopper(), pass);
            assert_eq!(selection.kernel.engine(), Engine::Unit, "{selection:?}");
        }
    }
}

/// Checks that wgmma, the fastest engine, also serves broadcast queries, which have a stride of 0. TMA cannot load a
/// stride of 0, so the plan copies the queries. The plan copies no other input.
#[test]
fn plan_broadcast_queries_copies_queries_only() {
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

/// Checks the scheduler that a plan selects. With segments, some tiles take longer than others, so the plan lets each
/// persistent CTA fetch its next tile dynamically. Problems without segments or with few queries keep a static
/// schedule. With lengths of queries, many tiles are empty, so no CTA should start for one tile.
#[test]
fn plan_packed_segments_selects_dynamic_scheduler() {
    let plain = AttentionProblem {
        causal: Some(CausalAlignment::BottomRight),
        ..problem([1, 8, 65_536, 128])
    };
    let packed = AttentionProblem {
        segments: true,
        ..plain.clone()
    };
    let ragged = AttentionProblem {
        query_lengths: true,
        ..plain.clone()
    };
    let few = AttentionProblem {
        q_len: 2,
        ..packed.clone()
    };
    for (problem, expected) in [
        (plain, Scheduler::StaticPersistentPairs(132)),
        (packed, Scheduler::DynamicPersistent(132)),
        (ragged, Scheduler::StaticPersistent(132)),
        (few, Scheduler::SingleTile),
    ] {
        let selection = chosen(&problem, &hopper(), Pass::Forward);
        let Kernel::Forward(ForwardKernel::Wgmma(plan)) = selection.kernel else {
            panic!("{selection:?}");
        };
        assert_eq!(plan.scheduler, expected, "{problem:?}");
    }
}

/// Checks that on a software driver, the unit engine computes the gradient of a broadcast bias. Such a driver silently
/// ends a loop that is too long. The plan therefore divides the sum over the broadcast dimensions among many units
/// (threads).
#[test]
fn plan_broadcast_bias_on_software_driver_selects_unit() {
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

/// Checks the gradient of a bias that is constant over the keys. This gradient is the sum of the scores' gradients over the
/// keys.
#[test]
fn bias_gradient_constant_over_keys_matches_reference() {
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
    table: false,
    lse_of_all_shards: false,
};

fn asking([query, key, value]: [bool; 3]) -> BackwardRequest {
    BackwardRequest {
        query,
        key,
        value,
        ..NOTHING
    }
}

/// Returns all eight combinations in which each of query, key and value is trained (true) or frozen (false).
fn choices() -> impl Iterator<Item = [bool; 3]> {
    (0..8).map(|bits| [0, 1, 2].map(|index| bits >> index & 1 == 1))
}

/// Checks that the wgmma backward launches no kernel that computes only gradients of frozen inputs.
#[test]
fn hopper_backward_launches_only_requested_gradients() {
    for width in [64, 128, 192, 256, 512] {
        let selection = chosen(&problem([4, 16, 2048, width]), &hopper(), Pass::Backward);
        let Kernel::Backward(BackwardKernel::Wgmma(plan)) = selection.kernel else {
            panic!("{width}: {selection:?}");
        };
        for [query, key, value] in choices() {
            let kernels = plan.kernels(asking([query, key, value]));
            let gives = |side: Side, is_given: fn(&WgmmaGradientTiles) -> bool| {
                let of_side = |tiles: &&WgmmaGradientTiles| tiles.side() == side;
                kernels.iter().filter(of_side).any(is_given)
            };
            let context = format!("{width}, {query}, {key}, {value}: {kernels:?}");
            assert_eq!(gives(Side::Queries, |_| true), query, "{context}");
            // For head sizes up to 128, one kernel computes the gradients of keys and values together.
            let both = width <= 128 && (key || value);
            let keys = gives(Side::Keys, |tiles| tiles.sums().has_q_or_k());
            assert_eq!(keys, key || both, "{context}");
            let values = gives(Side::Keys, |tiles| tiles.sums().has_values());
            assert_eq!(values, value || both, "{context}");
        }
    }
}

/// Checks that the unit backward launches no kernel that computes only gradients of frozen inputs.
#[test]
fn unit_backward_launches_only_requested_gradients() {
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
                    let parts = plan
                        .parts
                        .expect("the plan of a software driver has one kernel for all gradients");
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

/// Checks that a trained input gets the same gradient whether the other inputs are trained or frozen, and that a frozen input
/// gets no gradient.
#[test]
fn backward_frozen_inputs_get_no_gradient() {
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
