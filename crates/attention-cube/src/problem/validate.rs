//! Validates the arguments of an attention call: shapes, dtypes, devices and the options' values.

use super::{AttentionProblem, MAX_HEAD_DIM};
use crate::block_mask::BlockMask;
use crate::error::AttentionError;
use crate::options::{AttentionOptions, Dropout};
use crate::types::quantized::{CodeFormat, QuantizedRows};
use burn::tensor::{DType, Device, Int, Tensor, kind::Basic};

/// The shapes and devices of keys and values. The keys and values may be quantized.
struct KeyValueShapes {
    key: [usize; 4],
    value: [usize; 4],
    devices: [Device; 2],
    quantized: Option<CodeFormat>,
}

impl KeyValueShapes {
    fn of_floats(key: &Tensor<4>, value: &Tensor<4>) -> Self {
        Self {
            key: key.dims(),
            value: value.dims(),
            devices: [key.device(), value.device()],
            quantized: None,
        }
    }

    fn of_codes(key: &QuantizedRows, value: &QuantizedRows) -> Result<Self, AttentionError> {
        if key.format != value.format {
            return Err(AttentionError::CodeFormats {
                key: key.format,
                value: value.format,
            });
        }
        Ok(Self {
            key: key.dims(),
            value: value.dims(),
            devices: [key.device(), value.device()],
            quantized: Some(key.format),
        })
    }
}

impl AttentionProblem {
    /// Validates the arguments and returns the problem that they describe.
    ///
    /// # Shapes
    /// `query [batch, q_heads, q_len, head_dim]`, `key [batch, kv_heads, kv_len, head_dim]`,
    /// `value [batch, kv_heads, kv_len, value_dim]`.
    ///
    /// # Errors
    /// Returns [`AttentionError`] if a shape, a dtype, a device or an option's value does not fit.
    pub fn new(
        query: &Tensor<4>,
        key: &Tensor<4>,
        value: &Tensor<4>,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let problem = Self::of(query, KeyValueShapes::of_floats(key, value), options)?;
        problem.with_dtypes_of(key, value)
    }

    /// Validates the arguments of a call with quantized keys and values, and returns the problem that the arguments
    /// describe.
    ///
    /// # Shapes
    /// `query [batch, q_heads, q_len, head_dim]`, `key [batch, kv_heads, kv_len, head_dim]`,
    /// `value [batch, kv_heads, kv_len, value_dim]`.
    ///
    /// # Errors
    /// Returns [`AttentionError`] if a shape, a dtype, a device or an option's value does not fit.
    pub fn quantized(
        query: &Tensor<4>,
        key: &QuantizedRows,
        value: &QuantizedRows,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        Self::of(query, KeyValueShapes::of_codes(key, value)?, options)
    }

    /// Validates the arguments of a call with keys and values in pages, and returns the problem that the arguments
    /// describe.
    ///
    /// # Shapes
    /// `query [batch, q_heads, q_len, head_dim]`, `key [pages, kv_heads, page_len, head_dim]`,
    /// `value [pages, kv_heads, page_len, value_dim]`, `page_table [batch, pages of a sequence]`.
    ///
    /// # Errors
    /// Returns [`AttentionError`] if a shape, a dtype, a device or an option's value does not fit.
    pub fn paged(
        query: &Tensor<4>,
        key: &Tensor<4>,
        value: &Tensor<4>,
        page_table: &Tensor<2, Int>,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let shapes = KeyValueShapes::of_floats(key, value);
        let problem = Self::of_pages(query, shapes, page_table, options)?;
        problem.with_dtypes_of(key, value)
    }

    /// Validates the arguments of a call with quantized keys and values in pages. Returns the problem that the
    /// arguments describe.
    ///
    /// # Shapes
    /// `query [batch, q_heads, q_len, head_dim]`, `key [pages, kv_heads, page_len, head_dim]`,
    /// `value [pages, kv_heads, page_len, value_dim]`, `page_table [batch, pages of a sequence]`.
    ///
    /// # Errors
    /// Returns [`AttentionError`] if a shape, a dtype, a device or an option's value does not fit.
    pub fn paged_quantized(
        query: &Tensor<4>,
        key: &QuantizedRows,
        value: &QuantizedRows,
        page_table: &Tensor<2, Int>,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let shapes = KeyValueShapes::of_codes(key, value)?;
        Self::of_pages(query, shapes, page_table, options)
    }

