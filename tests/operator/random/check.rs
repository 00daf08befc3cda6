//! The check of a random problem on a device: against the definition, and twice the same bits.

use super::{BOXES, Problem, Sizes, variant};
use crate::case::{Case, Extent, seed};
use crate::cliffs::hopper;
use crate::compare::Named;
use crate::definition::Definition;
use crate::devices::{TestDevice, devices};
use crate::run::Operator;
use attention_cube::device::{DeviceProfile, Feature, FragmentSupport};
use attention_cube::engine::{ForwardKernel, Kernel, mma, wgmma};
use attention_cube::select::{Layouts, Pass, select};
use attention_cube::tile::fragment_tiles::Fragments;
use attention_cube::{AttentionOptions, AttentionProblem, explain, fused_attention};
use burn::tensor::{DType, Tensor};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::collections::{BTreeMap, BTreeSet};

/// Problems of one variant, one number after the other: kernels take longer to compile than to run.
pub fn bundle(sizes: Sizes) -> u64 {
    match sizes {
        Sizes::Small => 1,
        Sizes::Every => 40,
    }
}

/// A runner whose numbers are a function of these and of `ATTENTION_TEST_SEED`.
fn runner(what: u64, number: u64, config: Config) -> TestRunner {
    let mut bytes = [0; 32];
    for (place, part) in bytes.chunks_mut(8).zip([seed(), what, number]) {
        place.copy_from_slice(&part.to_le_bytes());
    }
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// The problem of this number and what shrinks it: a function of it, of `sizes` and of `ATTENTION_TEST_SEED`.
pub fn numbered(
    sizes: Sizes,
    number: u64,
    config: Config,
) -> (TestRunner, impl ValueTree<Value = Problem>) {
    let variant = variant(sizes)
        .new_tree(&mut runner(0, number / bundle(sizes), config.clone()))
        .expect("nothing is filtered")
        .current();
    let mut runner = runner(1, number, config);
    let tree = variant.problem().new_tree(&mut runner);
    (runner, tree.expect("nothing is filtered"))
}

/// A device that problems are checked on.
pub struct Target {
    /// The device.
    pub device: TestDevice,
    profile: Option<DeviceProfile>,
}

impl Target {
    /// The devices under test.
    pub fn all() -> Vec<Self> {
        let target = |device: TestDevice| {
            let probe = Tensor::<4>::zeros([1; 4], (&device.device, DType::F32));
            let problem = AttentionProblem::new(&probe, &probe, &probe, &AttentionOptions::new())
                .expect("a problem of size 1");
            let profile = explain(&problem, &device.device).device;
            Self { device, profile }
        };
        devices().into_iter().map(target).collect()
    }

    /// Leaves NaN where kernels work: in buffers that are free again, and in all of every multiprocessor's shared memory.
    fn dirty(&self) {
        let Some(profile) = &self.profile else {
            return;
        };
        let (cubes, width) = match profile.processors {
            Some(processors) => (2 * processors, 32),
            None => (2 * profile.multiprocessors.unwrap_or(64), 512),
        };
        let dtype = match profile.dtypes.contains(&DType::BF16) {
            true => DType::BF16,
            false => DType::F32,
        };
        let nan = || {
            Tensor::<4>::full(
                [1, cubes, 64, width],
                f32::NAN,
                (&self.device.device, dtype),
            )
        };
        drop(fused_attention(
            nan(),
            nan(),
            nan(),
            AttentionOptions::new(),
        ));
        let done = self.device.device.sync();
        done.unwrap_or_else(|error| panic!("{}: {error:?}", self.device.name));
    }
}

impl Problem {
    /// Checks output, logsumexp and gradients, and that a second run gives the same bits after other kernels have been at
    /// the device's memory.
    ///
    /// # Errors
    /// What is wrong.
    ///
    /// # Panics
    /// Where the operator does.
    pub fn check(&self, targets: &[Target]) -> Result<(), String> {
        let Self { case, data } = self;
        let drawn = data.draw(case);
        let definition = Definition::new(case, &drawn.clean);
        let mut faults = Vec::new();
        for target in targets {
            let TestDevice { name, device } = &target.device;
            if !self.is_served(target) {
                continue;
            }
            let run = || case.run(&drawn.given, device, case.dtype, Operator::Fused);
            let first = run();
            target.dirty();
            let repeat = differences(&first, &run());
            // Lengths that are there ahead are the same lengths.
            let ahead = case.kv_lengths.as_ref().and_then(|_| {
                differences(&first, &case.run_ahead(&drawn.given, device))
                    .map(|found| format!("lengths ahead: {found}"))
            });
            let settled = drawn.settle(case, first, definition.exact());
            let wrong = definition.random_faults(&settled);
            let wrong = wrong.into_iter().chain(repeat).chain(ahead);
            faults.extend(wrong.map(|fault| format!("{name}: {fault}")));
        }
        match faults.is_empty() {
            true => Ok(()),
            false => Err(faults.join("; ")),
        }
    }

    /// Whether the device has its dtype.
    pub fn is_served(&self, target: &Target) -> bool {
        target.device.supports(self.case.dtype)
    }

    /// Its dtype and sizes, and the way of its forward, for a count of what was covered.
    pub fn kinds(&self, target: &Target) -> [String; 2] {
        let Case {
            dtype,
            head_dim,
            value_dim,
            ..
        } = self.case;
        let sizes = format!("{} {head_dim}/{value_dim}", dtype.name());
        [sizes, way(&self.case, target.profile.as_ref())]
    }
}

/// How the forward of `case` is done on a device.
fn way(case: &Case, device: Option<&DeviceProfile>) -> String {
    if !case.layouts[..3]
        .iter()
        .all(|layout| BOXES.contains(layout))
    {
        // The choice depends on where rows start.
        return "rows that no box brings".into();
    }
    let problem = problem(case);
    let layouts = Layouts::contiguous(&problem);
    let kernel = select(&problem, device, layouts, Pass::Forward).kernel;
    let engine = kernel.engine();
    let (tiles, heads, splits, stay) = match kernel {
        Kernel::Forward(ForwardKernel::Wgmma(plan)) => {
            let tiles = match plan.tiles {
                wgmma::plan::ForwardTiles::SplitM(_) => "split-M",
                wgmma::plan::ForwardTiles::SplitD(_) => "split-D",
            };
            let stay = plan.scheduler != wgmma::plan::Scheduler::SingleTile;
            (tiles, plan.heads, plan.splits, stay)
        }
        Kernel::Forward(ForwardKernel::Mma(plan)) => {
            let tiles = match plan.tiles {
                mma::plan::ForwardTiles::SplitM(_) => "split-M",
                mma::plan::ForwardTiles::SplitN(_) => "split-N",
                mma::plan::ForwardTiles::SplitD(_) => "split-D",
            };
            (tiles, plan.heads, plan.splits, false)
        }
        _ => return engine.to_string(),
    };
    let particulars = [
        (heads > 1, ", heads share a tile"),
        (splits > 1, ", keys are split"),
        (stay, ", cubes stay"),
    ];
    let particulars = particulars.into_iter().filter(|(is_so, _)| *is_so);
    let particulars: String = particulars.map(|(_, what)| what).collect();
    format!("{engine} {tiles}{particulars}")
}

/// What a choice of kernels depends on.
fn problem(case: &Case) -> AttentionProblem {
    let scores = case.scores();
    let shape = |extent: Extent| {
        [0, 1, 2, 3].map(|dim| match extent[dim] || case.expanded {
            true => scores[dim],
            false => 1,
        })
    };
    AttentionProblem {
        batch: case.batch,
        q_heads: case.q_heads,
        kv_heads: case.kv_heads,
        q_len: case.q_len,
        kv_len: case.kv_len,
        head_dim: case.head_dim,
        value_dim: case.value_dim,
        dtype: case.dtype,
        scale: case.scale.unwrap_or(1.0),
        softcap: case.softcap,
        causal: case.causal,
        window_left: case.window.0,
        window_right: case.window.1,
        mask: case.mask.map(shape),
        bias: case.bias.map(|extent| (shape(extent), case.extras_dtype())),
        kv_lengths: case.kv_lengths.is_some(),
        kv_lengths_ahead: false,
        segments: case.segments.is_some(),
        sinks: case.sinks.then(|| case.extras_dtype()),
        deterministic: case.deterministic,
        quantized: false,
    }
}

/// Which results are not the same bit by bit.
fn differences(first: &[Named], second: &[Named]) -> Option<String> {
    let same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let different = |(first, second): (&Named, &Named)| {
        let pairs = || first.values.iter().zip(&second.values);
        let count = pairs().filter(|pair| !same(*pair)).count();
        let (index, (a, b)) = pairs().enumerate().find(|(_, pair)| !same(*pair))?;
        let (name, all) = (first.name, first.values.len());
        Some(format!(
            "{count} of {all} of {name}, first [{index}]: {a} and {b}"
        ))
    };
    let found: Vec<_> = first.iter().zip(second).filter_map(different).collect();
    (!found.is_empty()).then(|| format!("two runs differ: {}", found.join(", ")))
}

/// Problems drawn for cards reach the engines of cards without Hopper's instructions as well.
#[test]
fn every_engine_is_drawn() {
    let mut ways = BTreeSet::new();
    let ampere = DeviceProfile {
        shared_memory: 163 << 10,
        features: [DType::F16, DType::BF16]
            .into_iter()
            .flat_map(|dtype| [Feature::Mma(dtype), Feature::LoadMatrix(dtype)])
            .chain([Feature::CopyAsync])
            .collect(),
        ..hopper()
    };
    let plain = DeviceProfile {
        shared_memory: 48 << 10,
        bindings: 16,
        features: vec![],
        ..hopper()
    };
    let fragments = DeviceProfile {
        fragments: FragmentSupport {
            kinds: vec![Fragments {
                m: 16,
                n: 16,
                k: 16,
                dtype: DType::F16,
                emulated: false,
            }],
            plane_sizes: (32, 32),
            fault: None,
        },
        ..plain.clone()
    };
    let cards = [ampere, fragments, plain];
    for variant in 0..200 {
        let number = variant * bundle(Sizes::Every);
        let case = numbered(Sizes::Every, number, Config::default())
            .1
            .current()
            .case;
        ways.extend(cards.iter().map(|card| way(&case, Some(card))));
    }
    let of_mma = ["split-M", "split-N", "split-D"].map(|tiles| format!("mma {tiles}"));
    for way in of_mma.into_iter().chain(["cmma".into(), "unit".into()]) {
        assert!(ways.contains(&way), "no {way} in {ways:?}");
    }
}

/// What is drawn for cards has every row of the tile tables, and every way that tiles have there.
#[test]
fn every_way_is_drawn() {
    let h200 = hopper();
    let mut ways: BTreeMap<String, Vec<[usize; 2]>> = BTreeMap::new();
    for variant in 0..400 {
        let number = variant * bundle(Sizes::Every);
        let case = numbered(Sizes::Every, number, Config::default())
            .1
            .current()
            .case;
        let widths = [case.head_dim, case.value_dim];
        ways.entry(way(&case, Some(&h200)))
            .or_default()
            .push(widths);
    }
    let of_every_kind = [
        "",
        ", heads share a tile",
        ", keys are split",
        ", cubes stay",
    ];
    for (tiles, widths) in [
        ("split-M", [64, 128, 192, 256]),
        ("split-D", [320, 384, 512, 576]),
    ] {
        for particular in of_every_kind {
            let way = format!("wgmma {tiles}{particular}");
            assert!(ways.contains_key(&way), "no {way}: {:?}", ways.keys());
        }
        for width in widths {
            let stay = format!("wgmma {tiles}, cubes stay");
            let mut drawn = ways.get(&stay).into_iter().flatten();
            assert!(
                drawn.any(|[head_dim, _]| *head_dim == width),
                "no {width} in {ways:?}"
            );
        }
    }
}
