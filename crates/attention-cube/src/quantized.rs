//! Keys and values in int8: a code from −127 to 127 a number, a scale in f32 a row, half of what bf16 takes.
//!
//! ```
//! use attention_cube::quantized::{QuantizedRows, quantized_attention};
//! use attention_cube::AttentionOptions;
//! use burn::tensor::{Device, Distribution, Tensor};
//!
//! # #[cfg(feature = "flex")] {
//! let device = Device::flex();
//! let random = |heads, length| Tensor::<4>::random([1, heads, length, 64], Distribution::Default, &device);
//! // Once a token:
//! let (key, value) = (QuantizedRows::new(random(2, 300)), QuantizedRows::new(random(2, 300)));
//! // As often as they are read:
//! let output = quantized_attention(random(8, 1), key, value, AttentionOptions::new().causal());
//! assert_eq!(output.dims(), [1, 8, 1, 64]);
//! # }
//! ```
//!
//! # Contract
//! A row of `columns` numbers, a multiple of 4, is `columns / 4` words, each of four codes, the first column's in the lowest byte, and a scale.
//! It stands for `code · scale`. Words are a tensor of integers in 32 bits, `[batch, kv_heads, kv_len, columns / 4]`, scales
//! `[batch, kv_heads, kv_len]` in f32; both may be views.
//!
//! | case | result |
//! |---|---|
//! | attention | [the definition](crate::reference) over these numbers, with every option of [`AttentionOptions`] |
//! | up to 32 rows, `q_len` times the heads that share a key, forward | words are read where they lie: scores in f32 of the exact codes, times the scale; a value's scale is multiplied into its probability |
//! | these in bf16 on matrix units | codes and products stay exact; a probability times its value's scale is rounded to bf16, as a probability is over whole numbers |
//! | more rows, other devices, a query under autodiff | read through a copy in the query's dtype, of this call's keys and values alone, and where there are kernels of those alone that queries see by causal mask, window and length: a number is rounded once more, to that dtype |
//! | [`QuantizedRows::new`] | the scale is a row's largest magnitude / 127, each number the nearest multiple: off by at most half of the scale, and a rounding in f32 |
//! | a row of zeros, or of nothing above 2⁻¹¹⁶ | zeros, scale 0 |
//! | a row with NaN or infinity | scale NaN: whoever sees the row may get NaN, and as with whole numbers, where some queries see it, others of their head and those that share its keys; what no query sees reaches nobody |
//! | queries | up to 2¹⁰⁰: their products with codes are summed before the scale makes them smaller |
//! | gradients | the query's (by the copy), the bias's and the sinks' as ever; keys and values have none |

use crate::backend::{AttentionBackend, QuantizedInputs, QuantizedTensors, check_backend};
use crate::problem::{check_dtype, check_place};
use crate::{AttentionError, AttentionOptions, AttentionProblem, reference};
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor};

/// Numbers of a word.
pub(crate) const CODES: usize = 4;

/// Bits of the magnitude below which a row is zero: 2⁻¹¹⁶, so that no scale is below the least normal number.
pub(crate) const ZERO_BELOW: u32 = (127 - 116) << 23;

/// The largest code.
pub(crate) const LARGEST: f32 = 127.0;

/// Rows of int8 with a scale each, `[batch, kv_heads, kv_len, columns]`: the keys or the values of an attention.
#[derive(Clone, Debug)]
pub struct QuantizedRows {
    words: Tensor<4, Int>,
    scales: Tensor<3>,
}

impl QuantizedRows {
    /// Quantizes rows of f32, f16 or bf16 (f64 where there are no kernels), whatever their strides. They get no gradients.
    ///
    /// # Panics
    /// With the text of [`AttentionError`], as [`try_new`](Self::try_new) returns it.
    pub fn new(rows: Tensor<4>) -> Self {
        Self::try_new(rows).unwrap_or_else(|error| panic!("QuantizedRows::new: {error}"))
    }

    /// [`new`](Self::new), with an error instead of a panic.
    ///
    /// # Errors
    /// [`AttentionError`] where columns are no multiple of 4, or there are none, or the device is not served.
    pub fn try_new(rows: Tensor<4>) -> Result<Self, AttentionError> {
        let columns = rows.dims()[3];
        check_backend(&rows.device())?;
        if columns == 0 || !columns.is_multiple_of(CODES) {
            return Err(AttentionError::Shape {
                argument: "rows",
                has: rows.dims().to_vec(),
                dimension: "columns",
                found: columns,
                expected: format!("a multiple of {CODES}, the codes of a word"),
            });
        }
        // Words have no gradients, and tensors of integers no autodiff.
        let rows = rows.without_autodiff().into_dispatch();
        let QuantizedTensors { words, scales } = Dispatch::quantize_rows(rows);
        Ok(Self {
            words: Tensor::from_dispatch(words),
            scales: Tensor::from_dispatch(scales),
        })
    }

