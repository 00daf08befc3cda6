//! The rotation of heads as one operator, forward and backward. The gradient is rotated by the inverse rotation.

mod autodiff;
mod kernel;

use super::RotationTables;
use crate::op::launch::rows_of;
use burn::{
    backend::{
        Backend, Dispatch, backend_extension, cubecl::dtype_to_storage_type, tensor::FloatTensor,
    },
    tensor::Tensor,
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;
use kernel::{RowStridesLaunch, rotate};

/// The number of units in a cube. Each unit rotates one channel pair.
const UNITS: usize = 256;

/// The direction of the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The rotation by the position of the head's token.
    Forward,
    /// The inverse rotation.
    Back,
}

/// Rotates `[batch, positions, heads, head_dim]`. Channel `j` is paired with channel `j + head_dim / 2`. The tables are
/// `[positions, head_dim / 2]` if all sequences have the same positions, and `[batch · positions, head_dim / 2]`
/// otherwise.
pub(crate) fn rotated(heads: Tensor<4>, tables: &RotationTables) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::rotate(
        heads.into_dispatch(),
        tables.cos.clone().into_dispatch(),
        tables.sin.clone().into_dispatch(),
        Direction::Forward,
    ))
}

/// The rotation as an operator of a backend.
#[backend_extension(Cube, Autodiff, Fusion)]
pub trait RotateBackend: Backend {
    /// See [`rotated`].
    #[fusion(meta = |heads, _cos, _sin, _direction| heads.clone())]
    fn rotate(
        heads: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        direction: Direction,
    ) -> FloatTensor<Self>;
}

impl RotateBackend for CubeBackend {
    fn rotate(
        heads: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        direction: Direction,
    ) -> FloatTensor<Self> {
        let heads = rows_of(heads);
        let [cos, sin] = [cos, sin].map(into_contiguous);
        let client = heads.client.clone();
        let shape = heads.meta.shape().clone();
        let strides = heads.meta.strides();
        let strides = RowStridesLaunch::new(strides[0], strides[1], strides[2]);
        let output = empty(&heads, shape.clone(), heads.dtype);
        let [table_rows, pairs] = [cos.meta.shape()[0], cos.meta.shape()[1]];
        let count = shape.num_elements() / 2;
        // SAFETY: unit `i` works only if `i` is below `count`, the number of channel pairs. The unit reads pair `i` of
        // `heads`, and writes pair `i` of `output`. It also reads an element of `cos` and `sin` in a row below
        // `table_rows`.
        unsafe {
            rotate::launch_unchecked(
                &client,
                cube_count(&client, count.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                address_type([&heads, &output]),
                heads.clone().into_tensor_arg(),
                cos.into_tensor_arg(),
                sin.into_tensor_arg(),
                output.clone().into_tensor_arg(),
                strides,
                shape[1],
                shape[2],
                pairs,
                table_rows,
                count,
                match direction {
                    Direction::Forward => 1.0f32,
                    Direction::Back => -1.0,
                },
                dtype_to_storage_type(heads.dtype),
            );
        }
        output
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::op::rope::Rotation;
    use burn::tensor::{DType, Device, Distribution};

    /// Returns the rotated heads, and the gradient with respect to `heads`. The output's dimensions are swapped, so
    /// that the backward gets a gradient that is not contiguous.
    fn outcome(
        heads: &Tensor<4>,
        [cos, sin]: [Tensor<4>; 2],
        gradient: &Tensor<4>,
    ) -> [Vec<f32>; 2] {
        let leaf = heads.clone().autodiff().require_grad();
        let rotation = Rotation { cos, sin };
        let turned = match crate::op::runs(&leaf.device(), leaf.dtype()) {
            true => rotated(leaf.clone(), &rotation.tables()).swap_dims(1, 2),
            false => rotation.apply(leaf.clone().swap_dims(1, 2)),
        };
        let gradients = (turned.clone() * gradient.clone().autodiff())
            .sum()
            .backward();
        [
            turned.inner(),
            leaf.grad(&gradients).expect("the leaf has a gradient"),
        ]
        .map(|tensor| tensor.into_data().iter::<f32>().collect())
    }

    #[test]
    fn rotated_and_gradient_match_reference() {
        let device = Device::default();
        device.seed(4);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if !device.supports_dtype(dtype) {
                continue;
            }
            // Test tables that all sequences share, and tables with separate rows for each sequence.
            for (batch, table_batch) in [(2, 1), (3, 3)] {
                let (positions, heads, pairs) = (5, 3, 4);
                let random = |shape: [usize; 4]| {
                    let numbers = Distribution::Uniform(-1.0, 1.0);
                    Tensor::<4>::random(shape, numbers, (&device, DType::F32)).cast(dtype)
                };
                let input = random([batch, positions, heads, 2 * pairs]);
                let tables = [(); 2].map(|()| random([table_batch, 1, positions, pairs]));
                let gradient = random([batch, heads, positions, 2 * pairs]);
                let found = outcome(&input, tables.clone(), &gradient);
                let flex = |tensor: &Tensor<4>| {
                    let data = tensor.clone().cast(DType::F32).into_data();
                    Tensor::<4>::from_data(data, (&Device::flex(), DType::F32))
                };
                let tables = tables.each_ref().map(flex);
                let expected = outcome(&flex(&input), tables, &flex(&gradient));
                let rounding = match dtype {
                    DType::F32 => 1e-6,
                    DType::F16 => 1e-3,
                    _ => 8e-3,
                };
                for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                    let error = (found - expected).abs();
                    assert!(
                        error <= rounding,
                        "{dtype:?}: got {found}, expected {expected}"
                    );
                }
            }
        }
    }
}