    /// Returns the problem if keys and values have the query's dtype, and an error otherwise.
    fn with_dtypes_of(self, key: &Tensor<4>, value: &Tensor<4>) -> Result<Self, AttentionError> {
        for (argument, tensor) in [("key", key), ("value", value)] {
            check_dtype(argument, tensor.dtype(), &[(self.dtype, "the query's")])?;
        }
        Ok(self)
    }

    /// Validates a problem with keys and values in pages. `pages` holds the shapes of the paged keys and values,
    /// `[pages, kv_heads, page_len, columns]`.
    fn of_pages(
        query: &Tensor<4>,
        pages: KeyValueShapes,
        page_table: &Tensor<2, Int>,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let [batch, _, _, head_dim] = query.dims();
        let [count, kv_heads, page_len, _] = pages.key;
        let [_, of_sequence] = page_table.dims();
        let names = ["number of pages", "kv_heads", "page_len", "columns"];
        let columns = Some((head_dim, "the query's head_dim"));
        check_dims("key", &pages.key, &names, [None, None, None, columns])?;
        let of_key = [
            Some((count, "the key's number of pages")),
            Some((kv_heads, "the key's kv_heads")),
            Some((page_len, "the key's page_len")),
            None,
        ];
        check_dims("value", &pages.value, &names, of_key)?;
        for (dimension, found) in [("number of pages", count), ("page_len", page_len)] {
            if found == 0 {
                return Err(AttentionError::Shape {
                    argument: "key",
                    has: pages.key.to_vec(),
                    dimension,
                    found,
                    expected: "at least 1".into(),
                });
            }
        }
        let of_batch = [Some((batch, "the query's batch")), None];
        let names = ["batch", "pages of a sequence"];
        check_dims("page_table", &page_table.dims(), &names, of_batch)?;
        check_device("page_table", page_table, &query.device())?;
        // Describe keys and values as contiguous tensors, because options such as the mask refer to a key by its
        // position in the sequence. The options do not depend on the page and the row that hold a key.
        let sequences =
            |[_, heads, _, columns]: [usize; 4]| [batch, heads, of_sequence * page_len, columns];
        let shapes = KeyValueShapes {
            key: sequences(pages.key),
            value: sequences(pages.value),
            ..pages
        };
        let problem = Self::of(query, shapes, options)?;
        Ok(Self {
            page_len: Some(page_len),
            ..problem
        })
    }

    fn of(
        query: &Tensor<4>,
        key_value: KeyValueShapes,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let KeyValueShapes {
            key,
            value,
            devices: [key_device, value_device],
            quantized,
        } = key_value;
        let [batch, q_heads, q_len, head_dim] = query.dims();
        let [_, kv_heads, kv_len, _] = key;
        let value_dim = value[3];

        check_head_dim("query", "head_dim", &query.dims(), head_dim)?;
        check_dims(
            "key",
            &key,
            &["batch", "kv_heads", "kv_len", "head_dim"],
            [
                Some((batch, "the query's batch")),
                None,
                None,
                Some((head_dim, "the query's head_dim")),
            ],
        )?;
        check_dims(
            "value",
            &value,
            &["batch", "kv_heads", "kv_len", "value_dim"],
            [
                Some((batch, "the query's batch")),
                Some((kv_heads, "the key's kv_heads")),
                Some((kv_len, "the key's kv_len")),
                None,
            ],
        )?;
        check_head_dim("value", "value_dim", &value, value_dim)?;
        if q_heads > 0 && (kv_heads == 0 || !q_heads.is_multiple_of(kv_heads)) {
            return Err(AttentionError::Shape {
                argument: "key",
                has: key.to_vec(),
                dimension: "kv_heads",
                found: kv_heads,
                expected: format!("a divisor of the query's {q_heads} heads"),
            });
        }

        let dtype = query.dtype();
        if !matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
            return Err(AttentionError::Dtype {
                argument: "query",
                has: dtype,
                expected: "F32, F16, BF16 or F64".into(),
            });
        }
        let device = query.device();
        check_place("key", key_device.clone(), &device)?;
        check_place("value", value_device.clone(), &device)?;

