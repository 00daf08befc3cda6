//! The problem: shapes, dtype and options of one attention, validated once.

use crate::quantized::QuantizedRows;
use crate::{AttentionError, AttentionOptions, CausalAlignment};
use burn::tensor::{DType, Device, Tensor, kind::Basic};

/// The largest `head_dim` and `value_dim` served.
pub const MAX_HEAD_DIM: usize = 1024;

/// One attention: `out[b, h, i] = Σⱼ softmaxⱼ(score(q[b, h, i]·k[b, h/group, j])) v[b, h/group, j]`,
/// by its sizes and options, without its data. What [`select`](crate::select) chooses a kernel for.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionProblem {
    /// Sequences.
    pub batch: usize,
    /// Query heads: a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Key and value heads. Query head `h` reads head `h / (q_heads / kv_heads)`.
    pub kv_heads: usize,
    /// Queries a sequence.
    pub q_len: usize,
    /// Keys a sequence.
    pub kv_len: usize,
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values and of the output.
    pub value_dim: usize,
    /// Of the query, the keys, the values and the output.
    pub dtype: DType,
    /// Factor on `q·k`.
    pub scale: f64,
    /// See [`AttentionOptions::softcap`].
    pub softcap: Option<f64>,
    /// See [`AttentionOptions::causal`].
    pub causal: Option<CausalAlignment>,
    /// See [`AttentionOptions::window`].
    pub window_left: Option<usize>,
    /// See [`AttentionOptions::window`].
    pub window_right: Option<usize>,
    /// The mask's shape, where there is one.
    pub mask: Option<[usize; 4]>,
    /// The bias's shape and dtype, where there is one.
    pub bias: Option<([usize; 4], DType)>,
    /// Whether sequences have their own lengths.
    pub kv_lengths: bool,
    /// See [`AttentionOptions::kv_lengths_ahead`].
    pub kv_lengths_ahead: bool,
    /// Whether documents are packed.
    pub segments: bool,
    /// The dtype of the sinks, where there are some.
    pub sinks: Option<DType>,
    /// See [`AttentionOptions::deterministic`].
    pub deterministic: bool,
    /// Whether keys and values are [quantized](crate::quantized). The reference in a selection's place then stands for a dequantized copy of
    /// them, read by the kernel that the same problem has without.
    pub quantized: bool,
}

/// What is known of keys and values before their elements are looked at.
struct KeyValueShapes {
    key: [usize; 4],
    value: [usize; 4],
    devices: [Device; 2],
    quantized: bool,
}

impl AttentionProblem {
    /// The problem that these arguments pose.
    ///
    /// # Errors
    /// [`AttentionError`] where a shape, a dtype, a device or a number does not fit.
    pub fn new(
        query: &Tensor<4>,
        key: &Tensor<4>,
        value: &Tensor<4>,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let shapes = KeyValueShapes {
            key: key.dims(),
            value: value.dims(),
            devices: [key.device(), value.device()],
            quantized: false,
        };
        let problem = Self::of(query, shapes, options)?;
        check_dtype("key", key.dtype(), &[(problem.dtype, "the query's")])?;
        check_dtype("value", value.dtype(), &[(problem.dtype, "the query's")])?;
        Ok(problem)
    }

    /// The problem that these arguments pose over quantized keys and values.
    ///
    /// # Errors
    /// [`AttentionError`] where a shape, a dtype, a device or a number does not fit.
    pub fn quantized(
        query: &Tensor<4>,
        key: &QuantizedRows,
        value: &QuantizedRows,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let shapes = KeyValueShapes {
            key: key.dims(),
            value: value.dims(),
            devices: [key.device(), value.device()],
            quantized: true,
        };
        Self::of(query, shapes, options)
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
        if let Some(mask) = &options.mask {
            check_broadcast("mask", &mask.dims(), scores)?;
            check_device("mask", mask, &device)?;
        }
        if let Some(bias) = &options.bias {
            check_broadcast("bias", &bias.dims(), scores)?;
            check_dtype("bias", bias.dtype(), &float)?;
            check_device("bias", bias, &device)?;
        }
        if let Some(lengths) = &options.kv_lengths {
            let batch = Some((batch, "the query's batch"));
            check_dims("kv_lengths", &lengths.dims(), &["batch"], [batch])?;
            check_device("kv_lengths", lengths, &device)?;
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
        if let Some(sinks) = &options.sinks {
            let heads = Some((q_heads, "the query's heads"));
            check_dims("sinks", &sinks.dims(), &["q_heads"], [heads])?;
            check_dtype("sinks", sinks.dtype(), &float)?;
            check_device("sinks", sinks, &device)?;
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
            mask: options.mask.as_ref().map(Tensor::dims),
            bias: options
                .bias
                .as_ref()
                .map(|bias| (bias.dims(), bias.dtype())),
            kv_lengths: options.kv_lengths.is_some(),
            kv_lengths_ahead: options.kv_lengths_ahead,
            segments: options.segments.is_some(),
            sinks: options.sinks.as_ref().map(Tensor::dtype),
            deterministic: options.deterministic,
            quantized,
        })
    }

