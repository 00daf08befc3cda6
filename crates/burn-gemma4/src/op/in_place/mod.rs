//! In-place writes to tensors that a captured CUDA graph reads at each replay. In speculative decoding, these tensors
//! are the inputs of a drafter run, and the inputs of the target model's verification pass over the draft tokens.

mod kernel;
pub(crate) mod ranges;
pub(crate) mod rows;
pub(crate) mod slots;

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

/// Overwrites three integer vectors with consecutive ranges of `source`. Every handle to the vectors sees the new
/// values.
pub(crate) fn overwrite_three(targets: [Tensor<1, Int>; 3], source: Tensor<1, Int>) {
    let _: Three<Dispatch> = Dispatch::overwrite_three(three(targets), source.into_dispatch());
}

/// Copies the elements to a newly allocated tensor, which in-place writes to `numbers` leave unchanged.
pub(crate) fn copied(numbers: Tensor<1>) -> Tensor<1> {
    let copy = Tensor::empty(numbers.dims(), (&numbers.device(), numbers.dtype()));
    overwrite_floats(copy.clone(), numbers);
    copy
}

/// Overwrites the tokens in `inputs` with `chosen`, and adds one to each position and length. All vectors are `[rows]`.
pub(crate) fn advance_inputs(inputs: [Tensor<1, Int>; 3], chosen: Tensor<1, Int>) {
    let _: Three<Dispatch> = Dispatch::advance_inputs(three(inputs), chosen.into_dispatch());
}

/// Overwrites the inputs of a drafter run. `numbers`, `[4 · rows]`, holds `rows` tokens, then as many positions,
/// lengths and row indices. The indices select hidden states, which are rows of `streams`, `[…, columns]`. The selected
/// rows overwrite `hidden`, `[rows, columns]`.
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

/// Overwrites `inputs` with the tokens, positions and lengths of the verification pass after a drafter run. A
/// sequence's tokens are its token in `first`, then its draft tokens. `first` holds the inputs of the drafter run.
/// `guesses` holds the draft tokens in the order of the drafter's steps.
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

/// Overwrites the floats in `target`, `[count]`, with `source`. The new values are visible through every handle to
/// `target`.
pub(crate) fn overwrite_floats(target: Tensor<1>, source: Tensor<1>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::overwrite_floats(
        target.into_dispatch(),
        source.into_dispatch(),
    ))
}

/// Overwrites the integer vector `target` with `source`, which has the same length and dtype. Every handle to `target`
/// sees the new values.
pub(crate) fn overwrite_integers(target: Tensor<1, Int>, source: IntTensor<Dispatch>) {
    let _ = Dispatch::overwrite_integers(target.into_dispatch(), source);
}

/// Overwrites each float vector in `targets` with the vector at the same index in `sources`. The two vectors must have
/// the same length and dtype. Every handle to the targets sees the new values. If three consecutive targets have the
/// same dtype, one launch overwrites all three.
pub(crate) fn overwrite_each(targets: &[Tensor<1>], sources: Vec<FloatTensor<Dispatch>>) {
    assert_eq!(
        targets.len(),
        sources.len(),
        "in-place write: expected equal numbers of elements"
    );
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

/// Three integer vectors of one dtype: the vectors to overwrite, or the inputs of a drafter run.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Three<B: Backend> {
    pub first: IntTensor<B>,
    pub second: IntTensor<B>,
    pub third: IntTensor<B>,
}

/// Three float vectors of one dtype.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct ThreeFloats<B: Backend> {
    pub first: FloatTensor<B>,
    pub second: FloatTensor<B>,
    pub third: FloatTensor<B>,
}

/// The backend operators that run the in-place kernels.
#[backend_extension(Cube, Fusion)]
pub trait OverwriteBackend: Backend {
    /// See [`overwrite_three`].
    #[fusion(meta = |three, _source| three.clone())]
    fn overwrite_three(
        #[extension_type] three: Three<Self>,
        source: IntTensor<Self>,
    ) -> Three<Self>;

