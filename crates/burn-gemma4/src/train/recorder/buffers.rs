//! What a graph reads anew each time, in buffers of its own.

use crate::op::overwrite::{overwrite_each, overwrite_integers};
use burn::{
    backend::{
        Dispatch, TensorMetadata,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Device, Int, Tensor},
};

/// Tensors without autodiff that a step reads, always as many of the same sizes.
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

/// Copies of them.
pub(super) struct Buffers {
    floats: Vec<Tensor<1>>,
    integers: Vec<Tensor<1, Int>>,
    /// Of the sources, floats first.
    shapes: Vec<Vec<usize>>,
}

impl Buffers {
    /// For sources like these, which nobody has copied yet.
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

    /// Copies sources like those that the buffers are for.
    pub fn overwrite(&self, sources: Sources) {
        overwrite_each(&self.floats, sources.floats);
        assert_eq!(
            self.integers.len(),
            sources.integers.len(),
            "sources like the first"
        );
        for (buffer, source) in self.integers.iter().zip(sources.integers) {
            overwrite_integers(buffer.clone(), source);
        }
    }

    /// One after the other, in the order of the sources.
    pub fn read(&self) -> Reader<'_> {
        let (of_floats, of_integers) = self.shapes.split_at(self.floats.len());
        Reader {
            floats: self.floats.iter().zip(of_floats),
            integers: self.integers.iter().zip(of_integers),
        }
    }
}

/// What is left to be read.
pub(super) struct Reader<'a> {
    floats: Shaped<'a, Tensor<1>>,
    integers: Shaped<'a, Tensor<1, Int>>,
}

type Shaped<'a, T> = std::iter::Zip<std::slice::Iter<'a, T>, std::slice::Iter<'a, Vec<usize>>>;

/// A step that reads other tensors than it has sources is none.
const AS_MANY: &str = "as many tensors as sources";

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
    shape.try_into().expect("the source's rank")
}
