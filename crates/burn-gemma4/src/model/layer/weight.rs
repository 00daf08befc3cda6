//! A weight matrix: whole, or quantized.

use super::random;
#[cfg(feature = "cube")]
use crate::op::linear::Matrices;
use crate::{
    op::{
        flat_rows,
        linear::{Matrix, QuantizedMatrix},
    },
    quantized::layout::Layout,
};
use burn::{
    module::{
        Content, Devices, Lora, LoraAdapter, Module, ModuleDisplay, ModuleDisplayDefault,
        ModuleMapper, ModuleVisitor, Param, Reparameterization, Reparameterizer,
    },
    tensor::{DType, Device, Int, Tensor},
};
use std::{iter::once, ops::Range};

/// A weight matrix, or several of them: its rows are what products give, its last dimension what they read.
#[derive(Clone, Debug)]
pub enum Weight<const D: usize = 2> {
    /// All of its numbers.
    Whole(Param<Tensor<D>>),
    /// Codes of a few bits and scales, as a checkpoint has them or as
    /// [`LoadOptions::quantization`](crate::LoadOptions::quantization) makes them. Products make numbers of them on their way. They are not
    /// trained, but a low-rank adapter over them is.
    Quantized(Box<QuantizedWeight<D>>),
}

/// The words of quantized rows.
#[derive(Module, Debug)]
pub struct QuantizedWeight<const D: usize = 2> {
    /// `[rows, words]`, each 32 bits, whose meaning is this crate's own.
    pub words: Param<Tensor<2, Int>>,
    /// What is added to the numbers that they stand for, by the name that a whole weight's has.
    pub lora: Option<LoraAdapter>,
    #[module(skip)]
    layout: Layout,
    #[module(skip)]
    dtype: DType,
    #[module(skip)]
    shape: [usize; D],
}

impl<const D: usize> QuantizedWeight<D> {
    /// `words` are `[rows, words]` of a weight of this shape, whose model computes in `dtype`.
    pub(crate) fn new(
        words: Tensor<2, Int>,
        layout: Layout,
        dtype: DType,
        shape: [usize; D],
    ) -> Self {
        Self {
            words: Param::initialized(burn::module::ParamId::new(), words),
            lora: None,
            layout,
            dtype,
            shape,
        }
    }

    /// All numbers, with what an adapter adds.
    fn val(&self) -> Tensor<D> {
        let numbers = self.matrix().dequantized(self.dtype).reshape(self.shape);
        match &self.lora {
            Some(adapter) => adapter.apply(numbers),
            None => numbers,
        }
    }

    /// All numbers, a few rows at a time; at once what an adapter adds to, which is no table.
    fn portions(&self) -> Box<dyn Iterator<Item = Tensor<2>>> {
        if self.lora.is_some() {
            return Box::new(once(flat_rows(self.val())));
        }
        let (matrix, dtype) = (self.matrix(), self.dtype);
        let rows = portions(matrix.words.dims()[0], matrix.layout.columns);
        Box::new(rows.map(move |rows| matrix.rows(rows.start, rows.len()).dequantized(dtype)))
    }

    /// All rows.
    pub(crate) fn matrix(&self) -> QuantizedMatrix {
        QuantizedMatrix {
            words: self.words.val(),
            layout: self.layout,
        }
    }
}

impl<const D: usize> Weight<D> {
    pub(crate) fn random(shape: [usize; D], deviation: f64, device: &Device) -> Self {
        Self::Whole(random(shape, deviation, device))
    }

    /// All numbers, with what an adapter adds. Of a quantized weight, which has them nowhere, they are a new tensor.
    pub fn val(&self) -> Tensor<D> {
        match self {
            Self::Whole(weight) => weight.val(),
            Self::Quantized(weight) => weight.val(),
        }
    }

    /// The dtype of its numbers.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Whole(weight) => weight.base().dtype(),
            Self::Quantized(weight) => weight.dtype,
        }
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        match self {
            Self::Whole(weight) => weight.base().device(),
            Self::Quantized(weight) => weight.words.val().device(),
        }
    }

    /// Its low-rank adapter.
    pub(crate) fn adapter(&self) -> Option<&LoraAdapter> {
        match self {
            Self::Whole(weight) => weight.adapter(),
            Self::Quantized(weight) => weight.lora.as_ref(),
        }
    }
}

impl Weight {
    /// As products take it, with what an adapter adds: whole, where there is one.
    pub(crate) fn matrix(&self) -> Matrix {
        match self {
            Self::Quantized(weight) if weight.lora.is_none() => weight.matrix().into(),
            _ => self.val().into(),
        }
    }

