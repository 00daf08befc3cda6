//! A weight matrix, unquantized or quantized.

use super::random;
use crate::op::flat_rows;
#[cfg(feature = "cube")]
use crate::op::gemv::Origin;
#[cfg(feature = "cube")]
use crate::op::linear::Matrices;
use crate::op::linear::{Matrix, QuantizedMatrix};
use crate::quant::layout::Layout;
use burn::{
    module::{
        Content, Devices, Lora, LoraAdapter, Module, ModuleDisplay, ModuleDisplayDefault,
        ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer,
    },
    tensor::{DType, Device, Int, Tensor},
};
use std::{iter::once, ops::Range};

/// A weight matrix, `[out, in]`, or a stack of several matrices, `[count, out, in]`.
#[derive(Clone, Debug)]
pub enum Weight<const D: usize = 2> {
    /// Unquantized values.
    Whole(Param<Tensor<D>>),
    /// Packed codes of a few bits, with scales. Either the checkpoint was quantized, or the weight was quantized while
    /// loading: see [`LoadOptions::quantization`](crate::checkpoint::LoadOptions::quantization). Quantized weights are
    /// frozen, but their LoRA adapters can be trained.
    Quantized(Box<QuantizedWeight<D>>),
}

/// A quantized weight. The rows of all its matrices are packed into 32-bit words.
#[derive(Module, Debug)]
pub struct QuantizedWeight<const D: usize = 2> {
    /// The packed rows, `[rows, words]`, in 32-bit words of a layout that is internal to this crate.
    pub words: Param<Tensor<2, Int>>,
    /// The LoRA adapter over the weight. Its parameter path equals the path of an adapter over an unquantized weight.
    pub lora: Option<LoraAdapter>,
    #[module(skip)]
    layout: Layout,
    #[module(skip)]
    dtype: DType,
    #[module(skip)]
    shape: [usize; D],
}

impl<const D: usize> QuantizedWeight<D> {
    /// Creates a weight of the given shape from its packed rows `words`, `[rows, words]`. The model computes in `dtype`.
    pub(crate) fn new(
        words: Tensor<2, Int>,
        layout: Layout,
        dtype: DType,
        shape: [usize; D],
    ) -> Self {
        Self {
            words: Param::initialized(ParamId::new(), words),
            lora: None,
            layout,
            dtype,
            shape,
        }
    }

    /// Returns the dequantized weight, with the adapter's contribution added.
    fn val(&self) -> Tensor<D> {
        let numbers = self.matrix().dequantized(self.dtype).reshape(self.shape);
        match &self.lora {
            Some(adapter) => adapter.apply(numbers),
            None => numbers,
        }
    }

    /// Returns the dequantized rows in portions. If the weight has an adapter, returns a single portion. Only single
    /// matrices have adapters, and a single dequantized matrix is small enough for one device buffer.
    fn portions(&self) -> Box<dyn Iterator<Item = Tensor<2>>> {
        if self.lora.is_some() {
            return Box::new(once(flat_rows(self.val())));
        }
        let (matrix, dtype) = (self.matrix(), self.dtype);
        let rows = portions(matrix.words.dims()[0], matrix.layout.columns);
        Box::new(rows.map(move |rows| matrix.rows(rows.start, rows.len()).dequantized(dtype)))
    }

    /// Returns all packed rows.
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

    /// Returns the weight as floats, with the adapter's contribution added. A quantized weight is dequantized to a new tensor.
    pub fn val(&self) -> Tensor<D> {
        match self {
            Self::Whole(weight) => weight.val(),
            Self::Quantized(weight) => weight.val(),
        }
    }

    /// Returns the dtype of the weight's floats. For a quantized weight this is the dtype after dequantization.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Whole(weight) => weight.base().dtype(),
            Self::Quantized(weight) => weight.dtype,
        }
    }

    /// Returns the id of the weight's parameter, or of its packed words.
    pub(crate) fn id(&self) -> ParamId {
        match self {
            Self::Whole(weight) => weight.id,
            Self::Quantized(weight) => weight.words.id,
        }
    }

    /// Returns the device that holds the weight.
    pub fn device(&self) -> Device {
        match self {
            Self::Whole(weight) => weight.base().device(),
            Self::Quantized(weight) => weight.words.val().device(),
        }
    }

    /// Returns the origin of the tensor that [`matrix`](Weight::matrix) returns: a parameter of the model or a computed
    /// tensor. With an adapter, the tensor is computed.
    #[cfg(feature = "cube")]
    pub(crate) fn origin(&self) -> Origin {
        match self.adapter() {
            None => Origin::Parameters,
            Some(_) => Origin::Computed,
        }
    }

    /// Returns the weight's LoRA adapter, if it has one.
    pub(crate) fn adapter(&self) -> Option<&LoraAdapter> {
        match self {
            Self::Whole(weight) => weight.adapter(),
            Self::Quantized(weight) => weight.lora.as_ref(),
        }
    }
}

