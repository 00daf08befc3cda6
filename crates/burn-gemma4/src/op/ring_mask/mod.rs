//! Computes the attention mask over a ring buffer of keys in one launch, for inference on CubeCL devices. Each slot of
//! the ring buffer holds one token's key. The slots need not be in the order of the tokens.

mod kernel;
#[cfg(test)]
mod tests;

use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        cubecl::dtype_to_storage_type,
        fusion::custom::TensorSpec,
        tensor::{BoolTensor, IntTensor},
    },
    tensor::{Bool, Int, Shape, Tensor},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous};
use cube_kit::launch::cube_count;
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;
use kernel::{UNITS, ring_mask_pdl};

/// The shape of the mask over a sliding layer's ring buffer, and the rules that decide which keys a query sees.
#[derive(Clone, Copy, Debug)]
pub struct RingMask {
    pub sequences: usize,
    /// The number of queries per sequence.
    pub queries: usize,
    pub slots: usize,
    /// The number of keys that a query sees, including the key at its own position.
    pub window: usize,
    /// True if the last query's own key is already written. Otherwise the newest key belongs to the token before the
    /// last query's token.
    pub last_is_written: bool,
}

impl RingMask {
    fn shape(&self) -> [usize; 4] {
        [self.sequences, 1, self.queries, self.slots]
    }
}

/// Returns the mask `[sequences, 1, queries, slots]`, which is true where a query sees the key in a slot. A query sees
/// keys that are already written, are not after the query, and lie in the query's window. `positions` lists the
/// queries' positions, sequence by sequence.
pub(crate) fn ring_mask(positions: Tensor<1, Int>, options: RingMask) -> Tensor<4, Bool> {
    let all = options.shape().iter().product::<usize>();
    // Allocate the mask with one dimension, because rows of a tensor with several dimensions would be padded.
    let mask = Tensor::<1, Bool>::empty([all], &positions.device());
    Tensor::from_dispatch(Dispatch::write_ring_mask(
        mask.into_dispatch(),
        positions.into_dispatch(),
        options,
    ))
}

/// The mask kernel as an operator of a backend.
#[backend_extension(Cube, Fusion)]
pub trait RingBackend: Backend {
    /// Overwrites `mask`, a tensor with one dimension: see [`ring_mask`].
    #[fusion(meta = |mask, _positions, options| {
        TensorSpec::new(Shape::new(options.shape()), mask.dtype)
    })]
    fn write_ring_mask(
        mask: BoolTensor<Self>,
        positions: IntTensor<Self>,
        options: RingMask,
    ) -> BoolTensor<Self>;
}

impl RingBackend for CubeBackend {
    fn write_ring_mask(
        mask: BoolTensor<Self>,
        positions: IntTensor<Self>,
        options: RingMask,
    ) -> BoolTensor<Self> {
        let client = mask.client.clone();
        let all = mask.meta.shape().num_elements();
        let queries = options.sequences * options.queries;
        assert_eq!(
            all,
            queries * options.slots,
            "mask: expected one element for each query and slot"
        );
        assert!(
            queries <= positions.meta.shape().num_elements(),
            "positions: expected one position for each query"
        );
        let element = dtype_to_storage_type(mask.dtype);
        let integer = dtype_to_storage_type(positions.dtype);
        // SAFETY: unit `i` works only if `i` is below `all`, the length of `mask`. The unit writes element `i` of
        // `mask`. The unit reads the position of its query, and the position of the last query of its sequence.
        // `positions` has at least one element per query.
        unsafe {
            ring_mask_pdl::launch_unchecked(
                &client,
                cube_count(&client, all.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                into_contiguous(positions).into_tensor_arg(),
                mask.clone().into_tensor_arg(),
                options.queries as u32,
                options.slots as u32,
                options.window as u32,
                all as u32,
                options.last_is_written,
                supports_pdl(&client),
                element,
                integer,
            );
        }
        burn_cubecl::ops::reshape(mask, Shape::new(options.shape()))
    }
}
