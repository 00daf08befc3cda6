//! CubeCL devices: lays out a problem for the kernel that [`plan`](crate::plan) chose, and launches it.

#[cfg(feature = "cuda")]
mod aligned;
mod backward;
mod bias;
mod forward;
#[cfg(feature = "cuda")]
mod hopper;
#[cfg(feature = "cuda")]
mod hopper_backward;
mod integers;
#[cfg(feature = "cuda")]
mod mask_bits;
#[cfg(feature = "cuda")]
pub(crate) mod product;

use super::*;
use crate::kernel::schedule::GridLaunch;
use crate::kernel::score::{ScoreArgumentsLaunch, ScoreKind};
use crate::kernel::visibility::Structure;
#[cfg(feature = "cuda")]
use crate::plan::wgmma::WgmmaPlan;
use crate::plan::{
    BackwardRequest, DeviceProfile, Kernel, Layouts, Operands, Pass, select,
    unit::{UnitPlan, UnitTiles},
};
use crate::softcap;
use burn::backend::{
    cubecl::dtype_to_storage_type,
    ops::{BoolTensorOps, FloatTensorOps},
};
use burn::tensor::{Device, Shape};
use burn_cubecl::{
    CubeBackend, cubecl,
    kernel::{into_contiguous, untile},
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};
use cubecl::client::Client;
use cubecl::ir::{
    ElemType,
    features::{Tma, TypeUsage},
};
use cubecl::prelude::{AddressType, CubeCount, TensorArg};
use integers::{Blocks, Places, prepare};
use std::{num::NonZero, sync::OnceLock, thread::available_parallelism};

/// The profile of a device, if it runs CubeCL kernels.
pub(crate) fn device_profile(device: &Device) -> Option<DeviceProfile> {
    let device = device.clone().without_autodiff();
    match device.as_dispatch() {
        burn::backend::DispatchDevice::Cube(device) => Some(profile(&device.client())),
        #[allow(
            unreachable_patterns,
            reason = "without other backends it is the only device"
        )]
        _ => None,
    }
}

fn profile(client: &Client) -> DeviceProfile {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let dtypes = [DType::F32, DType::F16, DType::BF16]
        .into_iter()
        .filter(|dtype| {
            let usage = properties.type_usage(dtype_to_storage_type(*dtype));
            usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
        })
        .collect();
    DeviceProfile {
        name: client.name().to_string(),
        dtypes,
        shared_memory: hardware.max_shared_memory_size,
        units_per_cube: hardware.max_units_per_cube as usize,
        bindings: hardware.max_bindings as usize,
        largest_buffer: usize::try_from(properties.memory.max_page_size).unwrap_or(usize::MAX),
        cube_count: hardware.max_cube_count.0,
        // Of all that runtimes list, only a processor is no card.
        processors: properties.identity.physical.is_none().then(processors),
        multiprocessors: hardware
            .num_streaming_multiprocessors
            .map(|count| count as usize),
        // The copy engine is reached through CUDA C++ alone; later architectures have other matrix units.
        hopper: cfg!(feature = "cuda")
            && properties.features.tma.contains(Tma::Base)
            && properties.identity.fingerprint == "ptx_sm90",
    }
}

/// Threads of this machine's processor.
fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| available_parallelism().map_or(1, NonZero::get))
}

impl AttentionBackend for CubeBackend {
    fn attention_forward(
        inputs: AttentionInputs<Self>,
        problem: AttentionProblem,
    ) -> AttentionOutput<Self> {
        if problem.is_empty() {
            return reference::forward_in_parts::<Self>(inputs, &problem);
        }
        let inputs = rows_of(inputs);
        let layouts = Layouts {
            vectors: [&inputs.query, &inputs.key, &inputs.value]
                .into_iter()
                .all(|tensor| is_in_vectors(tensor, 4)),
            boxes: boxed_operands(&inputs, None),
            bias_boxes: inputs
                .bias
                .as_option()
                .is_some_and(|bias| is_boxed(bias, 2)),
        };
        match choose(&inputs.query.client, &problem, layouts, Pass::Forward) {
            #[cfg(feature = "cuda")]
            Kernel::Wgmma(WgmmaPlan::Forward(plan)) => {
                let inputs = aligned::aligned_inputs(inputs, plan.copies);
                hopper::forward(inputs, &problem, plan)
            }
            Kernel::Unit(UnitPlan::Forward(plan)) => forward::launch(inputs, &problem, plan),
            _ => reference::forward_in_parts::<Self>(inputs, &problem),
        }
    }

