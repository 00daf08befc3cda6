//! One run of the self-check: the kernels of one pass in the tiles of the call at hand.

use super::compare::check_result;
use super::definition::{Precision, compute};
use super::measure::{compare_times, verdict_of_times};
use super::sample::{Lengths, Sample, causal_problem};
use crate::engine::api::{AttentionEngine, Launch};
use crate::engine::portable::cmma::{Cmma, backward_check, forward_check};
use crate::engine::portable::common::plan::{PortableBackwardPlan, PortableForwardPlan};
use crate::engine::portable::unit::Unit;
use crate::problem::AttentionProblem;
use crate::tile_ops::tiles::UnitTiles;
use crate::types::device::{DeviceProfile, FragmentSupport};
use crate::types::fragment_verdict::{FragmentVerdict, TileCheck};
use crate::types::request::{BackwardRequest, Layouts, Pass};
use crate::types::tensors::{
    AttentionGradients, AttentionInputs, AttentionSaved, MaybeBool, MaybeFloat, MaybeInt,
};
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Shape, TensorData};
use burn_cubecl::{CubeBackend, CubeDevice, tensor::CubeTensor};
use cubecl::client::Client;
use cubecl::dry_run::RealRun;
use cubecl::future::block_on;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The lengths of the problem that is timed.
const TIMED_LENGTHS: Lengths = Lengths {
    q_len: 1024,
    kv_len: 1024,
    q_heads: 8,
    kv_heads: 4,
};

/// The number of keys of the decode step that is timed.
const TIMED_DECODE_KEYS: usize = 4096;

/// The most rows or columns of a fragment.
const WIDEST_FRAGMENT: usize = 16;

/// The gradients that the check computes.
const REQUEST: BackwardRequest = BackwardRequest {
    query: true,
    key: true,
    value: true,
    bias: false,
    sinks: false,
    table: false,
    lse_of_all_shards: false,
};

/// Checks the tiles that a call of `problem` would use. A failed launch or a panic is a refusal.
pub(super) fn check(
    device: &CubeDevice,
    client: &Client,
    profile: &DeviceProfile,
    problem: &AttentionProblem,
    layouts: Layouts,
    tiles: &TileCheck,
) -> FragmentVerdict {
    let run = || {
        // A dry run of CubeCL drops launches, and the results of dropped launches are arbitrary.
        let _real = RealRun::new();
        let check = Check {
            device,
            client,
            // Plans for this profile need no verdict.
            profile: DeviceProfile {
                fragments: FragmentSupport {
                    verdicts: None,
                    ..profile.fragments.clone()
                },
                ..profile.clone()
            },
            problem,
        };
        match tiles.pass {
            Pass::Forward => check.forward(layouts, tiles),
            Pass::Backward => check.backward(layouts, tiles),
        }
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(verdict)) => verdict,
        Ok(Err(reason)) => FragmentVerdict::Refused(reason),
        Err(payload) => FragmentVerdict::Refused(format!(
            "the check of its matrix units panicked: {}",
            panic_text(payload.as_ref())
        )),
    }
}

/// Returns layouts in which wider heads are read in vectors only if the tiles read vectors.
fn same_vectors(layouts: Layouts, tiles: &UnitTiles) -> Layouts {
    Layouts {
        vectors: layouts.vectors && tiles.vector > 1,
        ..layouts
    }
}

/// Returns the message of a panic.
fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message")
}

/// The device under check, and the problem of the call at hand.
struct Check<'a> {
    device: &'a CubeDevice,
    client: &'a Client,
    profile: DeviceProfile,
    problem: &'a AttentionProblem,
}

