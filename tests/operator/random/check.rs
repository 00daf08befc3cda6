//! The check of a random problem on a device: against the definition, and twice the same bits.

use super::{Problem, Sizes, variant};
use crate::case::seed;
use crate::compare::Named;
use crate::definition::Definition;
use crate::devices::{TestDevice, devices};
use crate::run::Operator;
use attention_cube::plan::{DeviceProfile, Kernel, wgmma};
use attention_cube::{AttentionOptions, AttentionProblem, explain, fused_attention};
use burn::tensor::{DType, Device, Tensor};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Problems of one variant, one number after the other: kernels take longer to compile than to run.
pub fn bundle(sizes: Sizes) -> u64 {
    match sizes {
        Sizes::Small => 1,
        Sizes::Every => 25,
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
            if !target.device.supports(case.dtype) {
                continue;
            }
            let run = || case.run(&drawn.given, device, case.dtype, Operator::Fused);
            let first = run();
            target.dirty();
            let repeat = differences(&first, &run());
            let settled = drawn.settle(case, first, definition.exact());
            let wrong = definition.random_faults(&settled).into_iter().chain(repeat);
            faults.extend(wrong.map(|fault| format!("{name}: {fault}")));
        }
        match faults.is_empty() {
            true => Ok(()),
            false => Err(faults.join("; ")),
        }
    }

    /// Which kernels serve it on a device, roughly, for a count of what was covered.
    ///
    /// # Panics
    /// Where the case is no problem.
    pub fn kernels(&self, target: &Target) -> Vec<String> {
        let Self { case, data } = self;
        let inputs = data.draw(case).given;
        let problem = case
            .problem(&inputs, &Device::flex())
            .unwrap_or_else(|error| panic!("{case:?}: {error}"));
        let explanation = explain(&problem, &target.device.device);
        let width = format!("{} {}/{}", case.dtype.name(), case.head_dim, case.value_dim);
        let boxes = case.layouts[..3]
            .iter()
            .all(|layout| super::BOXES.contains(layout));
        let how = match explanation.forward.kernel {
            // What is said is said of contiguous inputs.
            _ if !boxes => "rows that no box brings".into(),
            Kernel::Wgmma(wgmma::WgmmaPlan::Forward(plan)) => {
                let wgmma::ForwardPlan {
                    tiles,
                    heads,
                    splits,
                    residence,
                    ..
                } = plan;
                let mut how = match tiles {
                    wgmma::ForwardTiles::Rows(_) => String::from("wgmma by rows"),
                    wgmma::ForwardTiles::Columns(_) => String::from("wgmma by columns"),
                };
                for (is_so, what) in [
                    (heads > 1, ", heads share a tile"),
                    (splits > 1, ", keys are split"),
                    (residence != wgmma::Residence::Leaves, ", cubes stay"),
                ] {
                    how += if is_so { what } else { "" };
                }
                how
            }
            kernel => format!("{:?}", kernel.engine()).to_lowercase(),
        };
        vec![width, how]
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
