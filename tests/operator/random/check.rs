//! The check of a random problem on a device: the results must match the reference, and two runs must give equal bits.

use super::{BOXES, Problem, Sizes, variant};
use crate::case::{Case, Extent, seed};
use crate::cliffs::hopper;
use crate::compare::Named;
use crate::definition::Definition;
use crate::devices::{TestDevice, devices};
use crate::run::Operator;
use attention_cube::internals::device::Fragments;
use attention_cube::internals::device::{DeviceProfile, Feature, FragmentSupport};
use attention_cube::internals::engine::tensor_core::{mma, wgmma};
use attention_cube::internals::engine::{ForwardKernel, Kernel};
use attention_cube::internals::select::{Layouts, Pass, select};
use attention_cube::{AttentionOptions, AttentionProblem, Dropout, explain, fused_attention};
use burn::tensor::{DType, Tensor};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::collections::{BTreeMap, BTreeSet};

/// Returns the number of consecutive problems with the same variant. A variant determines the compiled kernels. Compiling
/// takes longer than running, so several problems share a variant.
pub fn bundle(sizes: Sizes) -> u64 {
    match sizes {
        Sizes::Small => 1,
        Sizes::Every => 40,
    }
}

/// Returns a proptest runner whose random numbers depend only on the arguments and on `ATTENTION_TEST_SEED`.
fn runner(what: u64, number: u64, config: Config) -> TestRunner {
    let mut bytes = [0; 32];
    for (place, part) in bytes.chunks_mut(8).zip([seed(), what, number]) {
        place.copy_from_slice(&part.to_le_bytes());
    }
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// Returns the proptest runner and the value tree of the problem `number`, which together can shrink the problem. The runner
/// and the value tree depend only on `number`, `sizes` and `ATTENTION_TEST_SEED`.
pub fn numbered(
    sizes: Sizes,
    number: u64,
    config: Config,
) -> (TestRunner, impl ValueTree<Value = Problem>) {
    let variant = variant(sizes)
        .new_tree(&mut runner(0, number / bundle(sizes), config.clone()))
        .expect("the strategy filters no value")
        .current();
    let mut runner = runner(1, number, config);
    let tree = variant.problem().new_tree(&mut runner);
    (runner, tree.expect("the strategy filters no value"))
}

/// A device under test, with the device properties from which the engines plan kernels.
pub struct Target {
    /// The device under test.
    pub device: TestDevice,
    profile: Option<DeviceProfile>,
}

impl Target {
    /// Returns the devices under test.
    pub fn all() -> Vec<Self> {
        let target = |device: TestDevice| {
            let probe = Tensor::<4>::zeros([1; 4], (&device.device, DType::F32));
            let problem = AttentionProblem::new(&probe, &probe, &probe, &AttentionOptions::new())
                .expect("a problem of size 1 is valid");
            let profile = explain(&problem, &device.device).device;
            Self { device, profile }
        };
        devices().into_iter().map(target).collect()
    }

    /// Writes NaN to memory that later kernels reuse: to buffers, which are then freed, and to the shared memory of every
    /// multiprocessor.
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
    /// Checks output, logsumexp and gradients on each device against the reference. A second run, after other kernels have
    /// written to the device's memory, must give the same bits.
    ///
    /// # Errors
    /// Returns a text that names the wrong results.
    ///
    /// # Panics
    /// Panics if the operator panics.
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
            // The option `kv_lengths_ahead` must not change the results. The option promises that no kernel launch in the
            // same CUDA graph writes the lengths.
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

    /// Returns true if the device supports the problem's dtype.
    pub fn is_served(&self, target: &Target) -> bool {
        target.device.supports(self.case.dtype)
    }

    /// Returns two kinds to which the problem counts in the statistics of the test. The first kind is the dtype with
    /// the head sizes. The second kind is the kernel of the forward.
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

/// Returns a name for the kernel that runs the forward of `case` on a device.
fn way(case: &Case, device: Option<&DeviceProfile>) -> String {
    if !case.layouts[..3]
        .iter()
        .all(|layout| BOXES.contains(layout))
    {
        // TMA cannot load rows in a layout outside of `BOXES`. The choice of the kernel then depends on the addresses
        // of the rows, which this function does not know.
        return "rows that TMA cannot load".into();
    }
    let problem = problem(case);
    let layouts = Layouts::contiguous(&problem);
    let kernel = select(&problem, device, layouts, Pass::Forward).kernel;
    let engine = kernel.engine();
    let (tiles, heads, splits, stay) = match kernel {
        Kernel::Forward(ForwardKernel::Wgmma(plan)) => {
            let tiles = match plan.tiles {
                wgmma::plan::WgmmaForwardTiles::SplitM(_) => "split-M",
                wgmma::plan::WgmmaForwardTiles::SplitD(_) => "split-D",
            };
            let stay = plan.scheduler != wgmma::plan::Scheduler::SingleTile;
            (tiles, plan.heads, plan.splits, stay)
        }
        Kernel::Forward(ForwardKernel::Mma(plan)) => {
            let tiles = match plan.tiles {
                mma::plan::MmaForwardTiles::SplitM(_) => "split-M",
                mma::plan::MmaForwardTiles::SplitN(_) => "split-N",
                mma::plan::MmaForwardTiles::SplitD(_) => "split-D",
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

/// Returns the attention problem of `case`, from which the engines plan kernels.
fn problem(case: &Case) -> AttentionProblem {
    let scores = case.scores();
    let (score_mod, mask_mod) = case.code();
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
        mask: case.mask.map(|extent| {
            let [queries, keys] = case.mask_block.unwrap_or([1, 1]);
            let [batch, heads, rows, columns] = shape(extent);
            [batch, heads, rows.div_ceil(queries), columns.div_ceil(keys)]
        }),
        mask_block: case.mask_block.unwrap_or([1, 1]),
        bias: case.bias.map(|extent| (shape(extent), case.extras_dtype())),
        kv_lengths: case.kv_lengths.is_some(),
        kv_lengths_ahead: false,
        query_lengths: case.query_lengths.is_some(),
        segments: case.segments.is_some(),
        intervals: case.intervals.len(),
        sinks: case.sinks.then(|| case.extras_dtype()),
        dropout: case
            .dropout
            .map(|(probability, seed)| Dropout { probability, seed }),
        score_mod,
        mask_mod,
        page_len: None,
        quantized: None,
    }
}

/// Returns a text that names the results whose bits differ between two runs, or `None` if no bits differ.
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

/// Checks that the problems drawn for [`Sizes::Every`] reach each engine of GPUs without Hopper's instructions: mma, cmma and
/// unit.
#[test]
fn random_problems_reach_every_engine() {
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
                emulation: None,
            }],
            plane_sizes: (32, 32),
            fault: None,
            verdicts: None,
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
        assert!(ways.contains(&way), "{way} is missing from {ways:?}");
    }
}

/// Checks that the problems drawn for [`Sizes::Every`] reach every row of the wgmma tile tables, and every variant of
/// the kernels that use these tiles.
#[test]
fn random_problems_reach_every_wgmma_kernel() {
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
            assert!(
                ways.contains_key(&way),
                "{way} is missing from {:?}",
                ways.keys()
            );
        }
        for width in widths {
            let stay = format!("wgmma {tiles}, cubes stay");
            let mut drawn = ways.get(&stay).into_iter().flatten();
            assert!(
                drawn.any(|[head_dim, _]| *head_dim == width),
                "head size {width} is missing from {ways:?}"
            );
        }
    }
}
