//! Numbers written over others, in place: what a captured graph reads anew.

mod kernel;

use crate::op::launch::{rows_of, vector_size};
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, TensorMetadata, backend_extension,
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Tensor},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count};
use cubecl::prelude::CubeDim;
use kernel::{CountsLaunch, RowsLaunch, begin_round, copy, copy_each, go_on, take_guesses};

/// Writes integers over those of three vectors, one after the other, which every handle to them sees.
pub(crate) fn overwrite_three(targets: [Tensor<1, Int>; 3], source: Tensor<1, Int>) {
    let _: Three<Dispatch> = Dispatch::overwrite_three(three(targets), source.into_dispatch());
}

/// Puts the tokens `chosen` in the place of the first of three vectors, as many, and adds one to each number of the others: positions, lengths.
pub(crate) fn go_on_with(inputs: [Tensor<1, Int>; 3], chosen: Tensor<1, Int>) {
    let _: Three<Dispatch> = Dispatch::go_on_with(three(inputs), chosen.into_dispatch());
}

/// Writes what a round begins with over what the one before began with: of `numbers`, as many of each, tokens, positions and lengths, and over `hidden`,
/// `[rows, columns]`, the rows of `streams`, `[…, columns]`, whose numbers come last.
pub(crate) fn begin_round_with(
    inputs: [Tensor<1, Int>; 3],
    hidden: Tensor<2>,
    streams: Tensor<2>,
    numbers: Tensor<1, Int>,
) {
    let _: Three<Dispatch> = Dispatch::begin_round_with(
        three(inputs),
        hidden.into_dispatch(),
        streams.into_dispatch(),
        numbers.into_dispatch(),
    );
}

/// Puts into `inputs`, tokens, positions and lengths, what a round began with, which are `first`, and the tokens that it has guessed after them, one step's after
/// the other: of each sequence its own, with their positions.
pub(crate) fn take_guesses_of(
    inputs: [Tensor<1, Int>; 3],
    first: [Tensor<1, Int>; 3],
    guesses: Tensor<1, Int>,
) {
    let _: Three<Dispatch> =
        Dispatch::take_guesses_of(three(inputs), three(first), guesses.into_dispatch());
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

/// Writes integers over those of a vector, as many and of its dtype, which every handle to them sees.
pub(crate) fn overwrite_integers(target: Tensor<1, Int>, source: IntTensor<Dispatch>) {
    let _ = Dispatch::overwrite_integers(target.into_dispatch(), source);
}

/// Writes the floats of each source over those of the vector in its place, as many and of its dtype, which every handle to them sees; three
/// of one dtype in a launch.
pub(crate) fn overwrite_each(targets: &[Tensor<1>], sources: Vec<FloatTensor<Dispatch>>) {
    assert_eq!(targets.len(), sources.len(), "one for each");
    let targets = targets.iter().map(|target| target.clone().into_dispatch());
    let mut pairs = targets.zip(sources).peekable();
    while let Some(first) = pairs.next() {
        let dtype = first.0.dtype();
        let mut of_dtype = || pairs.next_if(|(target, _)| target.dtype() == dtype);
        match (of_dtype(), of_dtype()) {
            (Some(second), Some(third)) => {
                let (targets, sources) = three_pairs([first, second, third]);
                let _: ThreeFloats<Dispatch> = Dispatch::overwrite_three_floats(targets, sources);
            }
            (second, third) => {
                for (target, source) in [Some(first), second, third].into_iter().flatten() {
                    let _ = Dispatch::overwrite_floats(target, source);
                }
            }
        }
    }
}

type Pair = (FloatTensor<Dispatch>, FloatTensor<Dispatch>);

fn three_pairs(pairs: [Pair; 3]) -> (ThreeFloats<Dispatch>, ThreeFloats<Dispatch>) {
    let [first, second, third] = pairs;
    (
        ThreeFloats {
            first: first.0,
            second: second.0,
            third: third.0,
        },
        ThreeFloats {
            first: first.1,
            second: second.1,
            third: third.1,
        },
    )
}

/// What is written over.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Three<B: Backend> {
    pub first: IntTensor<B>,
    pub second: IntTensor<B>,
    pub third: IntTensor<B>,
}

