//! Reads parameters from the formats of their checkpoints and uploads them to a device. A slice is the part of a
//! parameter at one index of the parameter's first dimension.

use crate::config::Gemma4Config;
use crate::error::TensorProblem;
use crate::model::layer::ActivationScales;
use crate::quant::blocks::BlockFormat;
use crate::quant::fp4::{self, Fp4};
use crate::quant::fp8::Fp8;
use crate::quant::layout::Layout;
use crate::quant::mobile::Mobile;
use crate::quant::packed::Packed;
use crate::quant::quantize::QuantTarget;
use crate::quant::rows::{dequantized, numbers, packed, rounded, write_rows};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use safetensors::{Dtype, tensor::TensorView};
use std::{collections::BTreeSet, ops::Range};

/// The weights of a checkpoint. A caller names a weight by the path of the model's parameter.
pub(super) trait WeightSource: Send + Sync {
    /// Returns the names of the tensors that store the parameter at `path`.
    fn names(&self, path: &str) -> Vec<String>;

    /// Returns the shape and the stored bytes of the parameter at `path`.
    fn get(&self, path: &str) -> Result<Source<'_>, TensorProblem>;

    /// Reads the static scales by which the projection with the weight at `path` rounds its activations. The result is
    /// `None` if nothing is rounded.
    fn activation_scales(&self, _path: &str) -> Result<Option<ActivationScales>, TensorProblem> {
        Ok(None)
    }

    /// True if the weights are those of a mobile checkpoint, whose `quant_method` is "gemma".
    fn is_mobile(&self) -> bool {
        false
    }

    /// Returns the names of those tensors that are neither in `known` nor allowed by the checkpoint's format.
    fn unknown(&self, known: &BTreeSet<String>, config: &Gemma4Config) -> Vec<String>;
}

/// The shape and the stored bytes of a parameter in the files.
pub(super) struct Source<'a> {
    pub shape: Vec<usize>,
    numbers: Numbers<'a>,
}

