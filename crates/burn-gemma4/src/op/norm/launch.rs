//! Launches RMS norms and their gradients.

use super::{
    NormBackend, NormGradients, NormalizeBackend, PARTS,
    gradient::norm_gradient,
    kernel::{NormPlan, NormScalarsLaunch, norm_pdl},
};
use crate::op::launch::{team, vector_size};
use burn::{
    backend::{cubecl::dtype_to_storage_type, tensor::FloatTensor},
    tensor::DType,
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty, exact_cube_count};
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;

fn launch_norm(input: CubeTensor, weight: Option<CubeTensor>, epsilon: f64) -> CubeTensor {
    let client = input.client.clone();
    let input = into_contiguous(input);
    let shape = [input.meta.shape()[0], input.meta.shape()[1]];
    let [rows, columns] = shape;
    let vector = vector_size(&client, input.dtype.size(), &[columns]);
    let vectors = columns / vector;
    let output = empty(&input, shape, input.dtype);
    let team = team(&client, vectors);
    let of_weight = weight.as_ref().map_or(input.dtype, |weight| weight.dtype);
    let plan = NormPlan {
        team,
        held: vectors.div_ceil(team.units),
        pdl: supports_pdl(&client),
    };
    // SAFETY: cube `r` works only if `r` is below `rows`. The cube reads row `r` of `input` and writes row `r` of
    // `output`. Each row and `weight` have `vectors` vectors.
    unsafe {
        norm_pdl::launch_unchecked(
            &client,
            cube_count(&client, rows),
            CubeDim::new_1d(team.units as u32),
            address_type([&input]),
            input.clone().into_tensor_arg(),
            weight
                .map(|weight| into_contiguous(weight).into_tensor_arg())
                .into(),
            output.clone().into_tensor_arg(),
            NormScalarsLaunch::new(rows as u32, vectors as u32, columns as f32, epsilon as f32),
            plan,
            [
                dtype_to_storage_type(input.dtype),
                dtype_to_storage_type(of_weight),
            ],
            vector,
        );
    }
    output
}

fn launch_norm_gradient(
    input: CubeTensor,
    weight: CubeTensor,
    gradient: CubeTensor,
    epsilon: f64,
) -> NormGradients<CubeBackend> {
    let client = input.client.clone();
    let (input, gradient) = (into_contiguous(input), into_contiguous(gradient));
    let shape = [input.meta.shape()[0], input.meta.shape()[1]];
    let [rows, columns] = shape;
    let vector = vector_size(&client, size_of::<f32>(), &[columns]);
    let vectors = columns / vector;
    let team = team(&client, vectors);
    let parts = PARTS.min(rows);
    let of_input = empty(&input, shape, input.dtype);
    let of_weight = empty(&input, [parts, columns], DType::F32);
    let element = dtype_to_storage_type(input.dtype);
    let weight_element = dtype_to_storage_type(weight.dtype);
    // SAFETY: each cube reads rows below `rows` of `input` and `gradient`, and writes rows below `rows` of `of_input`.
    // Each row and `weight` have `vectors` vectors. Each of the `parts` cubes writes its own row of `of_weight`, which
    // has `parts` rows.
    unsafe {
        norm_gradient::launch_unchecked(
            &client,
            exact_cube_count(&client, parts),
            CubeDim::new_1d(team.units as u32),
            address_type([&input]),
            input.into_tensor_arg(),
            into_contiguous(weight).into_tensor_arg(),
            gradient.into_tensor_arg(),
            of_input.clone().into_tensor_arg(),
            of_weight.clone().into_tensor_arg(),
            NormScalarsLaunch::new(rows as u32, vectors as u32, columns as f32, epsilon as f32),
            vectors.div_ceil(team.units),
            team,
            [element, weight_element],
            vector,
        );
    }
    NormGradients {
        input: of_input,
        weight: of_weight,
    }
}

impl NormBackend for CubeBackend {
    fn norm(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        launch_norm(input, Some(weight), epsilon)
    }

    fn norm_gradients(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
    ) -> NormGradients<Self> {
        launch_norm_gradient(input, weight, gradient, epsilon)
    }
}

impl NormalizeBackend for CubeBackend {
    fn normalize(input: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
        launch_norm(input, None, epsilon)
    }
}