        let scores = [batch, q_heads, q_len, kv_len];
        let float = [(dtype, "the query's"), (DType::F32, "or full precision")];
        check_masks(options, scores, &device)?;
        if let Some(bias) = &options.bias {
            check_broadcast("bias", &bias.dims(), scores, SCORES)?;
            check_dtype("bias", bias.dtype(), &float)?;
            check_device("bias", bias, &device)?;
        }
        for (argument, lengths) in [
            ("kv_lengths", &options.kv_lengths),
            ("query_lengths", &options.query_lengths),
        ] {
            if let Some(lengths) = lengths {
                let batch = Some((batch, "the query's batch"));
                check_dims(argument, &lengths.dims(), &["batch"], [batch])?;
                check_device(argument, lengths, &device)?;
            }
        }
        if let Some((query_ids, key_ids)) = &options.segments {
            for (argument, ids, length) in [
                ("query segments", query_ids, (q_len, "the query's q_len")),
                ("key segments", key_ids, (kv_len, "the key's kv_len")),
            ] {
                let batch = Some((batch, "the query's batch"));
                check_dims(
                    argument,
                    &ids.dims(),
                    &["batch", "length"],
                    [batch, Some(length)],
                )?;
                check_device(argument, ids, &device)?;
            }
        }
        check_intervals(options, [batch, q_len], &device)?;
        if let Some(sinks) = &options.sinks {
            let heads = Some((q_heads, "the query's heads"));
            check_dims("sinks", &sinks.dims(), &["q_heads"], [heads])?;
            check_dtype("sinks", sinks.dtype(), &float)?;
            check_device("sinks", sinks, &device)?;
        }

        for (argument, table) in [
            ("the table of the score mod", &options.score_table),
            ("the table of the mask mod", &options.mask_table),
        ] {
            if let Some(table) = table {
                check_dtype(argument, table.dtype(), &float)?;
                check_device(argument, table, &device)?;
            }
        }

        check_checkpointing(&device, [key_device, value_device], options)?;

        let scale = options.scale.unwrap_or(1.0 / (head_dim as f64).sqrt());
        if !(scale as f32).is_finite() {
            return Err(AttentionError::Value {
                argument: "scale",
                has: scale,
                expected: "a finite f32",
            });
        }
        if let Some(softcap) = options.softcap
            && !((softcap as f32).is_normal() && softcap > 0.0)
        {
            return Err(AttentionError::Value {
                argument: "softcap",
                has: softcap,
                expected: "a finite f32 above zero",
            });
        }

        if let Some(Dropout { probability, .. }) = options.dropout
            && !(0.0..=0.99).contains(&probability)
        {
            return Err(AttentionError::Value {
                argument: "dropout",
                has: probability,
                expected: "a probability from 0 to 0.99",
            });
        }

        Ok(Self {
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            dtype,
            scale,
            softcap: options.softcap,
            causal: options.causal,
            window_left: options.window_left,
            window_right: options.window_right,
            mask: options.any_mask().map(|(mask, _)| mask.dims()),
            mask_block: options.any_mask().map_or([1, 1], |(_, block)| block),
            bias: options
                .bias
                .as_ref()
                .map(|bias| (bias.dims(), bias.dtype())),
            kv_lengths: options.kv_lengths.is_some(),
            kv_lengths_ahead: options.kv_lengths_ahead,
            query_lengths: options.query_lengths.is_some(),
            segments: options.segments.is_some(),
            intervals: options.intervals.len(),
            sinks: options.sinks.as_ref().map(Tensor::dtype),
            dropout: options.dropout,
            score_mod: options.score_mod,
            mask_mod: options.mask_mod,
            page_len: None,
            quantized,
        })
    }
}

