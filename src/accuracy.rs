//! Errors against the definition of attention in f64.
//!
//! The definition takes memory and time with the square of the length, so a sample is compared: of one
//! sequence, the query heads of one or two key heads, some of their queries, and all of their keys.
//! Gradients are compared under an output gradient that is zero outside the sample: what reaches the
//! sample's queries, keys and values then comes from the sample alone.

use crate::{
    Error,
    workload::{Inputs, Workload},
};
use attention_cube::{AttentionOptions, AttentionProblem};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// Query rows of a sample, over its heads.
const ROWS: usize = 128;

/// The relative L2 error of a result, and of the definition in the result's dtype.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Errors {
    /// Of what was measured.
    pub error: f64,
    /// Of the definition, given and returning the same dtype.
    pub same_dtype: f64,
}

impl Errors {
    /// Whether the result is at most twice as far off as the definition in its dtype. In f32 that is a
    /// matter of the order of additions, so a few units in the last place are always allowed.
    pub fn is_good(&self) -> bool {
        self.error <= (2.0 * self.same_dtype).max(2e-6)
    }
}

/// Query, key and value, or their gradients.
pub type Triple = [Tensor<4>; 3];

/// What to compare, and with what.
pub struct Oracle {
    sample: Sample,
    output: Known,
    gradients: [Known; 3],
}

/// Exact values and what the dtype makes of them.
struct Known {
    exact: Vec<f64>,
    same_dtype: f64,
}

/// A part of the problem that is small enough.
struct Sample {
    batch: usize,
    q_heads: Range<usize>,
    kv_heads: Range<usize>,
    rows: Vec<usize>,
}

impl Oracle {
    /// Computes the sample's values; `None` without the feature `flex`, which they are computed on.
    ///
    /// # Errors
    /// Where the inputs cannot be read, or make no valid problem.
    pub fn new(workload: &Workload, inputs: &Inputs) -> Result<Option<Self>, Error> {
        let Some(device) = processor() else {
            return Ok(None);
        };
        let problem = workload.problem(inputs)?;
        let sample = Sample::of(&problem);
        let parts = [
            sample.queries(&inputs.query),
            sample.keys(&inputs.key),
            sample.keys(&inputs.value),
            sample.queries(&inputs.gradient),
        ];
        let data = parts.map(Tensor::try_into_data);
        let [query, key, value, gradient] = data;
        let data = [query?, key?, value?, gradient?];
        let kv_length = workload.kv_length.unwrap_or(problem.kv_len);
        let mut visible = sample.visibility(&problem, kv_length, &device);
        if let Some(mask) = &inputs.mask {
            let rows = sample.pairs(mask.clone().float(), 0..1).try_into_data()?;
            let mask = Tensor::<4>::from_data(rows, &device).equal_elem(1.0);
            visible = visible.bool_and(mask);
        }
        let mut options = AttentionOptions::new().scale(problem.scale).mask(visible);
        if let Some(softcap) = problem.softcap {
            options = options.softcap(softcap);
        }
        let bias = inputs.bias.as_ref().map(|bias| {
            sample
                .pairs(bias.clone(), sample.q_heads.clone())
                .try_into_data()
        });
        let bias = bias.transpose()?;

        let definition = |dtype| definition(&data, bias.as_ref(), &options, &device, dtype);
        let exact = definition(DType::F64)?;
        let rounded = definition(problem.dtype)?;
        let mut known = exact
            .into_iter()
            .zip(rounded)
            .map(|(exact, rounded)| Known {
                same_dtype: relative_error(&exact, &rounded),
                exact,
            });
        let mut next = || known.next().ok_or("the definition has four results");
        let output = next()?;
        Ok(Some(Self {
            sample,
            output,
            gradients: [next()?, next()?, next()?],
        }))
    }

    /// The errors of an output. An output with a NaN or an infinity anywhere has an infinite error.
    ///
    /// # Errors
    /// Where it cannot be read: this is where a failed launch shows.
    pub fn output(&self, output: &Tensor<4>) -> Result<Errors, Error> {
        let sampled = values(self.sample.queries(output))?;
        self.output.errors(&sampled, output)
    }

    /// What the output gradient is multiplied with: one for the sample, zero elsewhere.
    pub fn gradient_mask(&self, like: &Tensor<4>) -> Tensor<4> {
        let [batch, heads, length, _] = like.dims();
        let mut ones = vec![0.0f32; batch * heads * length];
        for head in self.sample.q_heads.clone() {
            for row in &self.sample.rows {
                ones[(self.sample.batch * heads + head) * length + row] = 1.0;
            }
        }
        let data = TensorData::new(ones, [batch, heads, length, 1]);
        Tensor::from_data(data, (&like.device(), like.dtype()))
    }

    /// The worst errors among the gradients under the masked output gradient.
    ///
    /// # Errors
    /// Where they cannot be read.
    pub fn gradients(&self, gradients: &Triple) -> Result<Errors, Error> {
        let [query, key, value] = gradients;
        let sampled = [
            self.sample.queries(query),
            self.sample.keys(key),
            self.sample.keys(value),
        ];
        let mut worst: Option<Errors> = None;
        for ((known, sampled), whole) in self.gradients.iter().zip(sampled).zip(gradients) {
            let errors = known.errors(&values(sampled)?, whole)?;
            if worst.is_none_or(|worst| errors.ratio() > worst.ratio()) {
                worst = Some(errors);
            }
        }
        Ok(worst.ok_or("there are three gradients")?)
    }
}

impl Errors {
    fn ratio(&self) -> f64 {
        self.error / self.same_dtype.max(f64::MIN_POSITIVE)
    }
}

