//! Keys and values in 8-bit codes, with half the memory of bf16. A code is an int8 number or an e4m3 float (FP8). An
//! element is the product of an f32 scale and the number that the element's code represents.
//!
//! ```
//! use attention_cube::quantized::{QuantizedRows, quantized_attention};
//! use attention_cube::AttentionOptions;
//! use burn::tensor::{Device, Distribution, Tensor};
//!
//! # #[cfg(feature = "flex")] {
//! let device = Device::flex();
//! let random = |heads, length| Tensor::<4>::random([1, heads, length, 64], Distribution::Default, &device);
//! // Quantize each token once:
//! let (key, value) = (QuantizedRows::new(random(2, 300)), QuantizedRows::new(random(2, 300)));
//! // Read the int8 rows in every step:
//! let output = quantized_attention(random(8, 1), key, value, AttentionOptions::new().causal());
//! assert_eq!(output.dims(), [1, 8, 1, 64]);
//! # }
//! ```
//!
//! The KV caches of vLLM and compressed-tensors in FP8 have one scale per tensor or per head:
//!
//! ```
//! # use attention_cube::quantized::{QuantizedRows, quantized_attention};
//! # use attention_cube::AttentionOptions;
//! # use burn::tensor::{Device, Distribution, Tensor};
//! # #[cfg(feature = "flex")] {
//! # let device = Device::flex();
//! # let random = |heads, length| Tensor::<4>::random([1, heads, length, 64], Distribution::Default, &device);
//! let k_scale = Tensor::<3>::from_data([[[0.25]]], &device);
//! let v_scale = Tensor::<3>::from_data([[[0.5], [0.125]]], &device);
//! let key = QuantizedRows::e4m3(random(2, 300), k_scale);
//! let value = QuantizedRows::e4m3(random(2, 300), v_scale);
//! let output = quantized_attention(random(8, 1), key, value, AttentionOptions::new().causal());
//! assert_eq!(output.dims(), [1, 8, 1, 64]);
//! # }
//! ```
//!
//! # Contract
//! A row of `columns` elements is stored as `columns / 4` words of four codes each. `columns` is a multiple of 4. The
//! first of a word's four columns is in the lowest byte. An element is the product of its row's scale and the number
//! that the element's code represents.
//!
//! The words are an i32 tensor, `[batch, kv_heads, kv_len, columns / 4]`. The scales are an f32 tensor,
//! `[batch, kv_heads, kv_len]`. In e4m3, a dimension of the scales may be 1: a scale then applies to all indices along
//! this dimension. Both tensors may be views. Keys and values have the same format.
//!
//! | case | result |
//! |---|---|
//! | attention | [the definition](crate::reference) over the dequantized rows, with every option of [`AttentionOptions`] |
//! | forward with up to 32 query rows (`q_len` times the number of query heads per key head) | kernels read the words without a dequantized copy. The key's scale multiplies the score, and the scale of a row of V multiplies the probability |
//! | e4m3 | the codes are those of OCP FP8 E4M3 (e4m3fn). The two NaN codes count as ±480 |
//! | [`QuantizedRows::e4m3`] | each code is the nearest to `element / scale`, with ties to the even code. Quotients beyond ±448 become ±448, and NaN becomes a NaN code |
//! | forward with up to 32 query rows in bf16 on matrix units | the codes, and their products with elements of the query, are exact. The product of a probability and its V scale is rounded to bf16, as probabilities are for an unquantized V |
//! | more than 32 query rows, devices without kernels, or a query under autodiff | attention reads a dequantized copy of the call's keys and values, in the query's dtype. The copy adds one rounding. On devices with kernels, only visible rows are copied |
//! | [`QuantizedRows::new`] | the scale is the row's largest magnitude / 127, and each code is the nearest multiple of the scale. The error is at most half of the scale, plus one f32 rounding |
//! | an int8 row whose largest magnitude is below 2⁻¹¹⁶ | all codes are zero, and the scale is 0 |
//! | an int8 row with NaN or infinity | the scale is NaN. If some query sees the row, all queries of the query heads that read the row's key head may get NaN. A row that no query sees has no effect |
//! | elements of the query | magnitudes up to 2¹⁰⁰ are supported. Larger magnitudes could overflow in the sum of `q · code` |
//! | gradients | the query (through the dequantized copy), the bias and the sinks receive gradients; keys and values receive none |