    /// The same without what an adapter adds.
    pub(crate) fn base(&self) -> Matrix {
        match self {
            Self::Whole(weight) => weight.base().into(),
            Self::Quantized(weight) => weight.matrix().into(),
        }
    }
}

impl Weight<3> {
    /// The shape of its numbers.
    #[cfg(feature = "cube")]
    pub(crate) fn dims(&self) -> [usize; 3] {
        match self {
            Self::Whole(weight) => weight.lazy_shape().dims(),
            Self::Quantized(weight) => weight.shape,
        }
    }

    /// As products of several of the matrices take them.
    #[cfg(feature = "cube")]
    pub(crate) fn matrices(&self) -> Matrices {
        match self {
            Self::Whole(weight) => Matrices::Whole(weight.val()),
            Self::Quantized(weight) => Matrices::Quantized {
                all: weight.matrix(),
                rows: weight.shape[1],
            },
        }
    }

    /// One of the matrices.
    pub(crate) fn matrix(&self, index: usize) -> Matrix {
        match self {
            Self::Whole(weight) => {
                let matrix: Tensor<2> = weight.val().narrow(0, index, 1).squeeze_dim(0);
                matrix.into()
            }
            Self::Quantized(weight) => {
                let [_, rows, _] = weight.shape;
                weight.matrix().rows(index * rows, rows).into()
            }
        }
    }
}

/// A weight of any number of dimensions.
pub(crate) trait AnyWeight {
    /// The weight by its words, in their place what there was.
    fn quantize(&mut self, words: Tensor<2, Int>, layout: Layout, dtype: DType);

    /// Makes it whole.
    fn dequantize(&mut self);

    /// The size of its last dimension, where it is whole.
    fn whole_columns(&self) -> Option<usize>;

    /// All dimensions but the last as one, where it is whole.
    fn whole_rows(&self) -> Option<Tensor<2>>;

    /// The shape of its numbers, and how to make them, where they are quantized.
    fn quantized(&self) -> Option<QuantizedNumbers>;

    /// The bits of a code, where it is quantized.
    fn bits(&self) -> Option<usize>;

    /// Attaches an adapter where it is a quantized matrix.
    fn attach(&mut self, path: &str, lora: &mut Lora);

    /// The shape of a quantized matrix that has no adapter yet, and the dtype and the device of what one for it has to be.
    fn without_adapter(&self) -> Option<([usize; 2], DType, Device)>;

    /// Gives such a matrix an adapter.
    fn adapt(&mut self, adapter: LoraAdapter);
}

/// The numbers of a quantized weight, made when they are asked for.
pub(crate) struct QuantizedNumbers {
    pub shape: Vec<usize>,
    /// A few rows after the other, all dimensions but the last being one, in the dtype that the model computes in or, with an adapter, in f32.
    make: Box<dyn Fn() -> Box<dyn Iterator<Item = Tensor<2>>>>,
}

impl QuantizedNumbers {
    /// They in `dtype`, little-endian.
    pub fn bytes(&self, dtype: DType) -> Vec<u8> {
        let mut bytes = Vec::new();
        for rows in (self.make)() {
            let numbers = rows.into_data().convert_dtype(dtype);
            bytes.extend_from_slice(&numbers.into_bytes());
        }
        bytes
    }
}

/// Rows of so many columns, as many at a time as any device has a buffer for: of a table whose words are in one the numbers may be too many.
fn portions(rows: usize, columns: usize) -> impl Iterator<Item = Range<usize>> {
    const NUMBERS: usize = 1 << 24;
    let at_once = (NUMBERS / columns.max(1)).max(1);
    let portion = move |start| start..rows.min(start + at_once);
    (0..rows).step_by(at_once).map(portion)
}

impl<const D: usize> AnyWeight for Weight<D> {
    fn quantize(&mut self, words: Tensor<2, Int>, layout: Layout, dtype: DType) {
        let shape = match self {
            Self::Whole(weight) => weight.lazy_shape().dims(),
            Self::Quantized(weight) => weight.shape,
        };
        *self = Self::Quantized(Box::new(QuantizedWeight::new(words, layout, dtype, shape)));
    }

    fn dequantize(&mut self) {
        if let Self::Quantized(_) = self {
            let dtype = self.dtype();
            // Of an adapter's factors that are trained, the sum is no parameter.
            *self = Self::Whole(Param::from_tensor(self.val().detach().cast(dtype)));
        }
    }

    fn whole_columns(&self) -> Option<usize> {
        match self {
            Self::Whole(weight) => weight.lazy_shape().to_vec().last().copied(),
            Self::Quantized(_) => None,
        }
    }