    fn attention_backward(
        inputs: AttentionInputs<Self>,
        saved: AttentionSaved<Self>,
        problem: AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<Self> {
        if problem.is_empty() {
            return reference::backward_of_nothing::<Self>(inputs, saved, &problem, request);
        }
        let inputs = rows_of(inputs);
        let saved = AttentionSaved {
            output: into_contiguous(saved.output),
            output_gradient: untile(saved.output_gradient),
            ..saved
        };
        let layouts = Layouts {
            vectors: [
                &inputs.query,
                &inputs.key,
                &inputs.value,
                &saved.output,
                &saved.output_gradient,
            ]
            .into_iter()
            .all(|tensor| is_in_vectors(tensor, 4)),
            boxes: boxed_operands(&inputs, Some(&saved.output_gradient)),
            // It is read by threads.
            bias_boxes: false,
        };
        match choose(&inputs.query.client, &problem, layouts, Pass::Backward) {
            #[cfg(feature = "cuda")]
            Kernel::Wgmma(WgmmaPlan::Backward(plan)) => {
                let copied = plan.copies.output_gradient;
                let gradient = saved.output_gradient;
                let saved = AttentionSaved {
                    output_gradient: aligned::aligned(gradient, BROADCAST_QUERIES, copied),
                    ..saved
                };
                let inputs = aligned::aligned_inputs(inputs, plan.copies);
                hopper_backward::launch(inputs, saved, &problem, *plan, request)
            }
            Kernel::Unit(UnitPlan::Backward(plan)) => {
                backward::launch(inputs, saved, &problem, plan, request)
            }
            _ => reference::backward::<Self>(inputs, saved, &problem, request),
        }
    }
}

fn choose(client: &Client, problem: &AttentionProblem, layouts: Layouts, pass: Pass) -> Kernel {
    let selection = select(problem, Some(&profile(client)), layouts, pass);
    for (engine, reason) in &selection.refusals {
        log::debug!("attention {pass:?}: {engine:?} refused: {reason}");
    }
    for warning in &selection.warnings {
        log::debug!("attention {pass:?}: {warning}");
    }
    log::debug!("attention {pass:?}: {:?} for {problem:?}", selection.kernel);
    selection.kernel
}

/// The inputs with rows where storage tiles may lie.
fn rows_of(inputs: AttentionInputs<CubeBackend>) -> AttentionInputs<CubeBackend> {
    AttentionInputs {
        query: untile(inputs.query),
        key: untile(inputs.key),
        value: untile(inputs.value),
        ..inputs
    }
}

/// Whether every row lies together and consists of vectors of `size` elements. Burn's views start where
/// a device may bind a buffer, which is coarser.
fn is_in_vectors(tensor: &CubeTensor, size: usize) -> bool {
    let strides = tensor.meta.strides();
    let shape = tensor.meta.shape();
    strides[3] == 1
        && shape[3].is_multiple_of(size)
        && (0..3).all(|dim| shape[dim] == 1 || strides[dim].is_multiple_of(size))
}

/// Dimensions from the first on along which the copy engine can read queries, and keys and values, with a stride of 0.
const BROADCAST_QUERIES: usize = 1;
const BROADCAST_KEYS: usize = 2;

/// The operands that Hopper's copy engine can read.
fn boxed_operands(
    inputs: &AttentionInputs<CubeBackend>,
    output_gradient: Option<&CubeTensor>,
) -> Operands {
    Operands {
        query: is_boxed(&inputs.query, BROADCAST_QUERIES),
        key: is_boxed(&inputs.key, BROADCAST_KEYS),
        value: is_boxed(&inputs.value, BROADCAST_KEYS),
        output_gradient: output_gradient
            .is_some_and(|gradient| is_boxed(gradient, BROADCAST_QUERIES)),
    }
}

/// The tensor with size 1 along those of its first `dims` dimensions where it repeats with a stride of 0.
#[cfg(feature = "cuda")]
fn distinct(tensor: &CubeTensor, dims: usize) -> CubeTensor {
    let mut tensor = tensor.clone();
    for dim in 0..dims {
        if tensor.meta.strides()[dim] == 0 {
            tensor.meta.shape[dim] = 1;
        }
    }
    tensor
}

/// Whether Hopper's copy engine can read boxes of the tensor, whose first `broadcast` dimensions may have
/// a stride of 0.
fn is_boxed(tensor: &CubeTensor, broadcast: usize) -> bool {
    let strides = tensor.meta.strides();
    let shape = tensor.meta.shape();
    let fits = |dim: usize| match strides[dim] {
        _ if shape[dim] == 1 => true,
        0 => dim < broadcast,
        stride => (stride * tensor.dtype.size()).is_multiple_of(16),
    };
    (shape[3] == 1 || strides[3] == 1) && (0..3).all(fits)
}

/// A new contiguous tensor beside `like`.
fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(
        like.client.clone(),
        like.device.clone(),
        shape.into(),
        dtype,
    )
}