use crate::backend::{AttentionBackend, check_backend};
use crate::error::AttentionError;
use crate::options::AttentionOptions;
use crate::problem::{AttentionProblem, check_dtype, check_place_of};
use crate::reference;
use crate::types::quantized::CODES;
pub use crate::types::quantized::{CodeFormat, QuantizedRows};
use crate::types::tensors::{QuantizedInputs, QuantizedTensors, intervals, table};
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

impl QuantizedRows {
    /// Quantizes rows to int8, with one scale per row. The rows are in f32, f16 or bf16 (on devices without kernels
    /// also in f64), with any strides. Autodiff does not track the result.
    ///
    /// # Shapes
    /// `rows [batch, kv_heads, kv_len, columns]`.
    ///
    /// # Panics
    /// Panics with the text of the [`AttentionError`] that [`try_new`](Self::try_new) returns.
    pub fn new(rows: Tensor<4>) -> Self {
        Self::try_new(rows).unwrap_or_else(|error| panic!("QuantizedRows::new: {error}"))
    }

    /// Quantizes rows as [`new`](Self::new) does, but returns an error instead of a panic.
    ///
    /// # Errors
    /// Returns [`AttentionError`] if `columns` is 0 or not a multiple of 4, or if attention does not support the device.
    pub fn try_new(rows: Tensor<4>) -> Result<Self, AttentionError> {
        check_rows(&rows)?;
        // Autodiff is removed from the rows, because the words are an integer tensor and have no gradients.
        let rows = rows.without_autodiff().into_dispatch();
        let QuantizedTensors { words, scales } = Dispatch::quantize_rows(rows);
        Ok(Self {
            words: Tensor::from_dispatch(words),
            scales: Tensor::from_dispatch(scales),
            format: CodeFormat::Int8,
        })
    }

    /// Converts rows in f32, f16 or bf16 with any strides to e4m3 codes of `rows / scales`. Autodiff does not track the result.
    ///
    /// # Shapes
    /// `rows [batch, kv_heads, kv_len, columns]`, `scales [batch, kv_heads, kv_len]` in f32. Each dimension of `scales` may be 1:
    /// `[1, 1, 1]` is one scale for the tensor, and `[1, kv_heads, 1]` one scale per head.
    ///
    /// # Panics
    /// Panics with the text of the [`AttentionError`] that [`try_e4m3`](Self::try_e4m3) returns.
    pub fn e4m3(rows: Tensor<4>, scales: Tensor<3>) -> Self {
        Self::try_e4m3(rows, scales).unwrap_or_else(|error| panic!("QuantizedRows::e4m3: {error}"))
    }

    /// Converts rows as [`e4m3`](Self::e4m3) does, but returns an error instead of a panic.
    ///
    /// # Errors
    /// Returns [`AttentionError`] if `columns` is 0 or not a multiple of 4, if the scales do not fit the rows, or if attention
    /// does not support the device.
    pub fn try_e4m3(rows: Tensor<4>, scales: Tensor<3>) -> Result<Self, AttentionError> {
        check_rows(&rows)?;
        let [batch, heads, length, _] = rows.dims();
        check_scales(&scales, [batch, heads, length], CodeFormat::E4m3)?;
        check_place_of("scales", scales.device(), "row", &rows.device())?;
        let (rows, scales) = (rows.without_autodiff(), scales.without_autodiff());
        let words = Dispatch::e4m3_words(
            rows.into_dispatch(),
            scales_of_rows(scales.clone(), [batch, heads, length]).into_dispatch(),
        );
        Ok(Self {
            words: Tensor::from_dispatch(words),
            scales,
            format: CodeFormat::E4m3,
        })
    }