    /// Query heads that read one key and value head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads.max(1)
    }

    /// Whether nothing is asked for, or no key exists that a query could see.
    pub fn is_empty(&self) -> bool {
        [self.batch, self.q_heads, self.q_len, self.kv_len].contains(&0)
    }

    /// The shape of the output.
    pub fn output_shape(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.value_dim]
    }

    /// The shape of the logsumexp.
    pub fn logsumexp_shape(&self) -> [usize; 3] {
        [self.batch, self.q_heads, self.q_len]
    }

    /// The shape in which the operator of a backend gives the logsumexps: of all sequences the references, which are scores, and
    /// then the logarithms of the sums by these.
    pub fn logsumexp_parts_shape(&self) -> [usize; 3] {
        [2 * self.batch, self.q_heads, self.q_len]
    }

    /// The furthest key to the right of its own position that a query sees, if there is a limit: the
    /// causal mask is a window that ends at 0.
    pub fn right(&self) -> Option<usize> {
        match self.causal {
            Some(_) => Some(0),
            None => self.window_right,
        }
    }

    /// Whether positions are aligned at the bottom right.
    pub fn is_bottom_right(&self) -> bool {
        self.causal.unwrap_or_default() == CausalAlignment::BottomRight
    }

    /// Keys that `queries` neighbouring ones see at most by causal mask and window.
    pub(crate) fn visible_keys(&self, queries: usize) -> usize {
        match (self.window_left, self.right()) {
            (Some(left), Some(right)) => left
                .saturating_add(right)
                .saturating_add(queries)
                .min(self.kv_len),
            _ => self.kv_len,
        }
    }

    /// Pairs of a query and a key that causal mask and window leave visible, over the batch and the
    /// query heads; what benchmarks count operations by.
    pub fn visible_pairs(&self) -> u64 {
        let (q_len, kv_len) = (self.q_len as i64, self.kv_len as i64);
        let offset = if self.is_bottom_right() {
            kv_len - q_len
        } else {
            0
        };
        // A side that is open, or wider than the sequences, ends beyond all of them.
        let side = |side: Option<usize>| {
            let beyond = self.q_len + self.kv_len;
            side.map_or(beyond, |side| side.min(beyond)) as i64
        };
        let (left, right) = (side(self.window_left), side(self.right()));
        let per_head: i64 = (0..q_len)
            .map(|i| {
                let position = i + offset;
                let first = (position - left).max(0);
                let end = (position + right + 1).min(kv_len);
                (end - first).max(0)
            })
            .sum();
        per_head as u64 * (self.batch * self.q_heads) as u64
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

fn check_dims<const D: usize>(
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

fn check_broadcast(
    argument: &'static str,
    has: &[usize; 4],
    scores: [usize; 4],
) -> Result<(), AttentionError> {
    let names = ["batch", "q_heads", "q_len", "kv_len"];
    for ((&found, dimension), size) in has.iter().zip(names).zip(scores) {
        if found != size && found != 1 {
            return Err(AttentionError::Shape {
                argument,
                has: has.to_vec(),
                dimension,
                found,
                expected: format!("{size} or 1, to broadcast to {scores:?}"),
            });
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
    // A constant on the plain device may meet a tracked query: autodiff is not part of the place.
    let has = has.without_autodiff();
    let expected = expected.clone().without_autodiff();
    if has == expected {
        return Ok(());
    }
    Err(AttentionError::Device {
        argument,
        has: format!("{has:?}"),
        whose: "query",
        expected: format!("{expected:?}"),
    })
}

/// Burn merges the graphs of all tensors of a call, the integer ones under autodiff, too.
fn check_checkpointing(
    query: &Device,
    [key, value]: [Device; 2],
    options: &AttentionOptions,
) -> Result<(), AttentionError> {
    let segments = options.segments.as_ref();
    let devices = [
        ("query", Some(query.clone())),
        ("key", Some(key)),
        ("value", Some(value)),
        ("mask", options.mask.as_ref().map(Tensor::device)),
        ("bias", options.bias.as_ref().map(Tensor::device)),
        (
            "kv_lengths",
            options.kv_lengths.as_ref().map(Tensor::device),
        ),
        ("query segments", segments.map(|(ids, _)| ids.device())),
        ("key segments", segments.map(|(_, ids)| ids.device())),
        ("sinks", options.sinks.as_ref().map(Tensor::device)),
    ];
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