/// The elements of a parameter, in the encoding of the checkpoint. The bytes are little-endian, row by row.
enum Numbers<'a> {
    Floats {
        dtype: DType,
        bytes: &'a [u8],
    },
    Blocks {
        format: BlockFormat,
        bytes: &'a [u8],
    },
    Packed(Packed<'a>),
    Fp8(Fp8<'a>),
    Fp4(Fp4<'a>),
    Mobile(Mobile<'a>),
    /// Several matrices of the same shape, which form a stacked tensor. Each matrix is one slice: the part of the
    /// stacked tensor at one index of its first dimension.
    Joined(Vec<Source<'a>>),
    /// Two tensors of the same shape, which are concatenated slice by slice. Each slice (one index of the first
    /// dimension) has the rows of the first tensor's slice, then the rows of the second tensor's slice.
    Stacked(Box<[Source<'a>; 2]>),
}

impl<'a> Source<'a> {
    /// Creates a parameter from floating-point elements in `dtype`. `bytes` must hold exactly the elements of the shape.
    pub fn floats(shape: Vec<usize>, dtype: DType, bytes: &'a [u8]) -> Self {
        let numbers = Numbers::Floats { dtype, bytes };
        Self { shape, numbers }
    }

    /// Creates a parameter from quantized blocks. `bytes` must hold exactly the blocks that the shape requires.
    pub fn blocks(shape: Vec<usize>, format: BlockFormat, bytes: &'a [u8]) -> Self {
        let numbers = Numbers::Blocks { format, bytes };
        Self { shape, numbers }
    }

    /// Creates a parameter from a packed matrix.
    pub fn packed(packed: Packed<'a>) -> Self {
        Self {
            shape: vec![packed.rows, packed.columns],
            numbers: Numbers::Packed(packed),
        }
    }

    /// Creates a parameter from a matrix of 8-bit floats.
    pub fn fp8(matrix: Fp8<'a>) -> Self {
        Self {
            shape: vec![matrix.rows, matrix.columns],
            numbers: Numbers::Fp8(matrix),
        }
    }

    /// Creates a parameter from a matrix of 4-bit floats.
    pub fn fp4(matrix: Fp4<'a>) -> Self {
        Self {
            shape: vec![matrix.rows, matrix.columns],
            numbers: Numbers::Fp4(matrix),
        }
    }

    /// Creates a parameter from a matrix of codes in a mobile checkpoint.
    pub fn mobile(matrix: Mobile<'a>) -> Self {
        Self {
            shape: vec![matrix.rows, matrix.columns],
            numbers: Numbers::Mobile(matrix),
        }
    }

    /// Describes the padding of a matrix in a mobile checkpoint. The rows fill whole bytes, although the model's matrix,
    /// with the shape `expected`, has fewer columns. The result is `None` if the shapes differ otherwise.
    pub fn padding(&self, expected: &[usize]) -> Option<String> {
        match (&self.numbers, expected) {
            (Numbers::Mobile(matrix), [rows, columns]) => {
                let codes = 8 / matrix.bits;
                let is_padded = *rows == matrix.rows
                    && *columns < matrix.columns
                    && columns.next_multiple_of(codes) == matrix.columns;
                is_padded.then(|| {
                    format!(
                        "its rows of {columns} codes are padded to {}, because a byte holds {codes} codes; padded rows are not supported",
                        matrix.columns
                    )
                })
            }
            (Numbers::Joined(matrices), [count, matrix @ ..]) if *count == matrices.len() => {
                matrices.first()?.padding(matrix)
            }
            _ => None,
        }
    }

    /// Sets the dtype in which the model computes. The elements of some formats depend on it.
    pub fn computed_in(mut self, dtype: DType) -> Self {
        if let Numbers::Mobile(matrix) = &mut self.numbers {
            matrix.dtype = dtype;
        }
        self
    }

    /// Stacks matrices of the same shape into one parameter `[matrices, rows, columns]`. Each matrix comes with its
    /// name, which is used only in error messages.
    pub fn joined(matrices: Vec<(String, Self)>) -> Result<Self, TensorProblem> {
        let mut shape = vec![matrices.len()];
        shape.extend(matrices.first().iter().flat_map(|(_, first)| &first.shape));
        let mut parts = Vec::with_capacity(matrices.len());
        for (name, matrix) in matrices {
            same_shape(name, &matrix.shape, &shape[1..])?;
            parts.push(matrix);
        }
        let numbers = Numbers::Joined(parts);
        Ok(Self { shape, numbers })
    }

    /// Concatenates two tensors `[slices, rows, columns]` to one parameter `[slices, 2 · rows, columns]`. `name` is the
    /// name of the second tensor, which is used only in error messages.
    pub fn stacked(first: Self, name: String, second: Self) -> Result<Self, TensorProblem> {
        same_shape(name, &second.shape, &first.shape)?;
        let mut shape = first.shape.clone();
        if let Some(rows) = shape.get_mut(1) {
            *rows *= 2;
        }
        let numbers = Numbers::Stacked(Box::new([first, second]));
        Ok(Self { shape, numbers })
    }

    /// Returns the number of bytes of the parameter in the files.
    pub fn len(&self) -> usize {
        match &self.numbers {
            Numbers::Floats { bytes, .. } | Numbers::Blocks { bytes, .. } => bytes.len(),
            Numbers::Packed(packed) => {
                let zero_points = packed.zero_points.map_or(0, <[u8]>::len);
                packed.words.len() + packed.scales.len() + zero_points
            }
            Numbers::Fp8(matrix) => matrix.bytes.len() + matrix.scales.len(),
            Numbers::Fp4(matrix) => matrix.codes.len() + matrix.scales.len(),
            Numbers::Mobile(matrix) => matrix.codes.len() + matrix.scales.len(),
            Numbers::Joined(parts) => parts.iter().map(Self::len).sum(),
            Numbers::Stacked(parts) => parts.iter().map(Self::len).sum(),
        }
    }

    /// Returns the dtype of the elements, or `None` for quantized blocks and mobile checkpoints. For a packed matrix, the
    /// function returns the dtype that the matrix had before packing. Matrices of 8-bit and 4-bit floats have the dtype of their dequantized
    /// elements.
    pub fn dtype(&self) -> Option<DType> {
        match &self.numbers {
            Numbers::Floats { dtype, .. } => Some(*dtype),
            Numbers::Packed(packed) => Some(packed.dtype),
            Numbers::Fp8(matrix) => Some(matrix.dtype),
            Numbers::Fp4(_) => Some(fp4::DTYPE),
            Numbers::Joined(parts) => parts.first()?.dtype(),
            Numbers::Stacked(parts) => parts[0].dtype(),
            Numbers::Blocks { .. } | Numbers::Mobile(_) => None,
        }
    }

    /// Returns the number of host bytes that are needed to upload one slice (one index of the first dimension).
    fn slice_bytes(&self) -> usize {
        let numbers: usize = self.shape[1..].iter().product();
        match &self.numbers {
            Numbers::Floats { dtype, .. } => numbers * dtype.size(),
            _ => numbers * DType::F32.size(),
        }
    }

    /// Returns the number of rows of all slices together. A vector has one row.
    pub fn rows(&self) -> usize {
        let columns = self.shape.last().copied().unwrap_or(1);
        self.shape.iter().product::<usize>() / columns
    }

    /// Dequantizes the slices `range` (indices of the first dimension) to `dtype`. `dequantize` writes the elements of
    /// one row, whose index is its first argument.
    fn dequantized(
        &self,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
        dequantize: impl Fn(usize, &mut [f32]) + Sync,
    ) -> TensorData {
        // If the parameter is a vector, a slice is one element, and the range may begin or end inside a quantized
        // block. Dequantize the whole vector before cutting out the range.
        if self.shape.len() == 1 {
            let whole = dequantized(0..1, self.shape.clone(), dtype, dequantize);
            let bytes = part(whole.as_bytes(), self.shape[0], range).to_vec();
            return TensorData::from_bytes_vec(bytes, shape, dtype);
        }
        let of_slice = self.rows() / self.shape[0];
        let rows = range.start * of_slice..range.end * of_slice;
        dequantized(rows, shape, dtype, dequantize)
    }

    /// Returns the layout in which the rows are packed into 32-bit words, or `None` if the rows stay unquantized. A
    /// quantized parameter keeps its own quantization. A float parameter is quantized to `target`.
    pub fn layout(&self, target: Option<QuantTarget>) -> Option<Layout> {
        let columns = match self.shape.len() {
            0 | 1 => return None,
            rank => self.shape[rank - 1],
        };
        match &self.numbers {
            Numbers::Floats { .. } | Numbers::Fp8(_) => target?.layout(columns),
            Numbers::Blocks { format, .. } => format.words(columns),
            Numbers::Packed(packed) => packed.layout(),
            Numbers::Fp4(matrix) => matrix.layout(),
            Numbers::Mobile(matrix) => matrix.layout(),
            Numbers::Joined(parts) => layout_of_all(parts, target),
            Numbers::Stacked(parts) => layout_of_all(&parts[..], target),
        }
    }

    /// Returns the slices `range` (indices of the first dimension) as packed 32-bit words, `[rows, words]`. `layout`
    /// must be the result of [`layout`](Self::layout).
    pub fn words(
        &self,
        range: Range<usize>,
        target: Option<QuantTarget>,
        layout: Layout,
    ) -> TensorData {
        let of_slice = self.rows() / self.shape[0];
        let rows = range.start * of_slice..range.end * of_slice;
        let shape = vec![rows.len(), layout.words()];
        match &self.numbers {
            Numbers::Floats { dtype, bytes } => {
                let row_bytes = layout.columns * dtype.size();
                packed(rows, layout.words(), |row, words| {
                    if let Some(target) = target {
                        let numbers = numbers(&bytes[row * row_bytes..][..row_bytes], *dtype);
                        target.pack(layout, &numbers, words);
                    }
                })
            }
            Numbers::Blocks { format, bytes } => {
                let row_bytes = bytes.len() / self.rows();
                packed(rows, layout.words(), |row, words| {
                    format.pack(layout, &bytes[row * row_bytes..][..row_bytes], words);
                })
            }
            Numbers::Packed(matrix) => packed(rows, layout.words(), |row, words| {
                matrix.pack(layout, row, words);
            }),
            Numbers::Fp4(matrix) => packed(rows, layout.words(), |row, words| {
                matrix.pack(layout, row, words);
            }),
            Numbers::Mobile(matrix) => packed(rows, layout.words(), |row, words| {
                matrix.pack(layout, row, words);
            }),
            Numbers::Fp8(matrix) => packed(rows, layout.words(), |row, words| {
                if let Some(target) = target {
                    let mut numbers = vec![0.0; layout.columns];
                    matrix.dequantize(row, &mut numbers);
                    target.pack(layout, &numbers, words);
                }
            }),
            Numbers::Joined(parts) => {
                let whole = |part: &Self| part.words(0..part.shape[0], target, layout);
                in_a_row(parts[range].iter().map(whole), shape, DType::U32)
            }
            Numbers::Stacked(parts) => {
                let of_slice = |slice: usize| {
                    let parts = parts.iter();
                    parts.map(move |part| part.words(slice..slice + 1, target, layout))
                };
                in_a_row(range.flat_map(of_slice), shape, DType::U32)
            }
        }
    }

    /// Copies the rows `rows` of a matrix into `bytes`. The elements are cast to `dtype`, which is f32, f16 or bf16.
    /// `rows` may be in any order and may contain a row more than once.
    ///
    /// # Panics
    /// Panics if the matrix lacks one of the rows.
    pub fn gather(&self, rows: &[u32], dtype: DType, bytes: &mut [u8]) {
        let columns = self.shape[1];
        let row_bytes = columns * dtype.size();
        let row = |all: &'a [u8], index: usize| {
            let row = rows[index] as usize;
            part(all, self.shape[0], row..row + 1)
        };
        if let Numbers::Floats {
            dtype: own,
            bytes: all,
        } = self.numbers
            && own == dtype
        {
            let copy =
                |index, (): &mut (), bytes: &mut [u8]| bytes.copy_from_slice(row(all, index));
            return write_rows(bytes, 0..rows.len(), row_bytes, || (), copy);
        }
        let space = || vec![0.0; columns];
        write_rows(
            bytes,
            0..rows.len(),
            row_bytes,
            space,
            |index, space, bytes| {
                match &self.numbers {
                    Numbers::Floats { dtype, bytes: all } => {
                        space.copy_from_slice(&numbers(row(all, index), *dtype));
                    }
                    Numbers::Blocks { format, bytes: all } => {
                        format.dequantize(row(all, index), space)
                    }
                    Numbers::Packed(packed) => packed.dequantize(rows[index] as usize, space),
                    Numbers::Fp8(matrix) => matrix.dequantize(rows[index] as usize, space),
                    Numbers::Fp4(matrix) => matrix.dequantize(rows[index] as usize, space),
                    Numbers::Mobile(matrix) => {
                        matrix.dequantize(rows[index] as usize, dtype, space);
                    }
                    Numbers::Joined(_) | Numbers::Stacked(_) => {
                        let row = rows[index] as usize;
                        let found = self.slices(row..row + 1, DType::F32);
                        *space = found.iter().collect();
                    }
                }
                rounded(space, dtype, bytes);
            },
        );
    }

    /// Returns the slices `range` (indices of the first dimension) as floats in `dtype`.
    pub fn slices(&self, range: Range<usize>, dtype: DType) -> TensorData {
        let mut shape = self.shape.clone();
        shape[0] = range.len();
        match &self.numbers {
            Numbers::Floats {
                dtype: written,
                bytes,
            } => {
                let bytes = part(bytes, self.shape[0], range).to_vec();
                TensorData::from_bytes_vec(bytes, shape, *written).convert_dtype(dtype)
            }
            Numbers::Blocks { format, bytes } => {
                let row_bytes = bytes.len() / self.rows();
                self.dequantized(range, shape, dtype, |row, numbers| {
                    format.dequantize(&bytes[row * row_bytes..][..row_bytes], numbers);
                })
            }
            Numbers::Packed(packed) => self.dequantized(range, shape, dtype, |row, numbers| {
                packed.dequantize(row, numbers);
            }),
            Numbers::Fp8(matrix) => self.dequantized(range, shape, dtype, |row, numbers| {
                matrix.dequantize(row, numbers);
            }),
            Numbers::Fp4(matrix) => self.dequantized(range, shape, dtype, |row, numbers| {
                matrix.dequantize(row, numbers);
            }),
            Numbers::Mobile(matrix) => self.dequantized(range, shape, dtype, |row, numbers| {
                matrix.dequantize(row, dtype, numbers);
            }),
            Numbers::Joined(parts) => {
                let whole = |part: &Self| part.slices(0..part.shape[0], dtype);
                in_a_row(parts[range].iter().map(whole), shape, dtype)
            }
            Numbers::Stacked(parts) => {
                let of_slice = |slice: usize| {
                    let parts = parts.iter();
                    parts.map(move |part| part.slices(slice..slice + 1, dtype))
                };
                in_a_row(range.flat_map(of_slice), shape, dtype)
            }
        }
    }
}

/// Returns the packed layout that all tensors in `parts` share. Returns `None` if the layouts differ or the tensors
/// stay unquantized.
fn layout_of_all(parts: &[Source<'_>], target: Option<QuantTarget>) -> Option<Layout> {
    let mut layouts = parts.iter().map(|part| part.layout(target));
    let first = layouts.next()??;
    layouts.all(|layout| layout == Some(first)).then_some(first)
}

/// Concatenates the elements of the tensors in `parts` into one tensor of the shape `shape`. All parts have the dtype
/// `dtype`.
fn in_a_row(
    parts: impl Iterator<Item = TensorData>,
    shape: Vec<usize>,
    dtype: DType,
) -> TensorData {
    let mut bytes = Vec::with_capacity(shape.iter().product::<usize>() * dtype.size());
    for part in parts {
        bytes.extend_from_slice(part.as_bytes());
    }
    TensorData::from_bytes_vec(bytes, shape, dtype)
}

fn same_shape(name: String, found: &[usize], expected: &[usize]) -> Result<(), TensorProblem> {
    match found == expected {
        true => Ok(()),
        false => Err(TensorProblem::Shape {
            name,
            found: found.into(),
            expected: expected.into(),
        }),
    }
}

/// Returns the bytes of the slices `range`. `bytes` holds a whole parameter, which consists of `slices` slices of equal
/// size.
fn part(bytes: &[u8], slices: usize, range: Range<usize>) -> &[u8] {
    let slice = bytes.len() / slices;
    &bytes[range.start * slice..range.end * slice]
}

/// Returns the Burn dtype for a floating-point dtype of safetensors files.
pub(super) fn burn_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F64 => Some(DType::F64),
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// Returns a tensor of a file in f32. Returns `None` if the tensor's dtype is not f64, f32, f16 or bf16.
pub(super) fn floats<const D: usize>(
    view: &TensorView<'_>,
    shape: [usize; D],
) -> Option<TensorData> {
    let written = burn_dtype(view.dtype())?;
    let data = TensorData::from_bytes_vec(view.data().to_vec(), shape, written);
    Some(data.convert_dtype(DType::F32))
}

/// The number of bytes of a tensor that are uploaded at once. During the upload, the host holds these bytes twice. A
/// table of several GB is therefore uploaded in portions.
pub(super) const PORTION: usize = 256 << 20;

/// Uploads the slices `range` (indices of the first dimension) of a parameter to `device`, about `portion` bytes at a
/// time.
pub(super) fn upload<const D: usize>(
    source: &Source<'_>,
    range: Range<usize>,
    dtype: DType,
    device: &Device,
    portion: usize,
) -> Tensor<D> {
    let slices = range.len();
    let at_once = (portion / source.slice_bytes()).clamp(1, slices);
    if at_once == slices {
        // Allocate the weights outside the memory pools of temporary tensors, because the weights live as long as the
        // model.
        return device.memory_persistent_allocations(source.slices(range, dtype), |data| {
            Tensor::from_data(data, (device, dtype))
        });
    }
    let shape: [usize; D] = std::array::from_fn(|dimension| match dimension {
        0 => slices,
        _ => source.shape[dimension],
    });
    let mut whole = Tensor::<D>::empty(shape, (device, dtype));
    for start in (0..slices).step_by(at_once) {
        let end = (start + at_once).min(slices);
        let ranges = std::array::from_fn::<_, D, _>(|dimension| match dimension {
            0 => start..end,
            _ => 0..shape[dimension],
        });
        let part = source.slices(range.start + start..range.start + end, dtype);
        whole = whole.slice_assign(ranges, Tensor::from_data(part, (device, dtype)));
        // Wait until the upload is complete, because queued uploads keep their bytes on the host. Ignore the error
        // here: the loader reports device errors later.
        let _ = device.sync();
    }
    whole.detach()
}

/// Packs the slices `range` (indices of the first dimension) of a parameter into 32-bit words, `[rows, words]`. The
/// function packs and uploads about `portion` bytes at a time.
pub(super) fn upload_words(
    source: &Source<'_>,
    range: Range<usize>,
    target: Option<QuantTarget>,
    layout: Layout,
    device: &Device,
    portion: usize,
) -> Tensor<2, Int> {
    let slices = range.len();
    let words = layout.words();
    let of_slice = source.rows() / source.shape[0];
    let at_once = (portion / (of_slice * words * size_of::<u32>())).clamp(1, slices);
    let options = (device, DType::U32);
    if at_once == slices {
        let all = source.words(range, target, layout);
        return device.memory_persistent_allocations(all, |data| Tensor::from_data(data, options));
    }
    let mut whole = Tensor::<2, Int>::empty([slices * of_slice, words], options);
    for start in (0..slices).step_by(at_once) {
        let end = (start + at_once).min(slices);
        let part = source.words(range.start + start..range.start + end, target, layout);
        let part = Tensor::from_data(part, options);
        let place = [start * of_slice..end * of_slice, 0..words];
        whole = whole.slice_assign(place, part);
        let _ = device.sync();
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{files::TensorFiles, folder::Folder};
    use crate::config::quantization::QuantizationSchemes;
    use std::sync::Arc;

    fn load(source: &Source<'_>, portion: usize) -> Vec<f32> {
        let all = 0..source.shape[0];
        upload::<2>(source, all, DType::F32, &Device::default(), portion)
            .into_data()
            .iter::<f32>()
            .collect()
    }

    #[test]
    fn upload_in_portions_equals_upload_at_once() {
        let bytes = include_bytes!("../../embedded/model.safetensors");
        let files = TensorFiles::embedded("model.safetensors", bytes)
            .expect("the embedded file is valid safetensors");
        let folder = Folder::of(Arc::new(files), QuantizationSchemes::default());
        let source = folder
            .get("embed_tokens.weight")
            .expect("the file has the embedding table");
        let whole = load(&source, usize::MAX);
        let row = source.len() / source.shape[0];
        for portion in [1, row, 7 * row + 1, source.len() - 1] {
            assert_eq!(load(&source, portion), whole, "{portion} bytes at a time");
        }
    }

    /// Checks that an upload in several portions gives the same elements as an upload in one portion. Each Q8_0 block
    /// has a scale of its own, so the elements would change if blocks were exchanged.
    #[test]
    fn upload_of_blocks_in_portions_equals_upload_at_once() {
        let bytes: Vec<u8> = (0..6u8)
            .flat_map(|block| [vec![0, 60 + block], vec![block; 32]].concat())
            .collect();
        let source = Source::blocks(vec![3, 64], BlockFormat::Q8_0, &bytes);
        let whole = load(&source, usize::MAX);
        assert_eq!(whole[..64], [[0.0; 32], [1.0 * 1.25; 32]].concat()[..]);
        for portion in [1, 256, 600] {
            assert_eq!(load(&source, portion), whole, "{portion} bytes at a time");
        }
        let vector = Source::blocks(vec![192], BlockFormat::Q8_0, &bytes);
        let numbers = |range| -> Vec<f32> { vector.slices(range, DType::F32).iter().collect() };
        assert_eq!(numbers(0..192), whole);
        assert_eq!(numbers(30..70), whole[30..70]);
    }

    #[test]
    fn stacked_of_two_tensors_interleaves_their_slices() {
        let bytes = |numbers: [f32; 4]| numbers.map(f32::to_le_bytes).concat();
        let (first, second) = (bytes([1.0, 2.0, 3.0, 4.0]), bytes([5.0, 6.0, 7.0, 8.0]));
        let source = |bytes| Source::floats(vec![2, 1, 2], DType::F32, bytes);
        let stacked = Source::stacked(source(&first), "second".into(), source(&second));
        let stacked = stacked.expect("the shapes are equal");
        assert_eq!(stacked.shape, [2, 2, 2]);
        let numbers = stacked.slices(0..2, DType::F32);
        let numbers: Vec<f32> = numbers.iter().collect();
        assert_eq!(numbers, [1.0, 2.0, 5.0, 6.0, 3.0, 4.0, 7.0, 8.0]);
        let other = Source::floats(vec![1, 2, 2], DType::F32, &second);
        assert!(Source::stacked(source(&first), "second".into(), other).is_err());
    }

    #[test]
    fn joined_of_matrices_makes_each_a_slice() {
        let bytes = |number: f32| [number, number + 1.0].map(f32::to_le_bytes).concat();
        let matrices = [bytes(0.0), bytes(10.0), bytes(20.0)];
        let source = |bytes| Source::floats(vec![1, 2], DType::F32, bytes);
        let named = |bytes| ("a matrix".to_owned(), source(bytes));
        let joined = Source::joined(matrices.iter().map(|bytes| named(&bytes[..])).collect());
        let joined = joined.expect("the shapes are equal");
        assert_eq!(joined.shape, [3, 1, 2]);
        let numbers = joined.slices(1..3, DType::F32);
        let numbers: Vec<f32> = numbers.iter().collect();
        assert_eq!(numbers, [10.0, 11.0, 20.0, 21.0]);
    }
}
