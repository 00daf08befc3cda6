//! Launches the residual addition and the next norm.

use super::{
    AddNormedBackend, Residual, ResidualBackend, Scalar,
    kernel::{ResidualPlan, residual_pdl},
};
use crate::op::launch::{team, vector_size};
use crate::op::norm::kernel::NormScalarsLaunch;
use burn::backend::{cubecl::dtype_to_storage_type, tensor::FloatTensor};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cube_kit::pdl::{LOAD_BYTES, supports_pdl};
use cubecl::prelude::CubeDim;

impl ResidualBackend for CubeBackend {
    fn residual(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        launch(stream, added, weight, None, None, epsilon).stream
    }

    fn residual_norm(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        next_weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> Residual<Self> {
        launch(stream, added, weight, None, Some(next_weight), epsilon)
    }

    fn residual_scale_norm(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        scalar: FloatTensor<Self>,
        next_weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> Residual<Self> {
        let next = Some(next_weight);
        launch(stream, added, weight, Some(scalar), next, epsilon)
    }
}

impl AddNormedBackend for CubeBackend {
    fn add_normed(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        scalar: Scalar<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let scalar = match scalar {
            Scalar::Absent => None,
            Scalar::Present(scalar) => Some(scalar),
        };
        launch(stream, added, weight, scalar, None, epsilon).stream
    }
}

fn launch(
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
    let team = team(&client, vectors);
    // Read the parameters before the previous launch has ended only if all of them are contiguous. Otherwise a launch
    // first copies a parameter to make it contiguous, and the kernel must wait for this launch.
    let stay = [Some(&weight), next_weight.as_ref(), scalar.as_ref()];
    let stay = stay
        .into_iter()
        .flatten()
        .all(|weight| !weight.meta.is_tiled() && weight.meta.strides().last() == Some(&1));
    let pdl = supports_pdl(&client);
    let reads_ahead = pdl && stay;
    let plan = ResidualPlan {
        team,
        held: vectors.div_ceil(team.units),
        pdl,
        reads_ahead,
        loads_now: reads_ahead && vector * stream.dtype.size() == LOAD_BYTES,
    };
    let element = dtype_to_storage_type(stream.dtype);
    // SAFETY: cube `r` works only if `r` is below `rows`. The cube reads row `r` of `stream` and `added` and writes row
    // `r` of `sum` and `normed`. Each row and each norm weight have `vectors` vectors.
    unsafe {
        residual_pdl::launch_unchecked(
            &client,
            cube_count(&client, rows),
            CubeDim::new_1d(team.units as u32),
            address_type([&stream]),
            stream.into_tensor_arg(),
            added.into_tensor_arg(),
            into_contiguous(weight).into_tensor_arg(),
            scalar.map(CubeTensor::into_tensor_arg).into(),
            next_weight
                .map(|weight| into_contiguous(weight).into_tensor_arg())
                .into(),
            sum.clone().into_tensor_arg(),
            normed.clone().into_tensor_arg(),
            NormScalarsLaunch::new(rows as u32, vectors as u32, columns as f32, epsilon as f32),
            plan,
            element,
            vector,
        );
    }
    Residual {
        stream: sum,
        normed,
    }
}
