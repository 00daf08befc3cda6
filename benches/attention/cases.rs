//! The benchmark's cases: full, causal and windowed attention at head sizes 64 to 512, and decoding.

use attention_cube::quantized::CodeFormat;
use attention_workspace::{Dtype, workload::Workload};

/// The scale at which all cases run: full sizes for a GPU, or small sizes for a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// Sizes for GPUs with 80 GB and more.
    Full,
    /// Sizes for CPUs: one sequence, one or two key heads, up to 512 tokens.
    Small,
}

pub struct Case {
    pub name: &'static str,
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    causal: bool,
    window: Option<usize>,
    softcap: Option<f64>,
    mask: bool,
    bias: bool,
    codes: Option<CodeFormat>,
    kv_length: Option<usize>,
}

/// Creates a case in which the number of keys equals the number of queries.
const fn case(
    name: &'static str,
    [batch, q_heads, kv_heads, length, head_dim]: [usize; 5],
    causal: bool,
    window: Option<usize>,
) -> Case {
    Case {
        name,
        batch,
        q_heads,
        kv_heads,
        q_len: length,
        kv_len: length,
        head_dim,
        causal,
        window,
        softcap: None,
        mask: false,
        bias: false,
        codes: None,
        kv_length: None,
    }
}

/// Creates a case of full attention in which the number of keys may differ from the number of queries.
const fn uneven(name: &'static str, [batch, heads, q_len, kv_len, head_dim]: [usize; 5]) -> Case {
    Case {
        q_len,
        ..case(name, [batch, heads, heads, kv_len, head_dim], false, None)
    }
}

const fn softcapped(name: &'static str, like: Case) -> Case {
    Case {
        name,
        softcap: Some(50.0),
        ..like
    }
}

const fn masked(name: &'static str, like: Case) -> Case {
    Case {
        name,
        mask: true,
        ..like
    }
}

const fn biased(name: &'static str, like: Case) -> Case {
    Case {
        name,
        bias: true,
        ..like
    }
}

/// Creates a decode case, in which each sequence has one query and a KV cache.
const fn decode(
    name: &'static str,
    [batch, q_heads, kv_heads, kv_len, head_dim]: [usize; 5],
) -> Case {
    Case {
        q_len: 1,
        ..case(
            name,
            [batch, q_heads, kv_heads, kv_len, head_dim],
            true,
            None,
        )
    }
}

/// Creates a copy of the case `like`. The keys and values of the copy are quantized in `format`.
const fn quantized(name: &'static str, format: CodeFormat, like: Case) -> Case {
    Case {
        name,
        codes: Some(format),
        ..like
    }
}

/// Creates a case with `q_len` queries per sequence over 32,768 keys, in which 8 query heads share a key head.
const fn rows_d128(name: &'static str, q_len: usize) -> Case {
    Case {
        q_len,
        ..decode(name, [8, 32, 4, 32768, 128])
    }
}

const D128_FULL: Case = case("d128-full", [4, 32, 32, 4096, 128], false, None);
const D256_FULL: Case = case("d256-full", [4, 16, 16, 4096, 256], false, None);
const D512_FULL: Case = case("d512-full", [4, 8, 8, 4096, 512], false, None);

