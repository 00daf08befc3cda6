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
use kernel::{CountsLaunch, copy, go_on};

/// Writes integers over those of three vectors, one after the other, which every handle to them sees.
pub(crate) fn overwrite_three(targets: [Tensor<1, Int>; 3], source: Tensor<1, Int>) {
    let _: Three<Dispatch> = Dispatch::overwrite_three(three(targets), source.into_dispatch());
}

/// Puts the tokens `chosen` in the place of the first of three vectors, as many, and adds one to each number of the others: positions, lengths.
pub(crate) fn go_on_with(inputs: [Tensor<1, Int>; 3], chosen: Tensor<1, Int>) {
    let _: Three<Dispatch> = Dispatch::go_on_with(three(inputs), chosen.into_dispatch());
}

fn three(vectors: [Tensor<1, Int>; 3]) -> Three<Dispatch> {
    let [first, second, third] = vectors.map(Tensor::into_dispatch);
    Three {
        first,
        second,
        third,
    }
}

/// Writes `[count]` floats over as many others, which every handle to them sees.
pub(crate) fn overwrite_floats(target: Tensor<1>, source: Tensor<1>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::overwrite_floats(
        target.into_dispatch(),
        source.into_dispatch(),
    ))
}

/// What is written over.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Three<B: Backend> {
    pub first: IntTensor<B>,
    pub second: IntTensor<B>,
    pub third: IntTensor<B>,
}

/// The kernels as operators of a backend.
#[backend_extension(Cube, Fusion)]
pub trait OverwriteBackend: Backend {
    /// See [`overwrite_three`].
    #[fusion(meta = |three, _source| three.clone())]
    fn overwrite_three(
        #[extension_type] three: Three<Self>,
        source: IntTensor<Self>,
    ) -> Three<Self>;

    /// See [`go_on_with`].
    #[fusion(meta = |three, _chosen| three.clone())]
    fn go_on_with(#[extension_type] three: Three<Self>, chosen: IntTensor<Self>) -> Three<Self>;

    /// See [`overwrite_floats`].
    #[fusion(meta = |target, _source| target.clone())]
    fn overwrite_floats(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl OverwriteBackend for CubeBackend {
    fn overwrite_three(three: Three<Self>, source: IntTensor<Self>) -> Three<Self> {
        let others = [three.second.clone(), three.third.clone()].map(Some);
        launch(&three.first, others, source);
        three
    }

    fn go_on_with(three: Three<Self>, chosen: IntTensor<Self>) -> Three<Self> {
        let client = chosen.client.clone();
        let rows = chosen.meta.shape().num_elements();
        let vectors = [&three.first, &three.second, &three.third];
        for vector in vectors {
            assert_eq!(vector.meta.shape().num_elements(), rows, "one for each");
            assert_eq!(vector.dtype, chosen.dtype, "of one dtype");
        }
        let [tokens, positions, lengths] = vectors.map(|vector| vector.clone().into_tensor_arg());
        let integer = dtype_to_storage_type(chosen.dtype);
        // SAFETY: all four have `rows` numbers, side by side.
        unsafe {
            go_on::launch_unchecked(
                &client,
                exact_cube_count(&client, rows.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                into_contiguous(chosen).into_tensor_arg(),
                tokens,
                positions,
                lengths,
                rows as u32,
                integer,
            );
        }
        three
    }

    fn overwrite_floats(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self> {
        launch(&target, [None, None], source);
        target
    }
}

/// Of a cube.
const UNITS: usize = 64;

fn launch(first: &CubeTensor, others: [Option<CubeTensor>; 2], source: CubeTensor) {
    let client = first.client.clone();
    let count = |target: &CubeTensor| target.meta.shape().num_elements();
    let counts = [Some(first), others[0].as_ref(), others[1].as_ref()];
    let counts = counts.map(|target| target.map_or(0, count));
    let all = counts.iter().sum::<usize>();
    assert_eq!(count(&source), all, "one for each");
    assert_eq!(source.dtype, first.dtype, "of one dtype");
    let number = dtype_to_storage_type(first.dtype);
    let [of_first, of_second, of_third] = counts.map(|count| count as u32);
    let [second, third] = others.map(|target| target.map(CubeTensor::into_tensor_arg));
    // SAFETY: the targets have as many elements as the source, each side by side.
    unsafe {
        copy::launch_unchecked(
            &client,
            exact_cube_count(&client, all.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            into_contiguous(source).into_tensor_arg(),
            first.clone().into_tensor_arg(),
            second.into(),
            third.into(),
            CountsLaunch::new(of_first, of_second, of_third),
            number,
        );
    }
}
