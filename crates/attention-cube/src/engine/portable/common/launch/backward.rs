//! The launches of the backward kernels, which run one after another.

use crate::auxiliary::lengths::{Blocks, BoundsOffsets};
use crate::auxiliary::reduce::sum_parts;
use crate::engine::backward_pass::{BackwardPass, Gradients, RestPlans};
use crate::engine::optional_inputs::OptionalInputs;
use crate::engine::portable::common::backward::fused::{
    OperandPlacesLaunch, WindowLaunch, all_gradients, pack_operand, pairs_per_launch,
};
use crate::engine::portable::common::backward::key_value::key_value_gradient;
use crate::engine::portable::common::backward::query::query_gradient;
use crate::engine::portable::common::plan::{GradientKernel, Packing, PortableBackwardPlan};
use crate::kernel_args::head_sizes;
use crate::kernel_args::{grid, tensor_arg};
use crate::math::lse_form::LogsumexpForm;
use crate::problem::AttentionProblem;
use crate::tile_ops::direct::{SumTiling, sum_tiling};
use crate::tile_ops::tiles::UnitTiles;
use crate::types::request::BackwardRequest;
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionSaved};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// Launches the backward for the requested gradients. Each gradient has the shape and dtype of its input.
pub(crate) fn launch(
    inputs: AttentionInputs<CubeBackend>,
    saved: AttentionSaved<CubeBackend>,
    problem: &AttentionProblem,
    plan: PortableBackwardPlan,
    request: BackwardRequest,
) -> AttentionGradients<CubeBackend> {
    let kernels = plan.kernels(request);
    log::debug!("attention backward: {kernels:?} for {request:?}");
    let of_kernels = kernels.iter().map(|kernel| match kernel {
        GradientKernel::Query => Blocks::of_queries(&plan.query),
        GradientKernel::KeyValue | GradientKernel::Together { .. } => {
            Blocks::of_keys(&plan.key_value)
        }
    });
    let rest = RestPlans::new(plan.bias, plan.table, request);
    let blocks: Vec<_> = of_kernels.chain(rest.blocks()).collect();
    let (optional_inputs, offsets) = OptionalInputs::new(&inputs, problem, &blocks);
    let pass = BackwardPass::new(
        inputs,
        saved,
        optional_inputs,
        problem,
        plan.query.vector,
        LogsumexpForm::Apart,
    );

    let mut gradients = Gradients::default();
    for (kernel, offsets) in kernels.iter().zip(&offsets) {
        match kernel {
            GradientKernel::Query => gradients.query = Some(pass.query(plan.query, *offsets)),
            GradientKernel::KeyValue => {
                let (key, value) = pass.key_value(plan.key_value, *offsets);
                gradients.key = Some(key);
                gradients.value = Some(value);
            }
            GradientKernel::Together { parts } => {
                gradients = pass.together(plan.key_value, *offsets, *parts, request);
            }
        }
    }
    pass.with_rest(gradients, rest, &offsets[kernels.len()..], request)
}

/// Returns the windows of the kernel that computes all gradients. A window holds the pairs of a key tile and a query
/// block that one launch processes. The windows are so small that no cube exceeds the iteration limit of software
/// drivers.
fn windows(
    problem: &AttentionProblem,
    tiles: &UnitTiles,
    sum_tiling: SumTiling,
    parts: usize,
    request: BackwardRequest,
) -> Vec<WindowLaunch> {
    let pairs = pairs_per_launch(tiles, sum_tiling, problem);
    let key_tiles = problem.kv_len.div_ceil(tiles.rows);
    let blocks = problem.q_len.div_ceil(tiles.columns());
    let blocks_at_once = blocks.clamp(1, pairs);
    let tiles_at_once = parts * (pairs / blocks_at_once);
    // List the gradients in the order in which the kernel computes them.
    let wanted = [request.value, request.key, request.query];
    let products = wanted.iter().position(|wanted| *wanted).unwrap_or(0);
    let end_products = wanted
        .iter()
        .rposition(|wanted| *wanted)
        .map_or(0, |last| last + 1);
    let mut windows = Vec::new();
    for group_head in 0..problem.group() {
        for first_tile in (0..key_tiles).step_by(tiles_at_once) {
            for first_block in (0..blocks).step_by(blocks_at_once) {
                windows.push(WindowLaunch::new(
                    first_tile as u32,
                    (first_tile + tiles_at_once).min(key_tiles) as u32,
                    first_block as i32,
                    (first_block + blocks_at_once) as i32,
                    group_head as u32,
                    products as u32,
                    end_products as u32,
                ));
            }
        }
    }
    windows
}