/// The launch of `cubes` cubes, which may be more than fit one dimension.
fn cube_count(client: &Client, cubes: usize) -> CubeCount {
    let limit = client.properties().hardware.max_cube_count.0 as usize;
    let rows = cubes.div_ceil(limit);
    CubeCount::Static(cubes.div_ceil(rows) as u32, rows as u32, 1)
}

/// The width of addresses that reach every element of `tensors`.
fn address_type<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) -> AddressType {
    tensors
        .into_iter()
        .map(|tensor| tensor.required_address_type())
        .max()
        .unwrap_or_default()
}

/// Mask, bias and integers as kernels take them, and the element types that stand in where they are absent.
struct Extras {
    mask: Option<CubeTensor>,
    bias: Option<CubeTensor>,
    integers: Option<CubeTensor>,
    mask_element: ElemType,
    bias_element: ElemType,
}

impl Extras {
    /// For kernels with these blocks, and the places that each of them finds the integers at.
    fn new(
        inputs: &AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
        blocks: &[Blocks],
    ) -> (Self, Vec<Places>) {
        let (integers, places) = prepare(inputs, problem, blocks);
        // Kernels read these at `[batch, q_heads, q_len, kv_len]`, by their strides.
        let scores = Shape::new([
            problem.batch,
            problem.q_heads,
            problem.q_len,
            problem.kv_len,
        ]);
        let mask = inputs.mask.as_option();
        let mask = mask.map(|mask| CubeBackend::bool_expand(mask.clone(), scores.clone()));
        let bias = inputs.bias.as_option();
        let bias = bias.map(|bias| CubeBackend::float_expand(bias.clone(), scores));
        let element = |tensor: &Option<CubeTensor>, absent| {
            dtype_to_storage_type(tensor.as_ref().map_or(absent, |tensor| tensor.dtype))
        };
        let extras = Self {
            mask_element: element(&mask, DType::U32),
            bias_element: element(&bias, DType::F32),
            mask,
            bias,
            integers,
        };
        (extras, places)
    }

    /// Whether the bias is one number for all scores of a head.
    #[cfg(feature = "cuda")]
    fn has_bias_of_head(&self) -> bool {
        let strides = self.bias.as_ref().map(|bias| &bias.meta.strides()[2..]);
        strides.is_some_and(|strides| strides == [0, 0])
    }

    fn mask(&self) -> Option<TensorArg> {
        self.mask.clone().map(CubeTensor::into_tensor_arg)
    }

    fn bias(&self) -> Option<TensorArg> {
        self.bias.clone().map(CubeTensor::into_tensor_arg)
    }

    fn integers(&self) -> Option<TensorArg> {
        self.integers.clone().map(CubeTensor::into_tensor_arg)
    }

    fn tensors(&self) -> impl Iterator<Item = &CubeTensor> {
        self.mask.iter().chain(self.beside_mask())
    }

    /// What kernels read that have the mask as bits.
    fn beside_mask(&self) -> impl Iterator<Item = &CubeTensor> {
        [&self.bias, &self.integers].into_iter().flatten()
    }
}

/// The structure that kernels are compiled for.
fn structure(problem: &AttentionProblem) -> Structure {
    Structure {
        lengths: problem.kv_lengths,
        segments: problem.segments,
        mask: problem.mask.is_some(),
    }
}

fn score_kind(problem: &AttentionProblem) -> ScoreKind {
    ScoreKind {
        softcap: problem.softcap.is_some(),
        wide_softcap: softcap::is_wide(problem.softcap),
        bias: problem.bias.is_some(),
    }
}

fn score_arguments(problem: &AttentionProblem) -> ScoreArgumentsLaunch {
    ScoreArgumentsLaunch::new(
        problem.scale as f32,
        problem.softcap.unwrap_or(1.0) as f32,
        f32::NEG_INFINITY,
    )
}

/// The launch's cubes by tile, split, head and sequence, `together` heads at a time.
fn grid(
    tiles: usize,
    splits: usize,
    heads: usize,
    batch: usize,
    together: usize,
) -> (usize, GridLaunch) {
    let cubes = tiles * splits * heads * batch;
    let grid = GridLaunch::new(
        tiles as u32,
        splits as u32,
        heads as u32,
        (heads * batch) as u32,
        together.min(heads * batch) as u32,
        cubes as u32,
    );
    (cubes, grid)
}