    /// Rows that were quantized before: the words, and the scales of each. They get no gradients.
    ///
    /// # Errors
    /// [`AttentionError`] where they do not fit each other.
    pub fn of_parts(words: Tensor<4, Int>, scales: Tensor<3>) -> Result<Self, AttentionError> {
        let [batch, heads, length, of_row] = words.dims();
        if of_row == 0 {
            return Err(AttentionError::Shape {
                argument: "words",
                has: words.dims().to_vec(),
                dimension: "columns / 4",
                found: of_row,
                expected: "at least 1".into(),
            });
        }
        let names = ["batch", "kv_heads", "kv_len"];
        for ((found, size), dimension) in scales
            .dims()
            .into_iter()
            .zip([batch, heads, length])
            .zip(names)
        {
            if found != size {
                return Err(AttentionError::Shape {
                    argument: "scales",
                    has: scales.dims().to_vec(),
                    dimension,
                    found,
                    expected: format!("{size}, the words'"),
                });
            }
        }
        check_dtype("words", words.dtype(), &[(DType::I32, "four codes")])?;
        check_dtype("scales", scales.dtype(), &[(DType::F32, "of any rows")])?;
        check_place("scales", scales.device(), &words.device())?;
        // Else they would have a strategy of gradient checkpointing, which might not be the query's.
        Ok(Self {
            words: words.without_autodiff(),
            scales: scales.without_autodiff(),
        })
    }

    /// Words `[batch, kv_heads, kv_len, columns / 4]`, and the scales of their rows.
    pub fn into_parts(self) -> (Tensor<4, Int>, Tensor<3>) {
        (self.words, self.scales)
    }

    /// `[batch, kv_heads, kv_len, columns]`.
    pub fn dims(&self) -> [usize; 4] {
        let [batch, heads, length, words] = self.words.dims();
        [batch, heads, length, words * CODES]
    }

    /// Where they are.
    pub fn device(&self) -> Device {
        self.words.device()
    }

    /// Bytes of words and scales.
    pub fn bytes(&self) -> usize {
        let numbers = self.words.shape().num_elements() + self.scales.shape().num_elements();
        numbers * size_of::<u32>()
    }

    /// What the rows stand for, in `dtype`.
    ///
    /// # Errors
    /// [`AttentionError`] where the device is not served, or has no numbers of `dtype`.
    pub fn dequantize(self, dtype: DType) -> Result<Tensor<4>, AttentionError> {
        let device = self.device();
        check_backend(&device)?;
        let floats = [DType::F32, DType::F16, DType::BF16, DType::F64];
        let of_device: Vec<_> = floats
            .into_iter()
            .filter(|dtype| device.supports_dtype(*dtype))
            .map(|dtype| (dtype, "a float of the device"))
            .collect();
        check_dtype("rows", dtype, &of_device)?;
        Ok(Tensor::from_dispatch(Dispatch::dequantize_rows(
            self.into_tensors(),
            dtype,
        )))
    }

    pub(crate) fn into_tensors(self) -> QuantizedTensors<Dispatch> {
        QuantizedTensors {
            words: self.words.into_dispatch(),
            scales: self.scales.into_dispatch(),
        }
    }
}

/// Attention over quantized keys and values, by the fastest kernel that serves the problem on the tensors' device.
///
/// The contract is in the [module's documentation](self).
///
/// # Panics
/// With the text of [`AttentionError`] where an argument does not fit; [`try_quantized_attention`] returns it instead.
pub fn quantized_attention(
    query: Tensor<4>,
    key: QuantizedRows,
    value: QuantizedRows,
    options: AttentionOptions,
) -> Tensor<4> {
    match try_quantized_attention(query, key, value, options) {
        Ok((output, _)) => output,
        Err(error) => panic!("quantized_attention: {error}"),
    }
}

/// [`quantized_attention`] and the logsumexp of every query's scores, as [`attention_with_lse`](crate::attention_with_lse) gives it, with an
/// error instead of a panic.
///
/// # Errors
/// [`AttentionError`] where an argument does not fit.
pub fn try_quantized_attention(
    query: Tensor<4>,
    key: QuantizedRows,
    value: QuantizedRows,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let problem = AttentionProblem::quantized(&query, &key, &value, &options)?;
    check_backend(&query.device())?;
    let (query_segments, key_segments) = options.segments.unzip();
    let inputs = QuantizedInputs {
        query: query.into_dispatch(),
        key: key.into_tensors(),
        value: value.into_tensors(),
        mask: options.mask.map(Tensor::into_dispatch).into(),
        bias: options.bias.map(Tensor::into_dispatch).into(),
        kv_lengths: options.kv_lengths.map(Tensor::into_dispatch).into(),
        query_segments: query_segments.map(Tensor::into_dispatch).into(),
        key_segments: key_segments.map(Tensor::into_dispatch).into(),
        sinks: options.sinks.map(Tensor::into_dispatch).into(),
    };
    let result = Dispatch::quantized_attention_forward(inputs, problem.clone());
    let logsumexp = reference::logsumexp_of_parts::<Dispatch>(result.logsumexp, &problem);
    Ok((
        Tensor::from_dispatch(result.output),
        Tensor::from_dispatch(logsumexp),
    ))
}
