//! Measures one device and the ring, and compares their results.

use crate::report::{Errors, Times};
use attention_cube::{
    AttentionOptions, attention_with_lse,
    shards::{self, Merged},
};
use attention_workspace::{
    Error,
    ring::{Ring, Shard},
    workload::Inputs,
};
use burn::tensor::{DType, Device, Tensor};
use std::time::Instant;

/// The number of runs before the timed runs. The first run compiles the kernels and connects the devices. The second run
/// fills the pools of memory.
const WARM_UPS: usize = 2;

/// The output and the gradients of query, keys and values.
pub type Results = [Tensor<4>; 4];

/// Times one device that computes the whole sequence in one call.
///
/// # Errors
/// Returns an error if the device reports a fault.
pub fn measure_one_device(inputs: &Inputs, repeats: usize) -> Result<(Times, Results), Error> {
    let device = inputs.query.device();
    let options = || AttentionOptions::new().causal();
    let tensors = || [&inputs.query, &inputs.key, &inputs.value].map(Tensor::clone);
    let (forward, (output, logsumexp)) = median_time(repeats, || {
        let [query, key, value] = tensors();
        let results = attention_with_lse(query, key, value, options())?;
        device.sync()?;
        Ok(results)
    })?;
    // One shard that has all keys gives the gradients of the whole problem, without the time of a loss.
    let (backward, gradients) = median_time(repeats, || {
        let [query, key, value] = tensors();
        let merged = Merged {
            output: output.clone(),
            logsumexp: logsumexp.clone(),
            output_gradient: inputs.gradient.clone(),
            logsumexp_gradient: None,
        };
        let gradients = shards::backward(query, key, value, options(), merged)?;
        device.sync()?;
        Ok(gradients)
    })?;
    let results = [output, gradients.query, gradients.key, gradients.value];
    Ok((Times { forward, backward }, results))
}

/// A ring, with the inputs divided among the devices of its ranks.
pub struct DividedProblem {
    ring: Ring,
    shards: Vec<Shard>,
    output_gradients: Vec<Tensor<4>>,
}

impl DividedProblem {
    /// Creates a ring with one rank per item of `devices`, and copies the inputs to these devices.
    ///
    /// # Errors
    /// Returns an error if the tokens do not divide among the ranks, or if a device reports a fault.
    pub fn new(inputs: &Inputs, devices: Vec<Device>) -> Result<Self, Error> {
        let ring = Ring::new(devices)?;
        let queries = ring.scatter(&inputs.query)?;
        let keys = ring.scatter(&inputs.key)?;
        let values = ring.scatter(&inputs.value)?;
        let shards = queries.into_iter().zip(keys).zip(values);
        let shards = shards.map(|((query, key), value)| Shard { query, key, value });
        Ok(Self {
            shards: shards.collect(),
            output_gradients: ring.scatter(&inputs.gradient)?,
            ring,
        })
    }

    /// Times the ring. The results are on the first device.
    ///
    /// # Errors
    /// Returns an error if a device reports a fault.
    pub fn measure(&self, repeats: usize) -> Result<(Times, Results), Error> {
        let Self {
            ring,
            shards,
            output_gradients,
        } = self;
        let (forward, results) = median_time(repeats, || ring.forward(shards))?;
        let (backward, gradients) = median_time(repeats, || {
            ring.backward(shards, &results, output_gradients)
        })?;
        let outputs: Vec<_> = results.into_iter().map(|result| result.output).collect();
        let (mut queries, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for gradients in gradients {
            queries.push(gradients.query);
            keys.push(gradients.key);
            values.push(gradients.value);
        }
        let results = [
            ring.gather(&outputs)?,
            ring.gather(&queries)?,
            ring.gather(&keys)?,
            ring.gather(&values)?,
        ];
        Ok((Times { forward, backward }, results))
    }
}

/// Computes the relative errors of `found`, in the Frobenius norm.
///
/// # Errors
/// Returns an error if a device reports a fault.
pub fn relative_errors(found: Results, expected: Results) -> Result<Errors, Error> {
    let mut errors = [0.0; 4];
    for (error, (found, expected)) in errors.iter_mut().zip(found.into_iter().zip(expected)) {
        let expected = expected.cast(DType::F32);
        let distance = norm(found.cast(DType::F32) - expected.clone())?;
        *error = distance / norm(expected)?;
    }
    let [output, query, key, value] = errors;
    Ok(Errors {
        output,
        query,
        key,
        value,
    })
}

fn norm(tensor: Tensor<4>) -> Result<f64, Error> {
    let squares: f32 = (tensor.clone() * tensor).sum().try_into_scalar()?;
    Ok(f64::from(squares).sqrt())
}

/// Returns the median time of `run` in seconds, and the results of the last run. `run` must leave all devices without
/// work.
fn median_time<T>(
    repeats: usize,
    mut run: impl FnMut() -> Result<T, Error>,
) -> Result<(f64, T), Error> {
    for _ in 0..WARM_UPS {
        run()?;
    }
    let mut timed = || -> Result<(f64, T), Error> {
        let start = Instant::now();
        let results = run()?;
        Ok((start.elapsed().as_secs_f64(), results))
    };
    let (time, mut last) = timed()?;
    let mut times = vec![time];
    for _ in 1..repeats {
        // The earlier results are freed first, so that two results never need memory at the same time.
        drop(last);
        let time;
        (time, last) = timed()?;
        times.push(time);
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], last))
}
