//! Launches the backward's kernels, one after the other.

use crate::AttentionProblem;
use crate::arguments::{Extras, grid, score_arguments};
use crate::backend::{AttentionGradients, AttentionInputs, AttentionSaved};
use crate::passes::backward::{BackwardPass, Gradients, blocks_of_bias};
use crate::passes::delta::form::LogsumexpForm;
use crate::passes::lengths::{Blocks, Places};
use crate::select::BackwardRequest;
use crate::tile::direct::{Division, division};
use crate::tile::tiles::UnitTiles;
use crate::tiled::backward::key_value::key_value_gradient;
use crate::tiled::backward::query::query_gradient;
use crate::tiled::backward::together::{
    OperandPlacesLaunch, WindowLaunch, all_gradients, pack_operand, pairs_per_launch,
};
use crate::tiled::plan::{BackwardPlan, GradientKernel, Packing};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

pub(crate) fn launch(
    inputs: AttentionInputs<CubeBackend>,
    saved: AttentionSaved<CubeBackend>,
    problem: &AttentionProblem,
    plan: BackwardPlan,
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
    let blocks: Vec<_> = of_kernels
        .chain(blocks_of_bias(plan.bias, request))
        .collect();
    let (extras, places) = Extras::new(&inputs, problem, &blocks);
    let pass = BackwardPass::new(
        inputs,
        saved,
        extras,
        problem,
        plan.query.vector,
        LogsumexpForm::Apart,
    );

    let mut gradients = Gradients::default();
    for (kernel, places) in kernels.iter().zip(&places) {
        match kernel {
            GradientKernel::Query => gradients.query = Some(pass.query(plan.query, *places)),
            GradientKernel::KeyValue => {
                let (key, value) = pass.key_value(plan.key_value, *places);
                gradients.key = Some(key);
                gradients.value = Some(value);
            }
            GradientKernel::Together { parts } => {
                gradients = pass.together(plan.key_value, *places, *parts, request);
            }
        }
    }
    pass.with_rest(gradients, plan.bias, places.last(), request)
}

/// The launches of all gradients together: no more pairs of tiles a cube than its loops may take.
fn windows(
    problem: &AttentionProblem,
    tiles: &UnitTiles,
    division: Division,
    parts: usize,
    request: BackwardRequest,
) -> Vec<WindowLaunch> {
    let pairs = pairs_per_launch(tiles, division, problem.head_dim, problem.value_dim);
    let key_tiles = problem.kv_len.div_ceil(tiles.rows);
    let blocks = problem.q_len.div_ceil(tiles.columns());
    let blocks_at_once = blocks.clamp(1, pairs);
    let tiles_at_once = parts * (pairs / blocks_at_once);
    // In the order in which the kernel makes them.
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
    fn query(&self, tiles: UnitTiles, places: Places) -> CubeTensor {
        let (problem, inputs, extras) = (self.problem, &self.inputs, &self.extras);
        let client = self.rows.client.clone();
        let gradient = empty(&self.rows, inputs.query.meta.shape().clone(), problem.dtype);
        let (cubes, grid) = grid(
            problem.q_len.div_ceil(tiles.rows),
            1,
            problem.q_heads,
            problem.batch,
            usize::MAX,
        );
        // SAFETY: reads and writes stay inside the shapes, whose sizes the kernel was given.
        unsafe {
            query_gradient::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(tiles.units as u32),
                self.addresses(&[&gradient]),
                Self::arg(&inputs.query),
                Self::arg(&inputs.key),
                Self::arg(&inputs.value),
                Self::arg(&self.output_gradient),
                Self::arg(&self.rows),
                extras.mask().into(),
                extras.bias().into(),
                extras.lengths_and_ids().into(),
                Self::arg(&gradient),
                grid,
                places.extent(problem),
                score_arguments(problem),
                problem.group() as u32,
                problem.head_dim as u32,
                problem.value_dim as u32,
                self.kind(tiles),
                dtype_to_storage_type(problem.dtype),
                dtype_to_storage_type(tiles.product_dtype()),
                extras.mask_element,
                extras.bias_element,
                tiles.vector,
            );
        }
        gradient
    }

    fn key_value(&self, tiles: UnitTiles, places: Places) -> (CubeTensor, CubeTensor) {
        let (problem, inputs, extras) = (self.problem, &self.inputs, &self.extras);
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
        // SAFETY: as for the query's gradient.
        unsafe {
            key_value_gradient::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(tiles.units as u32),
                self.addresses(&[&key_gradient, &value_gradient]),
                Self::arg(&inputs.query),
                Self::arg(&inputs.key),
                Self::arg(&inputs.value),
                Self::arg(&self.output_gradient),
                Self::arg(&self.rows),
                extras.mask().into(),
                extras.bias().into(),
                extras.lengths_and_ids().into(),
                Self::arg(&key_gradient),
                Self::arg(&value_gradient),
                grid,
                places.extent(problem),
                score_arguments(problem),
                problem.group() as u32,
                problem.head_dim as u32,
                problem.value_dim as u32,
                self.kind(tiles),
                dtype_to_storage_type(problem.dtype),
                dtype_to_storage_type(tiles.product_dtype()),
                extras.mask_element,
                extras.bias_element,
                tiles.vector,
            );
        }
        (key_gradient, value_gradient)
    }

    fn together(
        &self,
        tiles: UnitTiles,
        places: Places,
        parts: usize,
        request: BackwardRequest,
    ) -> Gradients {
        let (problem, inputs, extras) = (self.problem, &self.inputs, &self.extras);
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
        let division = division(
            tiles.units,
            tiles.rows,
            problem.head_dim.max(problem.value_dim),
        );
        for window in windows(problem, &tiles, division, parts, request) {
            let (cubes, grid) = grid(1, parts, problem.kv_heads, problem.batch, usize::MAX);
            // SAFETY: as for the query's gradient.
            unsafe {
                all_gradients::launch_unchecked(
                    &client,
                    cube_count(&client, cubes),
                    CubeDim::new_1d(tiles.units as u32),
                    self.addresses(&[&operands, &gradients]),
                    Self::arg(&operands),
                    Self::arg(&self.rows),
                    extras.mask().into(),
                    extras.bias().into(),
                    extras.lengths_and_ids().into(),
                    Self::arg(&gradients),
                    grid,
                    places.extent(problem),
                    score_arguments(problem),
                    problem.group() as u32,
                    problem.head_dim as u32,
                    problem.value_dim as u32,
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
                    division,
                    self.kind(tiles),
                    extras.mask_element,
                    extras.bias_element,
                    tiles.vector,
                );
            }
        }
        let sum = |wanted: bool, first, parts, input, rows| {
            wanted.then(|| self.sum(&gradients, first, parts, input, rows, tiles.vector))
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

    /// Copies `tensor` to the operands from `first` on, with `pitch` elements a row.
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
        // SAFETY: one unit a vector of the tensor, the rest stops at once; the operands have room for it.
        unsafe {
            pack_operand::launch_unchecked(
                &client,
                cube_count(&client, vectors.div_ceil(units)),
                CubeDim::new_1d(units as u32),
                address_type([tensor, operands]),
                Self::arg(tensor),
                Self::arg(operands),
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