    /// Builds rows of e4m3 codes from words and scales, such as those of a checkpoint or of another program's KV cache. Autodiff
    /// does not track the result.
    ///
    /// # Shapes
    /// `words [batch, kv_heads, kv_len, columns / 4]` in i32, `scales [batch, kv_heads, kv_len]` in f32. Each dimension of
    /// `scales` may be 1.
    ///
    /// # Errors
    /// Returns [`AttentionError`] if the words and the scales do not fit each other.
    pub fn of_e4m3_parts(words: Tensor<4, Int>, scales: Tensor<3>) -> Result<Self, AttentionError> {
        Self::of_format(words, scales, CodeFormat::E4m3)
    }

    /// Builds int8 rows from words and scales that were quantized earlier. Autodiff does not track the result.
    ///
    /// # Shapes
    /// `words [batch, kv_heads, kv_len, columns / 4]` in i32, `scales [batch, kv_heads, kv_len]` in f32.
    ///
    /// # Errors
    /// Returns [`AttentionError`] if the words and the scales do not fit each other.
    pub fn of_parts(words: Tensor<4, Int>, scales: Tensor<3>) -> Result<Self, AttentionError> {
        Self::of_format(words, scales, CodeFormat::Int8)
    }

    fn of_format(
        words: Tensor<4, Int>,
        scales: Tensor<3>,
        format: CodeFormat,
    ) -> Result<Self, AttentionError> {
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
        check_scales(&scales, [batch, heads, length], format)?;
        check_dtype(
            "words",
            words.dtype(),
            &[(DType::I32, "four codes per word")],
        )?;
        check_place_of("scales", scales.device(), "word", &words.device())?;
        // Remove autodiff from words and scales. Their gradient checkpointing strategy might differ from the query's
        // strategy, and Burn cannot mix strategies.
        Ok(Self {
            words: words.without_autodiff(),
            scales: scales.without_autodiff(),
            format,
        })
    }

    /// Returns the words, `[batch, kv_heads, kv_len, columns / 4]`, and the scales, `[batch, kv_heads, kv_len]`. A dimension of
    /// e4m3 scales may be 1.
    pub fn into_parts(self) -> (Tensor<4, Int>, Tensor<3>) {
        (self.words, self.scales)
    }

    /// Returns the size of words and scales in bytes.
    pub fn bytes(&self) -> usize {
        let numbers = self.words.shape().num_elements() + self.scales.shape().num_elements();
        numbers * size_of::<u32>()
    }

    /// Dequantizes the rows to `dtype`, `[batch, kv_heads, kv_len, columns]`.
    ///
    /// # Errors
    /// Returns [`AttentionError`] if attention does not support the device, or if the device does not support `dtype`.
    pub fn dequantize(self, dtype: DType) -> Result<Tensor<4>, AttentionError> {
        let device = self.device();
        check_backend(&device)?;
        let floats = [DType::F32, DType::F16, DType::BF16, DType::F64];
        let of_device: Vec<_> = floats
            .into_iter()
            .filter(|dtype| device.supports_dtype(*dtype))
            .map(|dtype| (dtype, "a float dtype of the device"))
            .collect();
        check_dtype("rows", dtype, &of_device)?;
        let format = self.format;
        Ok(Tensor::from_dispatch(Dispatch::dequantize_rows(
            self.into_tensors(),
            format,
            dtype,
        )))
    }

    /// Returns the tensors that kernels read. In these tensors, each row has a scale of its own.
    pub(crate) fn into_tensors(self) -> QuantizedTensors<Dispatch> {
        let [batch, heads, length, _] = self.words.dims();
        QuantizedTensors {
            words: self.words.into_dispatch(),
            scales: scales_of_rows(self.scales, [batch, heads, length]).into_dispatch(),
        }
    }
}

/// Expands the scales to `rows`, `[batch, kv_heads, kv_len]`, so that each row has its own scale. The result is a view.
fn scales_of_rows(scales: Tensor<3>, rows: [usize; 3]) -> Tensor<3> {
    match rows.contains(&0) {
        // Burn's expand refuses dimensions of 0.
        true => Tensor::zeros(rows, (&scales.device(), DType::F32)),
        false => scales.expand(rows),
    }
}

