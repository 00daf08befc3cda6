//! Measures the device's peak FLOP/s and memory bandwidth in the same run as the benchmark's cases.

use crate::report::Ceilings;
use attention_workspace::{
    Dtype, Error,
    device::Chosen,
    timing::{Effort, Timer},
};
use burn::{
    module::Param,
    tensor::{Device, Distribution, Tensor},
};
use burn_gemma4::layer::{Linear, Weight};

/// Measures the FLOP/s of a large GEMM, and the memory bandwidth of an elementwise operation over a large tensor.
pub fn ceilings(
    chosen: &Chosen,
    dtype: Dtype,
    timer: &Timer,
    effort: Effort,
) -> Result<Ceilings, Error> {
    let side = if chosen.software { 1024 } else { 8192 };
    let device: &Device = &chosen.device;
    let random = |shape: [usize; 2]| {
        Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), device).cast(dtype.burn())
    };
    let left = random([side, side]);
    let layer = Linear::from(Weight::Whole(Param::from_tensor(random([side, side]))));
    // In half precision, the benchmark times the GEMM of burn-gemma4's `Linear`, because Burn's own untuned GEMM
    // reaches only a tenth of a Hopper GPU's speed. In f32, the benchmark times Burn's GEMM instead. On NVIDIA GPUs,
    // `Linear` avoids tf32 by splitting an f32 GEMM into several GEMMs. This split would lower the measured peak.
    let product = timer.singles(
        effort,
        || left.clone(),
        |left| match dtype {
            Dtype::F32 => left.matmul(layer.weight.val()),
            Dtype::F16 | Dtype::Bf16 => layer.forward(left.unsqueeze()).squeeze(),
        },
    )?;
    Ok(Ceilings {
        flops: Some(2.0 * (side as f64).powi(3) / product.median),
        bytes: Some(timer.memory_rate(dtype, effort)?),
    })
}
