//! Numbers written over others, in place: what a captured graph reads anew.

mod kernel;

use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Tensor},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::exact_cube_count;
use cubecl::prelude::CubeDim;
use kernel::copy;

/// Writes `[count]` integers over as many others, which every handle to them sees.
pub(crate) fn overwrite(target: Tensor<1, Int>, source: Tensor<1, Int>) -> Tensor<1, Int> {
    Tensor::from_dispatch(Dispatch::overwrite(
        target.into_dispatch(),
        source.into_dispatch(),
    ))
}

/// Writes `[count]` floats over as many others, which every handle to them sees.
pub(crate) fn overwrite_floats(target: Tensor<1>, source: Tensor<1>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::overwrite_floats(
        target.into_dispatch(),
        source.into_dispatch(),
    ))
}

/// The kernel as operators of a backend.
#[backend_extension(Cube, Fusion)]
pub trait OverwriteBackend: Backend {
    /// See [`overwrite`].
    #[fusion(meta = |target, _source| target.clone())]
    fn overwrite(target: IntTensor<Self>, source: IntTensor<Self>) -> IntTensor<Self>;

    /// See [`overwrite_floats`].
    #[fusion(meta = |target, _source| target.clone())]
    fn overwrite_floats(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl OverwriteBackend for CubeBackend {
    fn overwrite(target: IntTensor<Self>, source: IntTensor<Self>) -> IntTensor<Self> {
        launch(target, source)
    }

    fn overwrite_floats(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self> {
        launch(target, source)
    }
}

fn launch(target: CubeTensor, source: CubeTensor) -> CubeTensor {
    let client = target.client.clone();
    let count = target.meta.shape().num_elements();
    assert_eq!(source.meta.shape(), target.meta.shape(), "one for each");
    assert_eq!(source.dtype, target.dtype, "of one dtype");
    let units = 64;
    let number = dtype_to_storage_type(target.dtype);
    // SAFETY: both tensors have `count` elements, side by side.
    unsafe {
        copy::launch_unchecked(
            &client,
            exact_cube_count(&client, count.div_ceil(units)),
            CubeDim::new_1d(units as u32),
            into_contiguous(source).into_tensor_arg(),
            target.clone().into_tensor_arg(),
            count as u32,
            number,
        );
    }
    target
}
