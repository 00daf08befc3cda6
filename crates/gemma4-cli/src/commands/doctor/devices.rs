//! The part of the report about one device.

use super::{attention, gibibytes, measure, table};
use crate::{
    Dtype,
    device::{Chosen, DeviceName, choose},
};
use burn::tensor::{DType, Tensor};
use burn_gemma4::{DeviceMemory, catch_panic};
use std::time::Instant;

/// The part of the report about one device, and advice for the end of the report.
pub(super) struct DeviceReport {
    pub text: String,
    pub advice: Vec<String>,
    /// True if the device runs kernels and the results of these kernels are right.
    pub works: bool,
}

/// The sizes of the measurements.
struct Sizes {
    memory_bytes: usize,
    product: usize,
    tokens: usize,
}

const ON_GPU: Sizes = Sizes {
    memory_bytes: 512 << 20,
    product: 4096,
    tokens: 2048,
};

/// The sizes for a device that runs on the processor.
const ON_CPU: Sizes = Sizes {
    memory_bytes: 64 << 20,
    product: 512,
    tokens: 256,
};

impl DeviceReport {
    /// Checks the best device of a backend. If `quick` is true, the check measures no speeds.
    pub fn of(name: DeviceName, quick: bool) -> Self {
        let chosen = match choose(name) {
            Ok(chosen) => chosen,
            Err(error) => {
                return Self {
                    text: format!("\n## {}\n\nNo device: {error}\n", name.as_str()),
                    advice: Vec::new(),
                    works: false,
                };
            }
        };
        let title = format!("\n## {chosen}\n");
        match first_kernel(&chosen) {
            Err(reason) => Self {
                text: format!("{title}\nThe first kernel failed: {reason}\n"),
                advice: vec![format!("{}: {}", chosen.name.as_str(), remedy(chosen.name))],
                works: false,
            },
            Ok(seconds) => Self::of_working(&chosen, &title, seconds, quick),
        }
    }

    fn of_working(chosen: &Chosen, title: &str, first_kernel: f64, quick: bool) -> Self {
        let device = &chosen.device;
        let sizes = if chosen.software { ON_CPU } else { ON_GPU };
        let memory = DeviceMemory::of(device);
        let mut rows = Vec::new();
        if let Some(total) = memory.total {
            rows.push(("memory", gibibytes(total)));
        }
        if let Some(largest) = memory.largest_buffer {
            rows.push(("largest buffer", gibibytes(largest)));
        }
        let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter();
        let dtypes: Vec<_> = dtypes
            .filter(|dtype| device.supports_dtype(dtype.burn()))
            .map(|dtype| dtype.to_string())
            .collect();
        rows.push(("dtypes", dtypes.join(", ")));
        let dtype = chosen.dtype(None).unwrap_or(Dtype::F32);
        rows.push(("default dtype", dtype.to_string()));
        rows.push(("first kernel", format!("{first_kernel:.2} s")));
        let mut advice = Vec::new();
        if !quick {
            let bandwidth = catch_panic(|| measure::memory_bandwidth(device, sizes.memory_bytes));
            rows.push(("memory bandwidth", per_second(bandwidth.flatten(), "B")));
            let product =
                catch_panic(|| measure::product_speed(device, dtype.burn(), sizes.product));
            rows.push(("matrix product", per_second(product.flatten(), "FLOP")));
        }
        if chosen.software && chosen.name != DeviceName::Flex {
            advice.push(format!(
                "{}: This is a software driver, which runs on the processor. `--device cpu` is faster.",
                chosen.name.as_str()
            ));
        }
        let attention = attention::report(device, dtype.burn(), sizes.tokens, !quick);
        Self {
            text: format!("{title}{}{attention}", table(&rows)),
            advice,
            works: true,
        }
    }
}

/// Returns a measured speed with three digits and a decimal prefix, or the error.
fn per_second(measured: Result<f64, String>, unit: &str) -> String {
    match measured {
        Ok(speed) => {
            let (scale, prefix) = match speed {
                1e12.. => (1e12, "T"),
                1e9.. => (1e9, "G"),
                _ => (1e6, "M"),
            };
            let decimals = match speed / scale {
                100.0.. => 0,
                10.0.. => 1,
                _ => 2,
            };
            format!("{:.decimals$} {prefix}{unit}/s", speed / scale)
        }
        Err(error) => format!("failed: {error}"),
    }
}

/// Compiles and runs a first kernel, and checks its result. Returns the total time in seconds.
fn first_kernel(chosen: &Chosen) -> Result<f64, String> {
    const COUNT: usize = 1000;
    let start = Instant::now();
    let sum = catch_panic(|| {
        let ones = Tensor::<1>::ones([COUNT], (&chosen.device, DType::F32));
        let data = ones.mul_scalar(3.0).sum().try_into_data();
        data.map(|data| data.iter::<f32>().sum::<f32>())
    })?;
    match sum {
        Ok(sum) if sum == 3.0 * COUNT as f32 => Ok(start.elapsed().as_secs_f64()),
        Ok(sum) => Err(format!("the sum of {COUNT} threes is {sum}")),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns what the user can do if a backend lists a device on which kernels fail.
fn remedy(name: DeviceName) -> &'static str {
    match name {
        DeviceName::Cuda => {
            "Install NVIDIA's driver, and NVRTC with the headers of the CUDA toolkit. `CUDA_PATH` names the toolkit's folder if it is not in a usual place."
        }
        DeviceName::Rocm => "Install ROCm with its runtime compiler.",
        DeviceName::Metal => "Update macOS.",
        DeviceName::Vulkan | DeviceName::Wgpu => "Update the graphics driver.",
        DeviceName::Auto | DeviceName::Gpu | DeviceName::Flex => {
            "Report this with the whole text above."
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn per_second_has_three_digits() {
        for (speed, expected) in [
            (6.931e14, "693 TFLOP/s"),
            (1.0e12, "1.00 TFLOP/s"),
            (4.26e10, "42.6 GFLOP/s"),
            (2.5e6, "2.50 MFLOP/s"),
        ] {
            assert_eq!(per_second(Ok(speed), "FLOP"), expected);
        }
        let failed = per_second(Err("no memory".into()), "B");
        assert_eq!(failed, "failed: no memory");
    }
}