impl Check<'_> {
    fn forward(&self, layouts: Layouts, tiles: &TileCheck) -> Result<FragmentVerdict, String> {
        // A backward whose operands cannot be read in vectors also asks for the forward that reads vectors.
        let in_vectors = Layouts {
            vectors: true,
            ..layouts
        };
        let planned = [layouts, in_vectors].into_iter().find_map(|layouts| {
            let plan = Cmma::plan_forward(self.problem, &self.profile, layouts).ok()?;
            let is_wanted = forward_check(self.problem, &plan) == *tiles;
            is_wanted.then_some((plan, layouts))
        });
        let (plan, layouts) = planned.ok_or("its matrix units have no plan for this call")?;
        let in_order = same_vectors(layouts, &plan.tiles);
        let problem = self.widened(|problem| {
            let wider = Cmma::plan_forward(problem, &self.profile, in_order);
            wider.is_ok_and(|wider| forward_check(problem, &wider) == *tiles)
        });
        let sample = match plan.packed {
            true => Sample::of_decode(&problem, &plan.tiles),
            false => Sample::of_rows(&problem, plan.tiles.rows, plan.tiles.columns()),
        };
        let inputs = self.inputs(&sample);
        let [exact, rounded] = [Precision::Exact, Precision::Rounded]
            .map(|precision| compute(&sample, precision, false).output);
        // A verdict on decode tiles holds for calls with and without key splits, which are different kernels.
        let most_splits = if plan.packed { 2 } else { 1 };
        for splits in 1..=most_splits {
            let plan = PortableForwardPlan { splits, ..plan };
            let result = Cmma::forward(plan, inputs.clone(), &sample.problem);
            let output = read(result.output)?;
            check_result("output", &output, &exact, &rounded, self.problem.dtype)?;
        }
        self.time_forward(&plan, layouts)
    }

    fn backward(&self, layouts: Layouts, tiles: &TileCheck) -> Result<FragmentVerdict, String> {
        let plan = Cmma::plan_backward(self.problem, &self.profile, layouts);
        let plan = plan.map_err(|refusal| refusal.to_string())?;
        if backward_check(self.problem, &plan) != *tiles {
            return Err("its matrix units have no plan for this call".into());
        }
        let (queries, keys) = (
            plan.query.rows.max(plan.key_value.columns()),
            plan.query.columns().max(plan.key_value.rows),
        );
        let in_order = same_vectors(layouts, &plan.query);
        let problem = self.widened(|problem| {
            let wider = Cmma::plan_backward(problem, &self.profile, in_order);
            wider.is_ok_and(|wider| backward_check(problem, &wider) == *tiles)
        });
        let sample = Sample::of_rows(&problem, queries, keys);
        let plan = PortableBackwardPlan {
            bias: None,
            table: None,
            ..plan
        };
        let inputs = self.inputs(&sample);
        let forward = Cmma::plan_forward(&sample.problem, &self.profile, in_order);
        let forward = forward.map_err(|refusal| refusal.to_string())?;
        let result = Cmma::forward(forward, inputs.clone(), &sample.problem);
        let shape = sample.problem.output_shape();
        let saved = AttentionSaved {
            output: result.output,
            logsumexp: result.logsumexp,
            output_gradient: self.upload(&sample.output_gradient, shape),
            logsumexp_gradient: MaybeFloat::Absent,
        };
        let gradients = Cmma::backward(plan, inputs, saved, &sample.problem, REQUEST);
        let [exact, rounded] = [Precision::Exact, Precision::Rounded]
            .map(|precision| compute(&sample, precision, true));
        let compare =
            |name: &str, gradient: MaybeFloat<CubeBackend>, exact: &[f64], rounded: &[f64]| {
                let gradient = gradient
                    .into_option()
                    .ok_or_else(|| format!("its kernels give no {name}"))?;
                check_result(name, &read(gradient)?, exact, rounded, self.problem.dtype)
            };
        compare(
            "gradient of the query",
            gradients.query,
            &exact.query_gradient,
            &rounded.query_gradient,
        )?;
        compare(
            "gradient of the keys",
            gradients.key,
            &exact.key_gradient,
            &rounded.key_gradient,
        )?;
        compare(
            "gradient of the values",
            gradients.value,
            &exact.value_gradient,
            &rounded.value_gradient,
        )?;
        self.time_backward(layouts)
    }

    /// Returns the problem with wider heads that have the same tiles, by `has_same_tiles`.
    ///
    /// Heads may end within a fragment. The verdict also holds for heads that fill the fragment, so the sample must.
    fn widened(&self, has_same_tiles: impl Fn(&AttentionProblem) -> bool) -> AttentionProblem {
        let problem = self.problem;
        let whole = |dim: usize| dim.next_multiple_of(WIDEST_FRAGMENT);
        let (head_dim, value_dim) = (problem.head_dim, problem.value_dim);
        let sizes = [
            (head_dim.next_power_of_two(), whole(value_dim)),
            (whole(head_dim), whole(value_dim)),
            (whole(head_dim), value_dim),
            (head_dim, whole(value_dim)),
        ];
        let mut wider = sizes
            .into_iter()
            .map(|(head_dim, value_dim)| AttentionProblem {
                head_dim,
                value_dim,
                ..problem.clone()
            });
        wider
            .find(|wider| has_same_tiles(wider))
            .unwrap_or_else(|| problem.clone())
    }

    /// Times the forward beside the unit engine's.
    fn time_forward(
        &self,
        checked: &PortableForwardPlan,
        layouts: Layouts,
    ) -> Result<FragmentVerdict, String> {
        let lengths = match checked.packed {
            true => Lengths {
                q_len: self.problem.q_len,
                kv_len: TIMED_DECODE_KEYS,
                q_heads: TIMED_LENGTHS.kv_heads * self.problem.group(),
                kv_heads: TIMED_LENGTHS.kv_heads,
            },
            false => TIMED_LENGTHS,
        };
        let problem = causal_problem(self.problem, lengths);
        let cmma = Cmma::plan_forward(&problem, &self.profile, layouts);
        let unit = Unit::plan_forward(&problem, &self.profile, layouts);
        let (Ok(cmma), Ok(unit), true) = (cmma, unit, self.is_timed()) else {
            return Ok(FragmentVerdict::Passed {
                speed_percent: None,
            });
        };
        let inputs = self.zeros(&problem);
        let times = compare_times(
            self.client,
            [
                &|| vec![Cmma::forward(cmma, inputs.clone(), &problem).output],
                &|| vec![Unit::forward(unit, inputs.clone(), &problem).output],
            ],
        );
        Ok(verdict_of_times(times?))
    }

    /// Times the backward beside the unit engine's.
    fn time_backward(&self, layouts: Layouts) -> Result<FragmentVerdict, String> {
        let problem = causal_problem(self.problem, TIMED_LENGTHS);
        let cmma = Cmma::plan_backward(&problem, &self.profile, layouts);
        let unit = Unit::plan_backward(&problem, &self.profile, layouts);
        let forward = Cmma::plan_forward(&problem, &self.profile, layouts);
        let (Ok(cmma), Ok(unit), Ok(forward), true) = (cmma, unit, forward, self.is_timed()) else {
            return Ok(FragmentVerdict::Passed {
                speed_percent: None,
            });
        };
        let inputs = self.zeros(&problem);
        let result = Cmma::forward(forward, inputs.clone(), &problem);
        let saved = || AttentionSaved {
            output: result.output.clone(),
            logsumexp: result.logsumexp.clone(),
            output_gradient: result.output.clone(),
            logsumexp_gradient: MaybeFloat::Absent,
        };
        let wanted = |gradients: AttentionGradients<CubeBackend>| {
            let gradients = [gradients.query, gradients.key, gradients.value];
            Vec::from_iter(gradients.into_iter().filter_map(MaybeFloat::into_option))
        };
        let times = compare_times(
            self.client,
            [
                &|| {
                    let inputs = inputs.clone();
                    wanted(Cmma::backward(cmma, inputs, saved(), &problem, REQUEST))
                },
                &|| {
                    let inputs = inputs.clone();
                    wanted(Unit::backward(unit, inputs, saved(), &problem, REQUEST))
                },
            ],
        );
        Ok(verdict_of_times(times?))
    }

    /// True if times on the device are meaningful. Emulated fragments and software drivers are for tests.
    fn is_timed(&self) -> bool {
        let mut kinds = self.profile.fragments.kinds.iter();
        self.profile.processors.is_none() && !kinds.any(|kind| kind.is_emulated())
    }

    fn inputs(&self, sample: &Sample) -> AttentionInputs<CubeBackend> {
        let AttentionProblem {
            q_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            ..
        } = sample.problem;
        inputs(
            self.upload(&sample.query, [1, q_heads, q_len, head_dim]),
            self.upload(&sample.key, [1, 1, kv_len, head_dim]),
            self.upload(&sample.value, [1, 1, kv_len, value_dim]),
        )
    }

    fn upload(&self, elements: &[f64], shape: [usize; 4]) -> CubeTensor {
        let elements: Vec<f32> = elements.iter().map(|x| *x as f32).collect();
        let data = TensorData::new(elements, shape).convert_dtype(self.problem.dtype);
        CubeBackend::float_from_data(data, self.device)
    }

    /// Returns inputs of zeros. The speed of kernels does not depend on the elements.
    fn zeros(&self, problem: &AttentionProblem) -> AttentionInputs<CubeBackend> {
        let AttentionProblem {
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            dtype,
            ..
        } = *problem;
        let zeros = |shape: [usize; 4]| {
            CubeBackend::float_zeros(Shape::new(shape), self.device, dtype.into())
        };
        inputs(
            zeros([1, q_heads, q_len, head_dim]),
            zeros([1, kv_heads, kv_len, head_dim]),
            zeros([1, kv_heads, kv_len, value_dim]),
        )
    }
}

/// Returns the inputs of a call without optional tensors.
fn inputs(query: CubeTensor, key: CubeTensor, value: CubeTensor) -> AttentionInputs<CubeBackend> {
    AttentionInputs {
        query,
        key,
        value,
        page_table: MaybeInt::Absent,
        mask: MaybeBool::Absent,
        bias: MaybeFloat::Absent,
        kv_lengths: MaybeInt::Absent,
        query_lengths: MaybeInt::Absent,
        query_segments: MaybeInt::Absent,
        key_segments: MaybeInt::Absent,
        intervals: MaybeInt::Absent,
        sinks: MaybeFloat::Absent,
        score_table: MaybeFloat::Absent,
        mask_table: MaybeFloat::Absent,
    }
}

/// Reads a result.
fn read(tensor: CubeTensor) -> Result<Vec<f64>, String> {
    let data = block_on(CubeBackend::float_into_data(tensor));
    let data = data.map_err(|error| format!("a launch failed: {error}"))?;
    Ok(data.iter::<f64>().collect())
}