/// Floats of one dtype.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct ThreeFloats<B: Backend> {
    pub first: FloatTensor<B>,
    pub second: FloatTensor<B>,
    pub third: FloatTensor<B>,
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

    /// See [`begin_round_with`].
    #[fusion(meta = |three, _hidden, _streams, _numbers| three.clone())]
    fn begin_round_with(
        #[extension_type] three: Three<Self>,
        hidden: FloatTensor<Self>,
        streams: FloatTensor<Self>,
        numbers: IntTensor<Self>,
    ) -> Three<Self>;

    /// See [`take_guesses_of`].
    #[fusion(meta = |three, _first, _guesses| three.clone())]
    fn take_guesses_of(
        #[extension_type] three: Three<Self>,
        #[extension_type] first: Three<Self>,
        guesses: IntTensor<Self>,
    ) -> Three<Self>;

    /// See [`overwrite_floats`].
    #[fusion(meta = |target, _source| target.clone())]
    fn overwrite_floats(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`overwrite_integers`].
    #[fusion(meta = |target, _source| target.clone())]
    fn overwrite_integers(target: IntTensor<Self>, source: IntTensor<Self>) -> IntTensor<Self>;

    /// See [`overwrite_each`].
    #[fusion(meta = |targets, _sources| targets.clone())]
    fn overwrite_three_floats(
        #[extension_type] targets: ThreeFloats<Self>,
        #[extension_type] sources: ThreeFloats<Self>,
    ) -> ThreeFloats<Self>;
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
                cube_count(&client, rows.div_ceil(UNITS)),
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

    fn begin_round_with(
        three: Three<Self>,
        hidden: FloatTensor<Self>,
        streams: FloatTensor<Self>,
        numbers: IntTensor<Self>,
    ) -> Three<Self> {
        let client = numbers.client.clone();
        let streams = rows_of(streams);
        let count = |tensor: &CubeTensor| tensor.meta.shape().num_elements();
        let (rows, columns) = (count(&three.first), streams.meta.shape()[1]);
        let vectors = [&three.first, &three.second, &three.third];
        for vector in vectors {
            assert_eq!(count(vector), rows, "one for each");
            assert_eq!(vector.dtype, numbers.dtype, "of one dtype");
        }
        assert_eq!(count(&numbers), 4 * rows, "four for each");
        assert_eq!(count(&hidden), rows * columns, "a stream for each");
        assert_eq!(hidden.dtype, streams.dtype, "of one dtype");
        let [tokens, positions, lengths] = vectors.map(|vector| vector.clone().into_tensor_arg());
        let stride = |rows: &CubeTensor| rows.meta.strides()[0] as u32;
        let strides = [stride(&streams), stride(&hidden)];
        let element = dtype_to_storage_type(hidden.dtype);
        let integer = dtype_to_storage_type(numbers.dtype);
        // SAFETY: the vectors have `rows` numbers side by side, the source four times as many, whose last are rows that the streams have. Streams lie by their strides.
        unsafe {
            begin_round::launch_unchecked(
                &client,
                cube_count(&client, (rows * columns).div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                into_contiguous(numbers).into_tensor_arg(),
                streams.into_tensor_arg(),
                tokens,
                positions,
                lengths,
                hidden.into_tensor_arg(),
                RowsLaunch::new(rows as u32, columns as u32, strides[0], strides[1]),
                element,
                integer,
            );
        }
        three
    }

    fn take_guesses_of(
        three: Three<Self>,
        first: Three<Self>,
        guesses: IntTensor<Self>,
    ) -> Three<Self> {
        let client = guesses.client.clone();
        let count = |tensor: &CubeTensor| tensor.meta.shape().num_elements();
        let (rows, batch) = (count(&three.first), count(&first.first));
        let all = [
            (&three.first, rows),
            (&three.second, rows),
            (&three.third, batch),
            (&first.first, batch),
            (&first.second, batch),
            (&guesses, rows - batch),
        ];
        for (vector, expected) in all {
            assert_eq!(count(vector), expected, "a token, and guesses after it");
            assert_eq!(vector.dtype, guesses.dtype, "of one dtype");
        }
        let integer = dtype_to_storage_type(guesses.dtype);
        let [tokens, positions, lengths] =
            [&three.first, &three.second, &three.third].map(|vector| vector.clone());
        // SAFETY: all have the numbers of `batch` sequences, of which each has as many rows, side by side.
        unsafe {
            take_guesses::launch_unchecked(
                &client,
                cube_count(&client, rows.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                first.first.into_tensor_arg(),
                first.second.into_tensor_arg(),
                into_contiguous(guesses).into_tensor_arg(),
                tokens.into_tensor_arg(),
                positions.into_tensor_arg(),
                lengths.into_tensor_arg(),
                batch as u32,
                (rows / batch) as u32,
                integer,
            );
        }
        three
    }

    fn overwrite_floats(target: FloatTensor<Self>, source: FloatTensor<Self>) -> FloatTensor<Self> {
        launch(&target, [None, None], source);
        target
    }

    fn overwrite_integers(target: IntTensor<Self>, source: IntTensor<Self>) -> IntTensor<Self> {
        launch(&target, [None, None], source);
        target
    }

    fn overwrite_three_floats(
        targets: ThreeFloats<Self>,
        sources: ThreeFloats<Self>,
    ) -> ThreeFloats<Self> {
        let client = targets.first.client.clone();
        let over = [&targets.first, &targets.second, &targets.third];
        let from = [sources.first, sources.second, sources.third].map(into_contiguous);
        let dtype = targets.first.dtype;
        let sizes = over.map(|target| target.meta.num_elements());
        for (target, source) in over.into_iter().zip(&from) {
            assert_eq!(
                target.meta.num_elements(),
                source.meta.num_elements(),
                "one for each"
            );
            assert!(
                target.dtype == dtype && source.dtype == dtype,
                "of one dtype"
            );
        }
        let vector = vector_size(&client, dtype.size(), &sizes);
        let vectors = sizes.map(|size| size / vector);
        let most = vectors.into_iter().max().unwrap_or(0);
        let [of_first, of_second, of_third] =
            vectors.map(|count| u32::try_from(count).expect("a parameter that a device holds"));
        let address = address_type(over.into_iter().chain(&from));
        let [first, second, third] = from.map(CubeTensor::into_tensor_arg);
        let [over_first, over_second, over_third] =
            over.map(|target| target.clone().into_tensor_arg());
        // SAFETY: each target has as many elements as its source, both side by side; its vectors are read and written below its count.
        unsafe {
            copy_each::launch_unchecked(
                &client,
                cube_count(&client, most.div_ceil(UNITS_OF_VECTORS).min(MOST_CUBES)),
                CubeDim::new_1d(UNITS_OF_VECTORS as u32),
                address,
                first,
                second,
                third,
                over_first,
                over_second,
                over_third,
                CountsLaunch::new(of_first, of_second, of_third),
                dtype_to_storage_type(dtype),
                vector,
            );
        }
        targets
    }
}

/// Of a cube that copies vectors.
const UNITS_OF_VECTORS: usize = 256;
/// Enough to keep any device busy.
const MOST_CUBES: usize = 1024;

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
            cube_count(&client, all.div_ceil(UNITS)),
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

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use burn::tensor::{DType, Device, DeviceKind};

    /// More cubes than one dimension of a grid has, a prime number of them.
    #[test]
    fn tensors_are_as_large_as_they_are() {
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        let count = UNITS * 65_537 - 3;
        let numbers: Vec<f32> = (0..count).map(|place| place as f32).collect();
        let source = Tensor::<1>::from_data(numbers.as_slice(), (&device, DType::F32));
        let target = Tensor::<1>::zeros([count], (&device, DType::F32));
        let _ = overwrite_floats(target.clone(), source);
        let found: Vec<f32> = target.into_data().try_to_vec().expect("floats");
        assert!(found == numbers);
    }
}
