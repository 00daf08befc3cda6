//! Problems and device profiles for unit tests.

#[cfg(feature = "cube")]
mod devices;

#[cfg(feature = "cube")]
pub(crate) use self::devices::{cube_device, device};

use crate::problem::AttentionProblem;
use crate::types::device::{DeviceProfile, FragmentSupport};
use burn::tensor::DType;

/// Returns a bf16 problem without options. Queries, keys and values all have `head_dim` columns.
pub(crate) fn problem(
    [batch, q_heads, kv_heads, q_len, kv_len, head_dim]: [usize; 6],
) -> AttentionProblem {
    AttentionProblem {
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim: head_dim,
        dtype: DType::BF16,
        scale: 1.0,
        softcap: None,
        causal: None,
        window_left: None,
        window_right: None,
        mask: None,
        mask_block: [1, 1],
        bias: None,
        kv_lengths: false,
        kv_lengths_ahead: false,
        query_lengths: false,
        segments: false,
        intervals: 0,
        sinks: None,
        dropout: None,
        score_mod: None,
        mask_mod: None,
        page_len: None,
        quantized: None,
    }
}

/// The shared memory per cube in bytes, of an H100, of an A100 and of a GeForce GPU.
pub(crate) const SHARED_MEMORY: [usize; 3] = [227 << 10, 163 << 10, 99 << 10];

/// Returns a device profile with `shared_memory` bytes of shared memory per cube.
pub(crate) fn card(shared_memory: usize) -> DeviceProfile {
    DeviceProfile {
        name: "test".into(),
        dtypes: Vec::new(),
        shared_memory,
        units_per_cube: 1024,
        bindings: 1024,
        largest_buffer: 1 << 36,
        cube_count: u32::MAX >> 1,
        processors: None,
        multiprocessors: None,
        features: Vec::new(),
        fragments: FragmentSupport::default(),
        disabled_engines: Vec::new(),
        not_built: Vec::new(),
    }
}