/// Returns an error if rows cannot be packed into words of codes.
fn check_rows(rows: &Tensor<4>) -> Result<(), AttentionError> {
    let columns = rows.dims()[3];
    check_backend(&rows.device())?;
    match columns > 0 && columns.is_multiple_of(CODES) {
        true => Ok(()),
        false => Err(AttentionError::Shape {
            argument: "rows",
            has: rows.dims().to_vec(),
            dimension: "columns",
            found: columns,
            expected: format!("a multiple of {CODES}, the codes per word"),
        }),
    }
}

/// Returns an error if the scales do not fit rows of the shape `[batch, kv_heads, kv_len]`.
fn check_scales(
    scales: &Tensor<3>,
    rows: [usize; 3],
    format: CodeFormat,
) -> Result<(), AttentionError> {
    let names = ["batch", "kv_heads", "kv_len"];
    for ((found, size), dimension) in scales.dims().into_iter().zip(rows).zip(names) {
        let is_shared = format == CodeFormat::E4m3 && found == 1;
        if found != size && !is_shared {
            return Err(AttentionError::Shape {
                argument: "scales",
                has: scales.dims().to_vec(),
                dimension,
                found,
                expected: match format {
                    CodeFormat::Int8 => format!("{size}, the words'"),
                    CodeFormat::E4m3 => format!("1 or {size}, the words'"),
                },
            });
        }
    }
    check_dtype(
        "scales",
        scales.dtype(),
        &[(DType::F32, "the dtype of scales")],
    )
}

/// Computes attention over quantized keys and values, by the fastest kernel that serves the problem on the tensors' device.
///
/// The [module's documentation](self) states the contract.
///
/// # Shapes
/// `query [batch, q_heads, q_len, head_dim]`, `key` with rows `[batch, kv_heads, kv_len, head_dim]`, `value` with rows
/// `[batch, kv_heads, kv_len, value_dim]` → `[batch, q_heads, q_len, value_dim]`.
///
/// # Panics
/// Panics with the text of [`AttentionError`] if an argument does not fit; [`try_quantized_attention`] returns the error
/// instead.
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

/// Computes [`quantized_attention`] and the logsumexp. Returns an error instead of a panic.
///
/// The logsumexp is `[batch, q_heads, q_len]`, an f32 natural logarithm as in
/// [`attention_with_lse`](crate::attention_with_lse).
///
/// # Errors
/// Returns [`AttentionError`] if an argument does not fit.
pub fn try_quantized_attention(
    query: Tensor<4>,
    key: QuantizedRows,
    value: QuantizedRows,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let problem = AttentionProblem::quantized(&query, &key, &value, &options)?;
    check_backend(&query.device())?;
    let inputs = inputs_of(query, [key, value], None, options);
    let result = Dispatch::quantized_attention_forward(inputs, problem.clone());
    Ok(reference::output_and_lse(result, &problem))
}

/// Converts the tensors of a call over quantized keys and values to the types of Burn's dispatch.
pub(crate) fn inputs_of(
    query: Tensor<4>,
    [key, value]: [QuantizedRows; 2],
    page_table: Option<Tensor<2, Int>>,
    options: AttentionOptions,
) -> QuantizedInputs<Dispatch> {
    let intervals = intervals(&options);
    let mask = options.any_mask().map(|(mask, _)| mask.clone());
    let (query_segments, key_segments) = options.segments.unzip();
    QuantizedInputs {
        query: query.into_dispatch(),
        key: key.into_tensors(),
        value: value.into_tensors(),
        page_table: page_table.map(Tensor::into_dispatch).into(),
        mask: mask.map(Tensor::into_dispatch).into(),
        bias: options.bias.map(Tensor::into_dispatch).into(),
        kv_lengths: options.kv_lengths.map(Tensor::into_dispatch).into(),
        query_lengths: options.query_lengths.map(Tensor::into_dispatch).into(),
        query_segments: query_segments.map(Tensor::into_dispatch).into(),
        key_segments: key_segments.map(Tensor::into_dispatch).into(),
        intervals,
        sinks: options.sinks.map(Tensor::into_dispatch).into(),
        score_table: table(options.score_table),
        mask_table: table(options.mask_table),
    }
}