    fn whole_rows(&self) -> Option<Tensor<2>> {
        match self {
            Self::Whole(weight) => Some(flat_rows(weight.val())),
            Self::Quantized(_) => None,
        }
    }

    fn quantized(&self) -> Option<QuantizedNumbers> {
        match self {
            Self::Whole(_) => None,
            Self::Quantized(weight) => {
                let shape = weight.shape.to_vec();
                let weight = weight.clone();
                let make = Box::new(move || weight.portions());
                Some(QuantizedNumbers { shape, make })
            }
        }
    }

    fn bits(&self) -> Option<usize> {
        match self {
            Self::Whole(_) => None,
            Self::Quantized(weight) => Some(weight.layout.format.bits),
        }
    }

    fn attach(&mut self, path: &str, lora: &mut Lora) {
        let Self::Quantized(weight) = self else {
            return;
        };
        let Ok(shape) = <[usize; 2]>::try_from(weight.shape.to_vec()) else {
            return;
        };
        // Burn draws factors by the size of a parameter, whose numbers it does not look at.
        let device = weight.words.val().device();
        let like = Tensor::<2>::zeros([1, 1], (&device, weight.dtype)).expand(shape);
        (_, weight.lora) = lora.reparameterize(path, Param::from_tensor(like));
    }

    fn without_adapter(&self) -> Option<([usize; 2], DType, Device)> {
        match self {
            Self::Quantized(weight) if weight.lora.is_none() => {
                let shape = <[usize; 2]>::try_from(weight.shape.to_vec()).ok()?;
                Some((shape, weight.dtype, weight.words.val().device()))
            }
            _ => None,
        }
    }

    fn adapt(&mut self, adapter: LoraAdapter) {
        if let Self::Quantized(weight) = self {
            weight.lora = Some(adapter);
        }
    }
}

/// Parameters have the paths that they would have without the enum: those of the checkpoint's tensors.
impl<const D: usize> Module for Weight<D> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        match self {
            Self::Whole(weight) => weight.collect_devices(devices),
            Self::Quantized(weight) => weight.collect_devices(devices),
        }
    }

    fn fork(self, device: &Device) -> Self {
        match self {
            Self::Whole(weight) => Self::Whole(weight.fork(device)),
            Self::Quantized(weight) => Self::Quantized(Box::new(weight.fork(device))),
        }
    }

    fn to_device(self, device: &Device) -> Self {
        match self {
            Self::Whole(weight) => Self::Whole(weight.to_device(device)),
            Self::Quantized(weight) => Self::Quantized(Box::new(weight.to_device(device))),
        }
    }

    fn train(self) -> Self {
        match self {
            Self::Whole(weight) => Self::Whole(weight.train()),
            Self::Quantized(weight) => Self::Quantized(Box::new(weight.train())),
        }
    }

    fn valid(&self) -> Self {
        match self {
            Self::Whole(weight) => Self::Whole(weight.valid()),
            Self::Quantized(weight) => Self::Quantized(Box::new(weight.valid())),
        }
    }

    fn materialize(self) -> Self {
        match self {
            Self::Whole(weight) => Self::Whole(weight.materialize()),
            Self::Quantized(weight) => Self::Quantized(Box::new(weight.materialize())),
        }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        match self {
            Self::Whole(weight) => weight.visit(visitor),
            Self::Quantized(weight) => weight.visit(visitor),
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        match self {
            Self::Whole(weight) => Self::Whole(Module::map(weight, mapper)),
            Self::Quantized(weight) => Self::Quantized(Box::new(weight.map(mapper))),
        }
    }
}

impl<const D: usize> ModuleDisplayDefault for Weight<D> {
    fn content(&self, content: Content) -> Option<Content> {
        match self {
            Self::Whole(weight) => ModuleDisplayDefault::content(weight, content),
            Self::Quantized(weight) => {
                let bits = weight.layout.bits_of_number();
                let string = format!("Weight {{shape: {:?}, bits: {bits:.3}}}", weight.shape);
                content.add_formatted(&string).optional()
            }
        }
    }
}

impl<const D: usize> ModuleDisplay for Weight<D> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_are_all_rows_in_their_order() {
        for (rows, columns) in [(0, 4), (5, 1 << 26), (10, 1 << 23), (1 << 20, 37), (3, 0)] {
            let mut next = 0;
            for portion in portions(rows, columns) {
                assert_eq!(portion.start, next);
                assert!(portion.len() == 1 || portion.len() * columns <= 1 << 24);
                next = portion.end;
            }
            assert_eq!(next, rows, "{columns} columns");
        }
    }
}
