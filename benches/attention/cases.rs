//! What is measured: head sizes 64 to 512, full, causal and windowed, and decoding.

use attention_workspace::{Dtype, workload::Workload};

/// How large the cases are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// For GPUs with 80 GB and more.
    Full,
    /// One sequence, one or two key heads, up to 512 tokens: for processors.
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
}

/// A case with as many keys as queries.
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
    }
}

/// One query a sequence against a cache.
const fn decode(
    name: &'static str,
    [batch, q_heads, kv_heads, kv_len, head_dim]: [usize; 5],
) -> Case {
    Case {
        name,
        batch,
        q_heads,
        kv_heads,
        q_len: 1,
        kv_len,
        head_dim,
        causal: true,
        window: None,
    }
}

pub const CASES: [Case; 13] = [
    case("d64-causal", [4, 64, 64, 4096, 64], true, None),
    case("d128-causal", [4, 32, 32, 4096, 128], true, None),
    case("d256-causal", [4, 16, 16, 4096, 256], true, None),
    case("d256-full", [4, 16, 16, 4096, 256], false, None),
    case("d320-causal", [4, 12, 12, 4096, 320], true, None),
    case("d512-causal", [4, 8, 8, 4096, 512], true, None),
    case("d512-full", [4, 8, 8, 4096, 512], false, None),
    case("d512-full-8k", [1, 32, 32, 8192, 512], false, None),
    case("d512-gqa8-16k", [1, 8, 1, 16384, 512], true, None),
    case("d256-window512-16k", [1, 8, 1, 16384, 256], true, Some(512)),
    case(
        "d256-window1024-8k",
        [1, 32, 16, 8192, 256],
        true,
        Some(1024),
    ),
    decode("decode-d512-32k", [8, 32, 4, 32768, 512]),
    decode("decode-d256-32k", [8, 32, 16, 32768, 256]),
];

impl Case {
    /// The case at a scale.
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
                    ..full
                }
            }
        }
    }
}
