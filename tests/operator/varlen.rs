//! Tests of packed sequences (varlen): the keys that each query sees, results and gradients, and errors.

use attention_cube::varlen::Sequences;
use attention_cube::{AttentionOptions, CausalAlignment};
use burn::tensor::{DType, Device, Int, Tensor};

mod errors;
mod separate_calls;
pub mod visible;

/// The numbers of packed queries and keys, and the bounds of the sequences in the packed rows.
struct Packed {
    q_len: usize,
    kv_len: usize,
    cu_seqlens_q: Vec<usize>,
    cu_seqlens_k: Vec<usize>,
}

impl Packed {
    /// Returns sequences with the given numbers of queries and keys. Three rows precede the first sequence, and five rows
    /// follow the last one.
    fn new(lengths: &[(usize, usize)]) -> Self {
        let cumulative = |length: fn(&(usize, usize)) -> usize| {
            let mut bounds = vec![3];
            for lengths in lengths {
                bounds.push(bounds[bounds.len() - 1] + length(lengths));
            }
            bounds
        };
        let (cu_seqlens_q, cu_seqlens_k) = (cumulative(|(q, _)| *q), cumulative(|(_, k)| *k));
        Self {
            q_len: cu_seqlens_q[lengths.len()] + 5,
            kv_len: cu_seqlens_k[lengths.len()] + 5,
            cu_seqlens_q,
            cu_seqlens_k,
        }
    }

    /// Returns the first query, the end of the queries, the first key and the end of the keys of each sequence.
    fn sequences(&self) -> impl Iterator<Item = [usize; 4]> {
        let queries = self.cu_seqlens_q.windows(2);
        let keys = self.cu_seqlens_k.windows(2);
        queries.zip(keys).map(|(q, k)| [q[0], q[1], k[0], k[1]])
    }

    fn on(&self, device: &Device) -> Sequences {
        let upload = |bounds: &[usize]| {
            let bounds: Vec<i32> = bounds.iter().map(|bound| *bound as i32).collect();
            Tensor::<1, Int>::from_data(bounds.as_slice(), (device, DType::I32))
        };
        Sequences {
            cu_seqlens_q: upload(&self.cu_seqlens_q),
            cu_seqlens_k: upload(&self.cu_seqlens_k),
        }
    }
}

/// The options of a test call, which covers all packed rows or the rows of one sequence.
#[derive(Clone, Debug, Default)]
struct Options {
    causal: Option<CausalAlignment>,
    window: Option<(Option<usize>, Option<usize>)>,
    /// True if the call has a softcap, a bias, a mask and sinks.
    others: bool,
}

impl Options {
    /// Returns the causal mask and the window as options of a call.
    fn positions(&self) -> AttentionOptions {
        let mut given = AttentionOptions::new();
        if let Some(alignment) = self.causal {
            given = given.causal_aligned(alignment);
        }
        if let Some((left, right)) = self.window {
            given = given.window(left, right);
        }
        given
    }
}
