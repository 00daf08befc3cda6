//! Measures the errors of attention results against a reference implementation in f64.
//!
//! Only a sample is compared, because the time and memory of the reference implementation grow with the square of the
//! length. The sample consists of some queries of one sequence, and all keys of one or two key heads.
//!
//! Before a comparison of gradients, the output gradient is set to zero outside the sample. The sample's gradients then
//! depend on the sample alone.

use crate::{
    Error,
    workload::{Inputs, Workload},
};
use attention_cube::{AttentionOptions, AttentionProblem};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// The number of sampled query rows, counted over all query heads of the sample.
const ROWS: usize = 128;

/// The relative L2 error of a result. For comparison, also the error of the reference implementation when it runs in
/// the result's dtype.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Errors {
    /// The error of the result.
    pub error: f64,
    /// The error of the reference implementation when it runs in the dtype of the measured result.
    pub same_dtype: f64,
}

impl Errors {
    /// True if the error is at most twice the error of the reference implementation in the same dtype. In f32, an error of a
    /// few units in the last place is always allowed.
    pub fn is_good(&self) -> bool {
        self.error <= (2.0 * self.same_dtype).max(2e-6)
    }
}

/// The query, key and value tensors, or their gradients.
pub type Triple = [Tensor<4>; 3];

/// The sample of an attention problem, with its exact results.
pub struct Oracle {
    sample: Sample,
    output: Known,
    gradients: [Known; 3],
}

/// The exact elements of one result (the output or a gradient). Also the error of the reference implementation when it
/// runs in the dtype of this result.
struct Known {
    exact: Vec<f64>,
    same_dtype: f64,
}

/// The part of an attention problem that the reference implementation computes.
struct Sample {
    batch: usize,
    q_heads: Range<usize>,
    kv_heads: Range<usize>,
    rows: Vec<usize>,
}

impl Oracle {
    /// Computes the sample's exact results on the CPU device of the Cargo feature `flex`. Returns `None` if that feature is
    /// disabled.
    ///
    /// # Errors
    /// Returns an error if the inputs cannot be read, or if they are not a valid problem.
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
        let mut next = || known.next().ok_or("the reference has four results");
        let output = next()?;
        Ok(Some(Self {
            sample,
            output,
            gradients: [next()?, next()?, next()?],
        }))
    }

    /// Returns the errors of an output. The error is infinite if any element of the output is NaN or infinite, even outside the
    /// sample.
    ///
    /// # Errors
    /// Returns an error if the output cannot be read. A launch that failed earlier is also reported here.
    pub fn output(&self, output: &Tensor<4>) -> Result<Errors, Error> {
        let sampled = values(self.sample.queries(output))?;
        self.output.errors(&sampled, output)
    }

    /// Returns a mask for the output gradient, `[batch, heads, q_len, 1]`. The mask is 1 for the sampled query rows,
    /// and 0 for all other rows. `like` is the output or the output gradient, from which the mask takes its sizes,
    /// dtype and device.
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

    /// Returns the errors of the worst of the three gradients. For each gradient, the function divides its error by the
    /// error of the reference implementation in the same dtype. The gradient with the largest ratio is the worst.
    /// Before the backward, the caller must multiply the output gradient by [`gradient_mask`](Self::gradient_mask).
    ///
    /// # Errors
    /// Returns an error if the gradients cannot be read.
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
            // The sampled queries are evenly spaced and include the first and the last query.
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

    /// Returns the sampled query rows of `tensor`, for the heads in `heads`. `tensor` has one sequence, `[1, heads,
    /// q_len, columns]`.
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

    /// Returns the mask of the keys that each sampled query sees. The window and the causal mask use each query's position in
    /// the whole problem, not its index in the sample.
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

/// Computes the output and the gradients of query, key and value with the reference implementation in `dtype`.
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
        None => Err("the reference has no gradient of an input".into()),
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

/// True if no element is NaN or infinite.
fn is_finite(tensor: &Tensor<4>) -> Result<bool, Error> {
    // A small tensor is checked on the host. On a software driver, a reduction kernel would take seconds to compile and
    // tune.
    if tensor.shape().num_elements() <= 1 << 22 {
        return Ok(values(tensor.clone())?
            .iter()
            .all(|value| value.is_finite()));
    }
    // A large tensor is summed on the device. A NaN or infinite element makes the sum NaN or infinite. Finite elements here
    // are too small for the sum to overflow f32.
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
