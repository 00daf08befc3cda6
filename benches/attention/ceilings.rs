//! What the device does at best, measured in the same run.

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

/// Of a large matrix product, and of a large tensor that is read and written.
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
    let layer = Linear {
        weight: Weight::Whole(Param::from_tensor(random([side, side]))),
    };
    // The model's product of halves is Burn's but on Hopper, where Burn's is a tenth as fast until it is tuned. In f32 on NVIDIA
    // GPUs the model's is several, since it does not round to tf32.
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
