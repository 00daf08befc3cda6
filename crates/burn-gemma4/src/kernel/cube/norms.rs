//! Launches norms and their gradients, alone or with sums of the residual stream.

use super::{addresses, at_least, cube_count, empty, team, vector_size};
use crate::kernel::{
    NORM_PARTS, NormBackend, NormGradients, Residual, norm::norm, norm_gradient::norm_gradient,
    residual::residual,
};
use burn::{
    backend::{cubecl::dtype_to_storage_type, tensor::FloatTensor},
    tensor::DType,
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::prelude::CubeDim;

pub(super) fn launch_residual(
    stream: CubeTensor,
    added: CubeTensor,
    weight: CubeTensor,
    scalar: Option<CubeTensor>,
    next_weight: Option<CubeTensor>,
    epsilon: f64,
) -> Residual<CubeBackend> {
    let client = stream.client.clone();
    let (stream, added) = (into_contiguous(stream), into_contiguous(added));
    let shape = [stream.meta.shape()[0], stream.meta.shape()[1]];
    let [rows, columns] = shape;
    let vector = vector_size(&client, stream.dtype.size(), &[columns]);
    let vectors = columns / vector;
    let sum = empty(&stream, shape, stream.dtype);
    let normed = empty(&stream, shape, stream.dtype);
    let element = dtype_to_storage_type(stream.dtype);
    // SAFETY: a cube reads and writes one of `rows` rows of `vectors` vectors, which all tensors have.
    unsafe {
        residual::launch_unchecked(
            &client,
            at_least(&client, rows),
            CubeDim::new_1d(team(&client, vectors).units as u32),
            addresses([&stream]),
            stream.into_tensor_arg(),
            added.into_tensor_arg(),
            into_contiguous(weight).into_tensor_arg(),
            scalar.map(CubeTensor::into_tensor_arg).into(),
            next_weight
                .map(|weight| into_contiguous(weight).into_tensor_arg())
                .into(),
            sum.clone().into_tensor_arg(),
            normed.clone().into_tensor_arg(),
            rows as u32,
            vectors as u32,
            columns as f32,
            epsilon as f32,
            team(&client, vectors),
            element,
            vector,
        );
    }
    Residual {
        stream: sum,
        normed,
    }
}

pub(super) fn launch_norm(
    input: CubeTensor,
    weight: Option<CubeTensor>,
    epsilon: f64,
) -> CubeTensor {
    let client = input.client.clone();
    let input = into_contiguous(input);
    let shape = [input.meta.shape()[0], input.meta.shape()[1]];
    let [rows, columns] = shape;
    let vector = vector_size(&client, input.dtype.size(), &[columns]);
    let vectors = columns / vector;
    let output = empty(&input, shape, input.dtype);
    let of_weight = weight.as_ref().map_or(input.dtype, |weight| weight.dtype);
    // SAFETY: a cube reads and writes one of `rows` rows of `vectors` vectors, which all tensors have.
    unsafe {
        norm::launch_unchecked(
            &client,
            at_least(&client, rows),
            CubeDim::new_1d(team(&client, vectors).units as u32),
            addresses([&input]),
            input.clone().into_tensor_arg(),
            weight
                .map(|weight| into_contiguous(weight).into_tensor_arg())
                .into(),
            output.clone().into_tensor_arg(),
            rows as u32,
            vectors as u32,
            columns as f32,
            epsilon as f32,
            team(&client, vectors),
            dtype_to_storage_type(input.dtype),
            dtype_to_storage_type(of_weight),
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
    let parts = NORM_PARTS.min(rows);
    let of_input = empty(&input, shape, input.dtype);
    let of_weight = empty(&input, [parts, columns], DType::F32);
    let element = dtype_to_storage_type(input.dtype);
    let weight_element = dtype_to_storage_type(weight.dtype);
    // SAFETY: a cube reads and writes rows below `rows` of `vectors` vectors, which all tensors have, and its part.
    unsafe {
        norm_gradient::launch_unchecked(
            &client,
            cube_count(&client, parts),
            CubeDim::new_1d(team.units as u32),
            addresses([&input]),
            input.into_tensor_arg(),
            into_contiguous(weight).into_tensor_arg(),
            gradient.into_tensor_arg(),
            of_input.clone().into_tensor_arg(),
            of_weight.clone().into_tensor_arg(),
            rows as u32,
            vectors as u32,
            columns as f32,
            epsilon as f32,
            vectors.div_ceil(team.units),
            team,
            element,
            weight_element,
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
