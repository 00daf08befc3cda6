//! Numbers written over others, in place: what a captured graph reads anew.

mod kernel;

use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Tensor},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::exact_cube_count;
use cubecl::prelude::CubeDim;
use kernel::copy;

/// Writes the first half of `[2 · count]` integers over `first`, `[count]`, and the second over `second`, which every handle to them sees.
pub(crate) fn overwrite_halves(
    first: Tensor<1, Int>,
    second: Tensor<1, Int>,
    source: Tensor<1, Int>,
) {
    let halves = Halves {
        first: first.into_dispatch(),
        second: second.into_dispatch(),
    };
    let _: Halves<Dispatch> = Dispatch::overwrite_halves(halves, source.into_dispatch());
}

/// Writes `[count]` floats over as many others, which every handle to them sees.
pub(crate) fn overwrite_floats(target: Tensor<1>, source: Tensor<1>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::overwrite_floats(
        target.into_dispatch(),
        source.into_dispatch(),
    ))
}

/// What two halves are written over.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Halves<B: Backend> {
    pub first: IntTensor<B>,
    pub second: IntTensor<B>,
}

/// The kernel as operators of a backend.
#[backend_extension(Cube, Fusion)]
pub trait OverwriteBackend: Backend {
    /// See [`overwrite_halves`].
    #[fusion(meta = |halves, _source| halves.clone())]
    fn overwrite_halves(
        #[extension_type] halves: Halves<Self>,
        source: IntTensor<Self>,
    ) -> Halves<Self>;

    /// See [`overwrite_floats`].
    #[fusion(meta = |target, _source| target.clone())]
    fn overwrite_floats(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl OverwriteBackend for CubeBackend {
    fn overwrite_halves(halves: Halves<Self>, source: IntTensor<Self>) -> Halves<Self> {
        launch(&halves.first, Some(&halves.second), source);
        halves
    }

    fn overwrite_floats(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self> {
        launch(&target, None, source);
        target
    }
}

fn launch(target: &CubeTensor, second: Option<&CubeTensor>, source: CubeTensor) {
    let client = target.client.clone();
    let count = target.meta.shape().num_elements();
    let all = count + second.map_or(0, |second| second.meta.shape().num_elements());
    assert_eq!(source.meta.shape().num_elements(), all, "one for each");
    assert!(
        second.is_none_or(|second| second.meta.shape() == target.meta.shape()),
        "halves"
    );
    assert_eq!(source.dtype, target.dtype, "of one dtype");
    let units = 64;
    let number = dtype_to_storage_type(target.dtype);
    let second = second.cloned();
    // SAFETY: the targets have `count` elements each, the source those of all, side by side.
    unsafe {
        copy::launch_unchecked(
            &client,
            exact_cube_count(&client, count.div_ceil(units)),
            CubeDim::new_1d(units as u32),
            into_contiguous(source).into_tensor_arg(),
            target.clone().into_tensor_arg(),
            second.map(CubeTensor::into_tensor_arg).into(),
            count as u32,
            number,
        );
    }
}