impl Weight {
    /// Returns the matrix that multiplies activations, with the adapter's contribution added. If a quantized matrix has
    /// an adapter, the matrix is dequantized. Otherwise the matrix stays packed.
    pub(crate) fn matrix(&self) -> Matrix {
        match self {
            Self::Quantized(weight) if weight.lora.is_none() => weight.matrix().into(),
            _ => self.val().into(),
        }
    }

    /// Returns the matrix that multiplies activations, without the adapter's contribution.
    pub(crate) fn base(&self) -> Matrix {
        match self {
            Self::Whole(weight) => weight.base().into(),
            Self::Quantized(weight) => weight.matrix().into(),
        }
    }
}

impl Weight<3> {
    /// Returns the shape of the unpacked weight.
    #[cfg(feature = "cube")]
    pub(crate) fn dims(&self) -> [usize; 3] {
        match self {
            Self::Whole(weight) => weight.lazy_shape().dims(),
            Self::Quantized(weight) => weight.shape,
        }
    }

    /// Returns the stacked matrices for an MoE GEMM.
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

    /// Returns the matrix at `index` in the stack.
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

/// A weight with any number of dimensions.
pub(crate) trait AnyWeight {
    /// Replaces the weight by packed quantized rows of the same shape.
    fn quantize(&mut self, words: Tensor<2, Int>, layout: Layout, dtype: DType);

    /// Replaces a quantized weight by its dequantized floats.
    fn dequantize(&mut self);

    /// Returns the size of the last dimension, or `None` if the weight is quantized.
    fn whole_columns(&self) -> Option<usize>;

    /// Returns the weight with all dimensions but the last flattened, or `None` if the weight is quantized.
    fn whole_rows(&self) -> Option<Tensor<2>>;

    /// Returns the shape and a function that dequantizes the weight, or `None` if the weight is not quantized.
    fn quantized(&self) -> Option<QuantizedNumbers>;

    /// Returns the number of bits per code, or `None` if the weight is not quantized.
    fn bits(&self) -> Option<usize>;

    /// Returns the id of the weight's parameter.
    fn id(&self) -> ParamId;

    /// Returns the shape of the unpacked weight.
    fn shape(&self) -> Vec<usize>;

    /// Attaches a LoRA adapter if the weight is a single quantized matrix.
    fn attach(&mut self, path: &str, lora: &mut Lora);

    /// Returns the shape, dtype and device that an adapter needs, if the weight is a quantized matrix without an adapter.
    fn without_adapter(&self) -> Option<([usize; 2], DType, Device)>;

    /// Sets the adapter of a quantized weight.
    fn adapt(&mut self, adapter: LoraAdapter);
}

/// The shape of a quantized weight, and a function that dequantizes the weight on demand.
pub(crate) struct QuantizedNumbers {
    pub shape: Vec<usize>,
    /// Returns an iterator that dequantizes one portion of the rows at a time. The portions have the model's dtype, or
    /// f32 if the weight has an adapter.
    make: Box<dyn Fn() -> Box<dyn Iterator<Item = Tensor<2>>>>,
}

impl QuantizedNumbers {
    /// Returns the dequantized weight as little-endian values of `dtype`.
    pub fn bytes(&self, dtype: DType) -> Vec<u8> {
        let mut bytes = Vec::new();
        for rows in (self.make)() {
            let numbers = rows.into_data().convert_dtype(dtype);
            bytes.extend_from_slice(&numbers.into_bytes());
        }
        bytes
    }
}

/// Divides rows into portions, because a whole dequantized table may not fit into a device buffer. A portion has at
/// most 2²⁴ elements, but at least one row.
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
            // Detach the sum of weight and adapter from the autodiff graph, because the new parameter must not depend
            // on the adapter's parameters.
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

    fn id(&self) -> ParamId {
        self.id()
    }

    fn shape(&self) -> Vec<usize> {
        match self {
            Self::Whole(weight) => weight.lazy_shape().to_vec(),
            Self::Quantized(weight) => weight.shape.to_vec(),
        }
    }

    fn attach(&mut self, path: &str, lora: &mut Lora) {
        let Self::Quantized(weight) = self else {
            return;
        };
        let Ok(shape) = <[usize; 2]>::try_from(weight.shape.to_vec()) else {
            return;
        };
        // Use an expanded zero tensor as the parameter, because Burn reads only the parameter's shape when it
        // initializes the LoRA matrices.
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

/// Implements [`Module`] by hand, so that a parameter's path has no component for the enum variant.
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
    fn portions_cover_all_rows_in_order() {
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
