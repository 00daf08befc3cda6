//! What queries see in a ring of keys whose columns are in any order, as a mask, in one launch: for inference on CubeCL devices.

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
use cube_kit::{launch::cube_count, overlap::overlaps};
use cubecl::prelude::CubeDim;
use kernel::{UNITS, ring_mask_overlapped};

/// What a mask is of.
#[derive(Clone, Copy, Debug)]
pub struct RingMask {
    pub sequences: usize,
    /// Of each sequence.
    pub queries: usize,
    pub slots: usize,
    /// Keys that a query sees, its own included.
    pub window: usize,
    /// Whether the last query's own column is written; else the one before it is the last.
    pub last_is_written: bool,
}

impl RingMask {
    fn shape(&self) -> [usize; 4] {
        [self.sequences, 1, self.queries, self.slots]
    }
}

/// `[sequences, 1, queries, slots]`: whether queries at `positions`, a sequence's one after the other, see the newest column of each slot: whether there is one, it is
/// no later than they are, and in the window.
pub(crate) fn ring_mask(positions: Tensor<1, Int>, options: RingMask) -> Tensor<4, Bool> {
    let all = options.shape().iter().product::<usize>();
    // Of the device's own kind of booleans, which lie together: rows would be padded.
    let mask = Tensor::<1, Bool>::empty([all], &positions.device());
    Tensor::from_dispatch(Dispatch::write_ring_mask(
        mask.into_dispatch(),
        positions.into_dispatch(),
        options,
    ))
}

/// The kernel as an operator of a backend.
#[backend_extension(Cube, Fusion)]
pub trait RingBackend: Backend {
    /// Writes the mask over what was there, all in a row: see [`ring_mask`].
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
        assert_eq!(all, queries * options.slots, "a place for each");
        assert!(
            queries <= positions.meta.shape().num_elements(),
            "a position for each"
        );
        let element = dtype_to_storage_type(mask.dtype);
        let integer = dtype_to_storage_type(positions.dtype);
        // SAFETY: a unit writes one of the mask's elements, which lie together, and reads the positions of its query and its sequence's last.
        unsafe {
            ring_mask_overlapped::launch_unchecked(
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
                overlaps(&client),
                element,
                integer,
            );
        }
        burn_cubecl::ops::reshape(mask, Shape::new(options.shape()))
    }
}