    /// See [`advance_inputs`].
    #[fusion(meta = |three, _chosen| three.clone())]
    fn advance_inputs(#[extension_type] three: Three<Self>, chosen: IntTensor<Self>)
    -> Three<Self>;

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

    fn advance_inputs(three: Three<Self>, chosen: IntTensor<Self>) -> Three<Self> {
        let client = chosen.client.clone();
        let rows = chosen.meta.shape().num_elements();
        let vectors = [&three.first, &three.second, &three.third];
        for vector in vectors {
            assert_eq!(
                vector.meta.shape().num_elements(),
                rows,
                "in-place write: expected equal numbers of elements"
            );
            assert_eq!(
                vector.dtype, chosen.dtype,
                "in-place write: expected the same dtype"
            );
        }
        let [tokens, positions, lengths] = vectors.map(|vector| vector.clone().into_tensor_arg());
        let integer = dtype_to_storage_type(chosen.dtype);
        // SAFETY: unit `i` works only if `i` is below `rows`. The unit reads element `i` of `chosen`, and updates
        // element `i` of the three vectors. All four vectors have `rows` contiguous elements.
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
            assert_eq!(
                count(vector),
                rows,
                "in-place write: expected equal numbers of elements"
            );
            assert_eq!(
                vector.dtype, numbers.dtype,
                "in-place write: expected the same dtype"
            );
        }
        assert_eq!(
            count(&numbers),
            4 * rows,
            "numbers: expected four numbers for each row"
        );
        assert_eq!(
            count(&hidden),
            rows * columns,
            "hidden: expected one stream row for each row"
        );
        assert_eq!(
            hidden.dtype, streams.dtype,
            "in-place write: expected the same dtype"
        );
        let [tokens, positions, lengths] = vectors.map(|vector| vector.clone().into_tensor_arg());
        let stride = |rows: &CubeTensor| rows.meta.strides()[0] as u32;
        let strides = [stride(&streams), stride(&hidden)];
        let element = dtype_to_storage_type(hidden.dtype);
        let integer = dtype_to_storage_type(numbers.dtype);
        // SAFETY: unit `i` writes element `i` of the three vectors only if `i` is below `rows`. The unit writes an
        // element of `hidden` only if `i` is below `rows · columns`. `numbers` has `4 · rows` elements. The last
        // quarter of `numbers` holds valid row indices of `streams`.
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
            assert_eq!(
                count(vector),
                expected,
                "expected one token and equal numbers of draft tokens for each sequence"
            );
            assert_eq!(
                vector.dtype, guesses.dtype,
                "in-place write: expected the same dtype"
            );
        }
        let integer = dtype_to_storage_type(guesses.dtype);
        let [tokens, positions, lengths] =
            [&three.first, &three.second, &three.third].map(|vector| vector.clone());
        // SAFETY: unit `i` writes element `i` of `tokens` and `positions` only if `i` is below `rows`. In `lengths` and
        // in the vectors of `first`, the unit accesses only elements below `batch`. The unit reads only elements of
        // `guesses` below `rows - batch`, the length of `guesses`. All vectors are contiguous.
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
                "in-place write: expected equal numbers of elements"
            );
            assert!(
                target.dtype == dtype && source.dtype == dtype,
                "in-place write: expected the same dtype"
            );
        }
        let vector = vector_size(&client, dtype.size(), &sizes);
        let vectors = sizes.map(|size| size / vector);
        let most = vectors.into_iter().max().unwrap_or(0);
        let [of_first, of_second, of_third] =
            vectors.map(|count| u32::try_from(count).expect("the vector count fits in u32"));
        let address = address_type(over.into_iter().chain(&from));
        let [first, second, third] = from.map(CubeTensor::into_tensor_arg);
        let [over_first, over_second, over_third] =
            over.map(|target| target.clone().into_tensor_arg());
        // SAFETY: a unit copies vector `i` of a source to vector `i` of its target only if `i` is below the target's
        // number of vectors. A source has as many vectors as its target. All elements are contiguous.
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

/// The number of units of a cube that copies vectors.
const UNITS_OF_VECTORS: usize = 256;
/// The largest number of cubes in a copy, which is enough to keep any device busy.
const MOST_CUBES: usize = 1024;

/// The number of units in a cube that copies single elements.
const UNITS: usize = 64;

fn launch(first: &CubeTensor, others: [Option<CubeTensor>; 2], source: CubeTensor) {
    let client = first.client.clone();
    let count = |target: &CubeTensor| target.meta.shape().num_elements();
    let counts = [Some(first), others[0].as_ref(), others[1].as_ref()];
    let counts = counts.map(|target| target.map_or(0, count));
    let all = counts.iter().sum::<usize>();
    assert_eq!(
        count(&source),
        all,
        "in-place write: expected equal numbers of elements"
    );
    assert_eq!(
        source.dtype, first.dtype,
        "in-place write: expected the same dtype"
    );
    let number = dtype_to_storage_type(first.dtype);
    let [of_first, of_second, of_third] = counts.map(|count| count as u32);
    let [second, third] = others.map(|target| target.map(CubeTensor::into_tensor_arg));
    // SAFETY: unit `i` works only if `i` is below the length of `source`, which is the total length of the targets. The
    // unit reads element `i` of `source`, and writes one element within one target. All elements are contiguous.
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

    /// Checks a copy that needs more cubes than the 65,535 that WebGPU allows in one dimension of a grid. The grid
    /// therefore has several dimensions. The number of cubes is prime, so the grid has more cubes than the copy needs.
    #[test]
    fn overwrite_floats_copies_large_tensors() {
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        let count = UNITS * 65_537 - 3;
        let numbers: Vec<f32> = (0..count).map(|place| place as f32).collect();
        let source = Tensor::<1>::from_data(numbers.as_slice(), (&device, DType::F32));
        let target = Tensor::<1>::zeros([count], (&device, DType::F32));
        let _ = overwrite_floats(target.clone(), source);
        let found: Vec<f32> = target
            .into_data()
            .try_to_vec()
            .expect("the tensor has f32 elements");
        assert!(found == numbers);
    }
}