impl BackwardPass<'_> {
    fn query(&self, tiles: UnitTiles, offsets: BoundsOffsets) -> CubeTensor {
        let (problem, inputs, optional_inputs) =
            (self.problem, &self.inputs, &self.optional_inputs);
        let client = self.rows.client.clone();
        let gradient = empty(&self.rows, inputs.query.meta.shape().clone(), problem.dtype);
        let (cubes, grid) = grid(
            problem.q_len.div_ceil(tiles.rows),
            1,
            problem.q_heads,
            problem.batch,
            usize::MAX,
        );
        // SAFETY: the kernel reads queries and their output gradients at rows below `q_len`, and keys and values at rows
        // below `kv_len`. It writes `gradient` at rows below `q_len`. The launch grid limits the indices of heads and
        // sequences.
        unsafe {
            query_gradient::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(tiles.units as u32),
                self.addresses(&[&gradient]),
                self.operands(),
                optional_inputs.scoring(offsets, problem),
                tensor_arg(&gradient),
                grid,
                head_sizes(problem),
                self.kind(tiles),
                [
                    dtype_to_storage_type(problem.dtype),
                    dtype_to_storage_type(tiles.product_dtype()),
                    optional_inputs.mask_element,
                    optional_inputs.bias_element,
                ],
                tiles.vector,
            );
        }
        gradient
    }

    fn key_value(&self, tiles: UnitTiles, offsets: BoundsOffsets) -> (CubeTensor, CubeTensor) {
        let (problem, inputs, optional_inputs) =
            (self.problem, &self.inputs, &self.optional_inputs);
        let client = self.rows.client.clone();
        let key_gradient = empty(&self.rows, inputs.key.meta.shape().clone(), problem.dtype);
        let value_gradient = empty(&self.rows, inputs.value.meta.shape().clone(), problem.dtype);
        let (cubes, grid) = grid(
            problem.kv_len.div_ceil(tiles.rows),
            1,
            problem.kv_heads,
            problem.batch,
            usize::MAX,
        );
        // SAFETY: the kernel reads queries and their output gradients at rows below `q_len`, and keys and values at rows
        // below `kv_len`. It writes both gradients at rows below `kv_len`. The launch grid limits the indices of heads and
        // sequences.
        unsafe {
            key_value_gradient::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(tiles.units as u32),
                self.addresses(&[&key_gradient, &value_gradient]),
                self.operands(),
                optional_inputs.scoring(offsets, problem),
                tensor_arg(&key_gradient),
                tensor_arg(&value_gradient),
                grid,
                head_sizes(problem),
                self.kind(tiles),
                [
                    dtype_to_storage_type(problem.dtype),
                    dtype_to_storage_type(tiles.product_dtype()),
                    optional_inputs.mask_element,
                    optional_inputs.bias_element,
                ],
                tiles.vector,
            );
        }
        (key_gradient, value_gradient)
    }

    fn together(
        &self,
        tiles: UnitTiles,
        offsets: BoundsOffsets,
        parts: usize,
        request: BackwardRequest,
    ) -> Gradients {
        let (problem, inputs, optional_inputs) =
            (self.problem, &self.inputs, &self.optional_inputs);
        let client = self.rows.client.clone();
        let packing = Packing::new(problem, parts);
        let Packing {
            head_pitch,
            value_pitch,
            ..
        } = packing;
        let operands = empty(&self.rows, [packing.operands], DType::F32);
        for (tensor, first, pitch) in [
            (&inputs.query, 0, head_pitch),
            (&inputs.key, packing.key, head_pitch),
            (&inputs.value, packing.value, value_pitch),
            (&self.output_gradient, packing.output_gradient, value_pitch),
        ] {
            self.pack(tensor, &operands, first, pitch, tiles.vector);
        }
        let gradients = zeros_client(
            client.clone(),
            self.rows.device.clone(),
            Shape::new([packing.gradients]),
            DType::F32,
        );
        let sum_tiling = sum_tiling(
            tiles.units,
            tiles.rows,
            problem.head_dim.max(problem.value_dim),
        );
        for window in windows(problem, &tiles, sum_tiling, parts, request) {
            let (cubes, grid) = grid(1, parts, problem.kv_heads, problem.batch, usize::MAX);
            // SAFETY: the kernel accesses `operands` and `gradients` at the offsets of `packing`, at rows below `q_len` or
            // `kv_len`. `packing` reserves both buffers. The launch grid limits the indices of heads, sequences and partial
            // gradients.
            unsafe {
                all_gradients::launch_unchecked(
                    &client,
                    cube_count(&client, cubes),
                    CubeDim::new_1d(tiles.units as u32),
                    self.addresses(&[&operands, &gradients]),
                    tensor_arg(&operands),
                    tensor_arg(&self.rows),
                    optional_inputs.scoring(offsets, problem),
                    tensor_arg(&gradients),
                    grid,
                    head_sizes(problem),
                    OperandPlacesLaunch::new(
                        packing.key,
                        packing.value,
                        packing.output_gradient,
                        head_pitch as u32,
                        value_pitch as u32,
                        packing.query_gradient,
                        packing.key_gradient,
                        packing.value_gradient,
                    ),
                    window,
                    sum_tiling,
                    self.kind(tiles),
                    [optional_inputs.mask_element, optional_inputs.bias_element],
                    tiles.vector,
                );
            }
        }
        let sum = |wanted: bool, first, parts, input, rows| {
            wanted.then(|| sum_parts(&gradients, first, parts, input, rows, tiles.vector))
        };
        Gradients {
            query: sum(request.query, 0, parts, &inputs.query, Some(&self.rows)),
            key: sum(request.key, packing.key_gradient, 1, &inputs.key, None),
            value: sum(
                request.value,
                packing.value_gradient,
                1,
                &inputs.value,
                None,
            ),
        }
    }

    /// Copies `tensor` into the buffer `operands`, starting at element `first`. Rows of the copy start `pitch` elements
    /// apart.
    fn pack(
        &self,
        tensor: &CubeTensor,
        operands: &CubeTensor,
        first: usize,
        pitch: usize,
        vector: usize,
    ) {
        let client = self.rows.client.clone();
        let shape = tensor.meta.shape();
        let vectors = shape.num_elements() / vector;
        let units = 128;
        // SAFETY: units whose index is not below `vectors` return at once. Every other unit reads one vector of `tensor`,
        // and writes it to `operands` after `first`, where the caller has reserved rows of `pitch` elements.
        unsafe {
            pack_operand::launch_unchecked(
                &client,
                cube_count(&client, vectors.div_ceil(units)),
                CubeDim::new_1d(units as u32),
                address_type([tensor, operands]),
                tensor_arg(tensor),
                tensor_arg(operands),
                first,
                vectors,
                shape[1] as u32,
                shape[2] as u32,
                shape[3] as u32,
                pitch as u32,
                dtype_to_storage_type(tensor.dtype),
                vector,
            );
        }
    }
}