impl Known {
    fn errors(&self, sampled: &[f64], whole: &Tensor<4>) -> Result<Errors, Error> {
        let error = match is_finite(whole)? {
            true => relative_error(&self.exact, sampled),
            false => f64::INFINITY,
        };
        Ok(Errors {
            error,
            same_dtype: self.same_dtype,
        })
    }
}

impl Sample {
    fn of(problem: &AttentionProblem) -> Self {
        let group = problem.group().max(1);
        let heads = if group == 1 {
            problem.kv_heads.min(2)
        } else {
            problem.kv_heads.min(1)
        };
        let kv_heads = problem.kv_heads - heads..problem.kv_heads;
        let q_heads = kv_heads.start * group..kv_heads.end * group;
        let rows = (ROWS / q_heads.len().max(1))
            .clamp(1, ROWS / 2)
            .min(problem.q_len);
        let last = problem.q_len.saturating_sub(1);
        let rows = match rows {
            0 | 1 => (0..rows).map(|_| last).collect(),
            // From the first to the last, evenly.
            _ => (0..rows).map(|row| row * last / (rows - 1)).collect(),
        };
        Self {
            batch: problem.batch.saturating_sub(1),
            q_heads,
            kv_heads,
            rows,
        }
    }

    fn queries(&self, tensor: &Tensor<4>) -> Tensor<4> {
        let batch = tensor.clone().narrow(0, self.batch, 1);
        self.pairs(batch, self.q_heads.clone())
    }

    /// The sampled queries' part of something like scores, with one batch.
    fn pairs(&self, tensor: Tensor<4>, heads: Range<usize>) -> Tensor<4> {
        let rows: Vec<i64> = self.rows.iter().map(|row| *row as i64).collect();
        let count = rows.len();
        let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, [count]), &tensor.device());
        tensor.slice([0..1, heads]).select(2, rows)
    }

    fn keys(&self, tensor: &Tensor<4>) -> Tensor<4> {
        tensor
            .clone()
            .slice([self.batch..self.batch + 1, self.kv_heads.clone()])
    }

    /// What the sampled queries see, by their positions in the whole problem.
    fn visibility(
        &self,
        problem: &AttentionProblem,
        kv_length: usize,
        device: &Device,
    ) -> Tensor<4, Bool> {
        let offset = match problem.is_bottom_right() {
            true => kv_length as i64 - problem.q_len as i64,
            false => 0,
        };
        let mut visible = Vec::with_capacity(self.rows.len() * problem.kv_len);
        for row in &self.rows {
            let position = *row as i64 + offset;
            visible.extend((0..problem.kv_len as i64).map(|key| {
                let is_in_window = problem
                    .window_left
                    .is_none_or(|left| key >= position - left as i64);
                let is_before_end = problem
                    .right()
                    .is_none_or(|right| key <= position + right as i64);
                key < kv_length as i64 && is_in_window && is_before_end
            }));
        }
        let shape = [1, 1, self.rows.len(), problem.kv_len];
        Tensor::from_data(TensorData::new(visible, shape), device)
    }
}

/// The output and the gradients of query, keys and values by the definition, computed in `dtype`.
fn definition(
    [query, key, value, gradient]: &[TensorData; 4],
    bias: Option<&TensorData>,
    options: &AttentionOptions,
    device: &Device,
    dtype: DType,
) -> Result<[Vec<f64>; 4], Error> {
    let device = device.clone().autodiff();
    let tensor = |data: &TensorData| Tensor::<4>::from_data(data.clone(), (&device, dtype));
    let [query, key, value] = [query, key, value].map(|data| tensor(data).require_grad());
    let options = match bias {
        Some(bias) => options.clone().bias(tensor(bias)),
        None => options.clone(),
    };
    let (output, _) =
        attention_cube::reference::attention(query.clone(), key.clone(), value.clone(), options)?;
    let mut gradients = (output.clone() * tensor(gradient)).backward();
    let mut take = |tensor: &Tensor<4>| match tensor.grad_remove(&mut gradients) {
        Some(gradient) => values(gradient),
        None => Err("the definition gave no gradient".into()),
    };
    let gradients = [take(&query)?, take(&key)?, take(&value)?];
    let [query, key, value] = gradients;
    Ok([values(output.inner())?, query, key, value])
}

fn values(tensor: Tensor<4>) -> Result<Vec<f64>, Error> {
    let data = tensor.try_into_data()?.convert::<f64>();
    data.try_into_vec::<f64>()
        .map_err(|error| format!("{error:?}").into())
}

/// Whether no element is a NaN or an infinity.
fn is_finite(tensor: &Tensor<4>) -> Result<bool, Error> {
    // Small ones are read: a reduction costs a software driver seconds to compile and tune.
    if tensor.shape().num_elements() <= 1 << 22 {
        return Ok(values(tensor.clone())?
            .iter()
            .all(|value| value.is_finite()));
    }
    // NaN and infinities stay what they are in a sum; f32 holds the sum of any finite tensor.
    let sum: f32 = tensor
        .clone()
        .cast(DType::F32)
        .abs()
        .sum()
        .try_into_scalar()?;
    Ok(sum.is_finite())
}

fn relative_error(exact: &[f64], found: &[f64]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let norm = squares(&mut exact.iter().copied());
    let distance = squares(&mut exact.iter().zip(found).map(|(exact, found)| exact - found));
    match norm {
        0.0 => distance,
        _ => distance / norm,
    }
}

#[cfg(feature = "flex")]
fn processor() -> Option<Device> {
    Some(Device::flex())
}

#[cfg(not(feature = "flex"))]
fn processor() -> Option<Device> {
    None
}
