//! The input buffers of a captured graph. Before each replay, new inputs are written to the buffers.

use crate::op::in_place::{overwrite_each, overwrite_integers};
use burn::{
    backend::{
        Dispatch, TensorMetadata,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Device, Int, Tensor},
};

/// The tensors that a training step reads, without autodiff. All steps that run with one graph read the same number of
/// tensors, and corresponding tensors have equal sizes.
#[derive(Default)]
pub(super) struct Sources {
    floats: Vec<FloatTensor<Dispatch>>,
    integers: Vec<IntTensor<Dispatch>>,
}

impl Sources {
    pub fn floats<const D: usize>(&mut self, tensor: Tensor<D>) {
        self.floats.push(tensor.into_dispatch());
    }

    pub fn integers<const D: usize>(&mut self, tensor: Tensor<D, Int>) {
        self.integers.push(tensor.into_dispatch());
    }
}

/// The buffers that a captured graph reads. Before a replay, the step's tensors (the sources) are copied into the
/// buffers.
pub(super) struct Buffers {
    floats: Vec<Tensor<1>>,
    integers: Vec<Tensor<1, Int>>,
    /// The shapes of the tensors that are copied into the buffers. The shapes of all float tensors come first, and the
    /// shapes of all integer tensors follow.
    shapes: Vec<Vec<usize>>,
}

impl Buffers {
    /// Allocates uninitialized buffers with the sizes of the `sources`.
    pub fn like(sources: &Sources, device: &Device) -> Self {
        let count = |shape: &[usize]| [shape.iter().product::<usize>()];
        let floats = sources.floats.iter().map(|source| {
            let shape = source.shape().to_vec();
            (
                Tensor::empty(count(&shape), (device, source.dtype())),
                shape,
            )
        });
        let (floats, mut shapes): (Vec<_>, Vec<_>) = floats.unzip();
        let integers = sources.integers.iter().map(|source| {
            let shape = source.shape().to_vec();
            (
                Tensor::empty(count(&shape), (device, source.dtype())),
                shape,
            )
        });
        let (integers, of_integers): (Vec<_>, Vec<_>) = integers.unzip();
        shapes.extend(of_integers);
        Self {
            floats,
            integers,
            shapes,
        }
    }

    /// Copies the sources into the buffers. Each source must have the size of its buffer.
    pub fn overwrite(&self, sources: Sources) {
        overwrite_each(&self.floats, sources.floats);
        assert_eq!(
            self.integers.len(),
            sources.integers.len(),
            "the number of sources never changes"
        );
        for (buffer, source) in self.integers.iter().zip(sources.integers) {
            overwrite_integers(buffer.clone(), source);
        }
    }

    /// Returns a reader that yields the buffers in the order of the sources.
    pub fn read(&self) -> Reader<'_> {
        let (of_floats, of_integers) = self.shapes.split_at(self.floats.len());
        Reader {
            floats: self.floats.iter().zip(of_floats),
            integers: self.integers.iter().zip(of_integers),
        }
    }
}

/// A reader that yields each buffer once, in the shape of its source.
pub(super) struct Reader<'a> {
    floats: Shaped<'a, Tensor<1>>,
    integers: Shaped<'a, Tensor<1, Int>>,
}

type Shaped<'a, T> = std::iter::Zip<std::slice::Iter<'a, T>, std::slice::Iter<'a, Vec<usize>>>;

/// The panic message for a step that takes more tensors from the reader than the reader has buffers.
const AS_MANY: &str = "a step reads as many tensors as it has sources";

impl Reader<'_> {
    pub fn floats<const D: usize>(&mut self) -> Tensor<D> {
        let (numbers, shape) = self.floats.next().expect(AS_MANY);
        numbers.clone().reshape(of_rank::<D>(shape))
    }

    pub fn integers<const D: usize>(&mut self) -> Tensor<D, Int> {
        let (numbers, shape) = self.integers.next().expect(AS_MANY);
        numbers.clone().reshape(of_rank::<D>(shape))
    }
}

fn of_rank<const D: usize>(shape: &[usize]) -> [usize; D] {
    shape
        .try_into()
        .expect("the tensor has the rank of its source")
}
