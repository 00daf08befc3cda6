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
use kernel::{copy, go_on};

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

/// Puts the tokens `chosen`, `[rows]`, in the place of those of `inputs`, `[2 · rows]`, behind which are their positions, which become the next.
pub(crate) fn go_on_with(inputs: Tensor<1, Int>, chosen: Tensor<1, Int>) -> Tensor<1, Int> {
    Tensor::from_dispatch(Dispatch::go_on_with(
        inputs.into_dispatch(),
        chosen.into_dispatch(),
    ))
}

/// The kernels as operators of a backend.
#[backend_extension(Cube, Fusion)]
pub trait OverwriteBackend: Backend {
    /// See [`overwrite`].
    #[fusion(meta = |target, _source| target.clone())]
    fn overwrite(target: IntTensor<Self>, source: IntTensor<Self>) -> IntTensor<Self>;

    /// See [`overwrite_floats`].
    #[fusion(meta = |target, _source| target.clone())]
    fn overwrite_floats(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`go_on_with`].
    #[fusion(meta = |inputs, _chosen| inputs.clone())]
    fn go_on_with(inputs: IntTensor<Self>, chosen: IntTensor<Self>) -> IntTensor<Self>;
}

impl OverwriteBackend for CubeBackend {
    fn overwrite(target: IntTensor<Self>, source: IntTensor<Self>) -> IntTensor<Self> {
        launch(target, source)
    }

    fn overwrite_floats(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self> {
        launch(target, source)
    }

    fn go_on_with(inputs: IntTensor<Self>, chosen: IntTensor<Self>) -> IntTensor<Self> {
        let client = inputs.client.clone();
        let rows = chosen.meta.shape().num_elements();
        assert_eq!(inputs.meta.shape().num_elements(), 2 * rows, "two for each");
        assert_eq!(inputs.dtype, chosen.dtype, "of one dtype");
        let integer = dtype_to_storage_type(inputs.dtype);
        // SAFETY: there are `rows` tokens, and as many tokens and positions, side by side.
        unsafe {
            go_on::launch_unchecked(
                &client,
                exact_cube_count(&client, rows.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                into_contiguous(chosen).into_tensor_arg(),
                inputs.clone().into_tensor_arg(),
                rows as u32,
                integer,
            );
        }
        inputs
    }
}

/// Of a cube.
const UNITS: usize = 64;

fn launch(target: CubeTensor, source: CubeTensor) -> CubeTensor {
    let client = target.client.clone();
    let count = target.meta.shape().num_elements();
    assert_eq!(source.meta.shape(), target.meta.shape(), "one for each");
    assert_eq!(source.dtype, target.dtype, "of one dtype");
    let number = dtype_to_storage_type(target.dtype);
    // SAFETY: both tensors have `count` elements, side by side.
    unsafe {
        copy::launch_unchecked(
            &client,
            exact_cube_count(&client, count.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            into_contiguous(source).into_tensor_arg(),
            target.clone().into_tensor_arg(),
            count as u32,
            number,
        );
    }
    target
}