fn check_head_dim(
    argument: &'static str,
    dimension: &'static str,
    has: &[usize],
    found: usize,
) -> Result<(), AttentionError> {
    if (1..=MAX_HEAD_DIM).contains(&found) {
        return Ok(());
    }
    Err(AttentionError::Shape {
        argument,
        has: has.to_vec(),
        dimension,
        found,
        expected: format!("from 1 to {MAX_HEAD_DIM}"),
    })
}

pub(crate) fn check_dims<const D: usize>(
    argument: &'static str,
    has: &[usize; D],
    names: &[&'static str; D],
    expected: [Option<(usize, &'static str)>; D],
) -> Result<(), AttentionError> {
    for ((&found, &dimension), expected) in has.iter().zip(names).zip(expected) {
        if let Some((size, whose)) = expected
            && found != size
        {
            return Err(AttentionError::Shape {
                argument,
                has: has.to_vec(),
                dimension,
                found,
                expected: format!("{size}, {whose}"),
            });
        }
    }
    Ok(())
}

/// The names of the dimensions of the scores.
const SCORES: [&str; 4] = ["batch", "q_heads", "q_len", "kv_len"];

fn check_broadcast(
    argument: &'static str,
    has: &[usize; 4],
    sizes: [usize; 4],
    names: [&'static str; 4],
) -> Result<(), AttentionError> {
    for ((&found, dimension), size) in has.iter().zip(names).zip(sizes) {
        if found != size && found != 1 {
            return Err(AttentionError::Shape {
                argument,
                has: has.to_vec(),
                dimension,
                found,
                expected: format!("{size} or 1, to broadcast to {sizes:?}"),
            });
        }
    }
    Ok(())
}

/// Checks the mask or the block mask. A call may not have both.
fn check_masks(
    options: &AttentionOptions,
    scores: [usize; 4],
    device: &Device,
) -> Result<(), AttentionError> {
    if let Some(mask) = &options.mask {
        check_broadcast("mask", &mask.dims(), scores, SCORES)?;
        check_device("mask", mask, device)?;
    }
    let Some(BlockMask { visible, block }) = &options.block_mask else {
        return Ok(());
    };
    if options.mask.is_some() {
        return Err(AttentionError::Combination {
            argument: "block_mask",
            with: "mask",
        });
    }
    for size in block {
        if !(1..=MAX_MASK_BLOCK).contains(size) {
            return Err(AttentionError::Value {
                argument: "block_mask",
                has: *size as f64,
                expected: "blocks of 1 to 2^20 queries and keys",
            });
        }
    }
    let [batch, q_heads, q_len, kv_len] = scores;
    let blocks = [
        batch,
        q_heads,
        q_len.div_ceil(block[0]),
        kv_len.div_ceil(block[1]),
    ];
    let names = ["batch", "q_heads", "query blocks", "key blocks"];
    check_broadcast("block_mask", &visible.dims(), blocks, names)?;
    check_device("block_mask", visible, device)
}

/// The largest number of queries or keys per element of a block mask. The product of a block index and this number fits
/// in i32.
const MAX_MASK_BLOCK: usize = 1 << 20;

/// The largest number of intervals per query.
const MAX_INTERVALS: usize = 2;

fn check_intervals(
    options: &AttentionOptions,
    [batch, q_len]: [usize; 2],
    device: &Device,
) -> Result<(), AttentionError> {
    if options.intervals.len() > MAX_INTERVALS {
        return Err(AttentionError::Value {
            argument: "visible_between",
            has: options.intervals.len() as f64,
            expected: "at most 2 intervals per query",
        });
    }
    let dtype = options.intervals.first().map(|(start, _)| start.dtype());
    for (start, end) in &options.intervals {
        for (argument, keys) in [("interval start", start), ("interval end", end)] {
            check_dims(
                argument,
                &keys.dims(),
                &["batch", "q_len"],
                [
                    Some((batch, "the query's batch")),
                    Some((q_len, "the query's q_len")),
                ],
            )?;
            check_device(argument, keys, device)?;
            if let Some(dtype) = dtype {
                check_dtype(argument, keys.dtype(), &[(dtype, "the first start's")])?;
            }
        }
    }
    Ok(())
}

pub(crate) fn check_dtype(
    argument: &'static str,
    has: DType,
    allowed: &[(DType, &str)],
) -> Result<(), AttentionError> {
    if allowed.iter().any(|(dtype, _)| *dtype == has) {
        return Ok(());
    }
    let expected: Vec<_> = allowed
        .iter()
        .map(|(dtype, whose)| format!("{dtype:?} ({whose})"))
        .collect();
    Err(AttentionError::Dtype {
        argument,
        has,
        expected: expected.join(", "),
    })
}

fn check_device<const D: usize, K: Basic>(
    argument: &'static str,
    tensor: &Tensor<D, K>,
    expected: &Device,
) -> Result<(), AttentionError> {
    check_place(argument, tensor.device(), expected)
}

pub(crate) fn check_place(
    argument: &'static str,
    has: Device,
    expected: &Device,
) -> Result<(), AttentionError> {
    check_place_of(argument, has, "query", expected)
}

/// Checks that the tensor `argument` is on the device `expected`. `expected` is the device of another tensor, and
/// `whose` is the name of this other tensor.
pub(crate) fn check_place_of(
    argument: &'static str,
    has: Device,
    whose: &'static str,
    expected: &Device,
) -> Result<(), AttentionError> {
    // Compare the devices without their autodiff flags, because a call may combine a tensor that autodiff tracks with a
    // tensor that autodiff does not track.
    let has = has.without_autodiff();
    let expected = expected.clone().without_autodiff();
    if has == expected {
        return Ok(());
    }
    Err(AttentionError::Device {
        argument,
        has: format!("{has:?}"),
        whose,
        expected: format!("{expected:?}"),
    })
}

/// Checks that all tensors use the same gradient checkpointing strategy, because Burn merges the autodiff graphs of a
/// call's tensors.
fn check_checkpointing(
    query: &Device,
    [key, value]: [Device; 2],
    options: &AttentionOptions,
) -> Result<(), AttentionError> {
    let segments = options.segments.as_ref();
    let intervals = options.intervals.iter().flat_map(|(start, end)| {
        [("interval start", start), ("interval end", end)]
            .map(|(argument, keys)| (argument, Some(keys.device())))
    });
    let devices = [
        ("query", Some(query.clone())),
        ("key", Some(key)),
        ("value", Some(value)),
        ("mask", options.any_mask().map(|(mask, _)| mask.device())),
        ("bias", options.bias.as_ref().map(Tensor::device)),
        (
            "kv_lengths",
            options.kv_lengths.as_ref().map(Tensor::device),
        ),
        (
            "query_lengths",
            options.query_lengths.as_ref().map(Tensor::device),
        ),
        ("query segments", segments.map(|(ids, _)| ids.device())),
        ("key segments", segments.map(|(_, ids)| ids.device())),
        ("sinks", options.sinks.as_ref().map(Tensor::device)),
        (
            "the table of the score mod",
            options.score_table.as_ref().map(Tensor::device),
        ),
        (
            "the table of the mask mod",
            options.mask_table.as_ref().map(Tensor::device),
        ),
    ];
    check_strategies(devices.into_iter().chain(intervals))
}

/// Checks that all devices under autodiff have the same gradient checkpointing strategy.
pub(crate) fn check_strategies(
    devices: impl IntoIterator<Item = (&'static str, Option<Device>)>,
) -> Result<(), AttentionError> {
    let mut strategies = devices.into_iter().filter_map(|(argument, device)| {
        let strategy = device?.gradient_checkpointing_strategy()?;
        Some((argument, strategy))
    });
    let Some((whose, expected)) = strategies.next() else {
        return Ok(());
    };
    match strategies.find(|(_, strategy)| *strategy != expected) {
        None => Ok(()),
        Some((argument, has)) => Err(AttentionError::Checkpointing {
            argument,
            has: format!("{has:?}"),
            whose,
            expected: format!("{expected:?}"),
        }),
    }
}