pub const CASES: [Case; 57] = [
    case("d64-causal", [4, 64, 64, 4096, 64], true, None),
    case("d64-full", [4, 64, 64, 4096, 64], false, None),
    case("d128-causal", [4, 32, 32, 4096, 128], true, None),
    D128_FULL,
    case("d256-causal", [4, 16, 16, 4096, 256], true, None),
    D256_FULL,
    case("d320-causal-8k", [1, 16, 16, 8192, 320], true, None),
    case("d512-causal", [4, 8, 8, 4096, 512], true, None),
    D512_FULL,
    case("d512-causal-8k", [1, 32, 32, 8192, 512], true, None),
    case("d512-full-8k", [1, 32, 32, 8192, 512], false, None),
    case("d512-gqa8-16k", [1, 8, 1, 16384, 512], true, None),
    case("d256-window512-16k", [1, 8, 1, 16384, 256], true, Some(512)),
    case(
        "d256-window1024-8k",
        [1, 32, 16, 8192, 256],
        true,
        Some(1024),
    ),
    decode("decode-d64-32k", [8, 64, 8, 32768, 64]),
    decode("decode-d128-32k", [8, 32, 8, 32768, 128]),
    decode("decode-d512-32k", [8, 32, 4, 32768, 512]),
    decode("decode-d256-32k", [8, 32, 16, 32768, 256]),
    decode("decode-d512-gqa8-32k", [1, 8, 1, 32768, 512]),
    quantized(
        "decode-d512-32k-int8",
        CodeFormat::Int8,
        decode("decode-d512-32k", [8, 32, 4, 32768, 512]),
    ),
    quantized(
        "decode-d256-32k-int8",
        CodeFormat::Int8,
        decode("decode-d256-32k", [8, 32, 16, 32768, 256]),
    ),
    quantized(
        "decode-d512-32k-e4m3",
        CodeFormat::E4m3,
        decode("decode-d512-32k", [8, 32, 4, 32768, 512]),
    ),
    quantized(
        "decode-d256-32k-e4m3",
        CodeFormat::E4m3,
        decode("decode-d256-32k", [8, 32, 16, 32768, 256]),
    ),
    // A row is one query of one query head of a GQA group. The kernels read int8 directly for up to 32 rows per key
    // head. For 40 rows (5 queries times 8 heads), as in `rows-d128-40-int8`, the operator first dequantizes keys and
    // values.
    rows_d128("rows-d128-40", 5),
    quantized(
        "rows-d128-32-int8",
        CodeFormat::Int8,
        rows_d128("rows-d128-32", 4),
    ),
    quantized(
        "rows-d128-40-int8",
        CodeFormat::Int8,
        rows_d128("rows-d128-40", 5),
    ),
    Case {
        kv_length: Some(8192),
        ..rows_d128("rows-d128-40-8k", 5)
    },
    Case {
        kv_length: Some(8192),
        ..quantized(
            "rows-d128-40-8k-int8",
            CodeFormat::Int8,
            rows_d128("rows-d128-40", 5),
        )
    },
    Case {
        window: Some(1024),
        ..quantized(
            "rows-d128-40-window-int8",
            CodeFormat::Int8,
            rows_d128("rows-d128-40", 5),
        )
    },
    quantized(
        "rows-d512-32-int8",
        CodeFormat::Int8,
        Case {
            q_len: 4,
            ..decode("rows-d512-32", [8, 32, 4, 32768, 512])
        },
    ),
    // These cases have the shapes of speculative decoding: one forward of the model verifies several draft tokens.
    Case {
        q_len: 8,
        ..decode("decode-d512-gqa8-32k-queries8", [1, 8, 1, 32768, 512])
    },
    Case {
        q_len: 4,
        ..decode("decode-d256-32k-queries4", [8, 32, 4, 32768, 256])
    },
    Case {
        q_len: 4,
        ..decode("decode-d512-32k-queries4", [8, 32, 4, 32768, 512])
    },
    // Each of these cases equals a plain case except for one option, such as the softcap. The time of the case shows
    // what the option costs.
    softcapped("option-d128-softcap", D128_FULL),
    masked("option-d128-mask", D128_FULL),
    biased("option-d128-bias", D128_FULL),
    softcapped("option-d256-softcap", D256_FULL),
    masked("option-d256-mask", D256_FULL),
    biased("option-d256-bias", D256_FULL),
    softcapped("option-d512-softcap", D512_FULL),
    masked("option-d512-mask", D512_FULL),
    biased("option-d512-bias", D512_FULL),
    // These cases measure the cost of partial tiles, whose last rows or columns are unused.
    uneven("tail-d128-even", [4, 32, 1024, 4096, 128]),
    uneven("tail-d128-odd", [4, 32, 1023, 4097, 128]),
    uneven("tail-d256-even", [4, 16, 1024, 4096, 256]),
    uneven("tail-d256-odd", [4, 16, 1023, 4097, 256]),
    uneven("tail-d512-even", [4, 8, 1024, 4096, 512]),
    uneven("tail-d512-odd", [4, 8, 1023, 4097, 512]),
    // These cases vary the sequence length. The batch size keeps the number of tokens large enough to fill the GPU.
    case("length-512", [64, 8, 1, 512, 512], true, None),
    case("length-1024", [32, 8, 1, 1024, 512], true, None),
    case("length-2048", [16, 8, 1, 2048, 512], true, None),
    case("length-4096", [8, 8, 1, 4096, 512], true, None),
    case("length-8192", [4, 8, 1, 8192, 512], true, None),
    case("length-16384", [2, 8, 1, 16384, 512], true, None),
    case("length-32768", [1, 8, 1, 32768, 512], true, None),
    case("length-65536", [1, 8, 1, 65536, 512], true, None),
    case("length-131072", [1, 8, 1, 131_072, 512], true, None),
];

impl Case {
    /// Returns the sizes and options of the case at the given scale.
    pub fn workload(&self, scale: Scale, dtype: Dtype) -> Workload {
        let full = Workload {
            batch: self.batch,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            q_len: self.q_len,
            kv_len: self.kv_len,
            head_dim: self.head_dim,
            dtype,
            causal: self.causal,
            window: self.window,
            scale: None,
            softcap: self.softcap,
            mask: self.mask,
            bias: self.bias,
            codes: self.codes,
            kv_length: self.kv_length,
        };
        match scale {
            Scale::Full => full,
            Scale::Small => {
                let group = (self.q_heads / self.kv_heads).min(4);
                let kv_heads = if group == 1 { 2 } else { 1 };
                let shorter = |length: usize| (length / 16).clamp(256, 512).min(length);
                Workload {
                    batch: 1,
                    q_heads: kv_heads * group,
                    kv_heads,
                    q_len: shorter(self.q_len),
                    kv_len: shorter(self.kv_len),
                    window: self.window.map(|window| window / 16),
                    kv_length: self.kv_length.map(|length| length / 32),
                    ..full
                }
            }
        }
    }
}
