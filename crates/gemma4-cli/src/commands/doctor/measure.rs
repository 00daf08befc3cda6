//! Measurements of a device: the bandwidth of its memory, and the speed of a matrix product.

use burn::tensor::{DType, Device, Tensor};
use std::time::{Duration, Instant};

/// The time limit of a measurement. The last run may end after this limit.
const MOST_TIME: Duration = Duration::from_millis(500);
/// The largest number of runs per measurement.
const MOST_RUNS: usize = 20;

/// Returns the shortest time of `work` in seconds, after one run that compiles its kernels.
///
/// # Errors
/// Returns the device's error.
pub(super) fn seconds<T>(device: &Device, work: impl Fn() -> T) -> Result<f64, String> {
    let run = || {
        let start = Instant::now();
        // Keep the result alive until the synchronization, because fusion does not launch operations whose results have
        // been dropped.
        let result = work();
        device.sync().map_err(|error| error.to_string())?;
        drop(result);
        Ok::<_, String>(start.elapsed())
    };
    run()?;
    let begin = Instant::now();
    let mut least = run()?;
    for _ in 1..MOST_RUNS {
        if begin.elapsed() > MOST_TIME {
            break;
        }
        least = least.min(run()?);
    }
    Ok(least.as_secs_f64().max(1e-9))
}

/// Measures the memory bandwidth of a kernel that reads `bytes` bytes and writes `bytes` bytes. Returns the bandwidth
/// in bytes per second.
///
/// # Errors
/// Returns the device's error.
pub(super) fn memory_bandwidth(device: &Device, bytes: usize) -> Result<f64, String> {
    let source = Tensor::<1>::ones([bytes / size_of::<f32>()], (device, DType::F32));
    let time = seconds(device, || source.clone().mul_scalar(2.0))?;
    Ok(2.0 * bytes as f64 / time)
}

/// Measures the speed of multiplying two square matrices of `size` rows. Returns floating-point operations per second.
///
/// # Errors
/// Returns the device's error.
pub(super) fn product_speed(device: &Device, dtype: DType, size: usize) -> Result<f64, String> {
    let matrix = Tensor::<2>::ones([size, size], (device, dtype));
    let time = seconds(device, || matrix.clone().matmul(matrix.clone()))?;
    Ok(2.0 * (size as f64).powi(3) / time)
}
