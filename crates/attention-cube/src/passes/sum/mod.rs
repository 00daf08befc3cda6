//! Sums gradients' parts.

mod kernel;

use self::kernel::sum_parts;
use super::backward::BackwardPass;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{cubecl, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

impl BackwardPass<'_> {
    /// The gradient of `input`, whose parts lie from `first` on; the queries' have `rows`.
    pub(crate) fn sum(
        &self,
        gradients: &CubeTensor,
        first: usize,
        parts: usize,
        input: &CubeTensor,
        rows: Option<&CubeTensor>,
        vector: usize,
    ) -> CubeTensor {
        let client = self.rows.client.clone();
        let gradient = empty(&self.rows, input.meta.shape().clone(), input.dtype);
        let vectors = gradient.meta.shape().num_elements() / vector;
        let units = 128;
        // SAFETY: one unit a vector of the gradient, the rest stops at once; each part is as large.
        unsafe {
            sum_parts::launch_unchecked(
                &client,
                cube_count(&client, vectors.div_ceil(units)),
                CubeDim::new_1d(units as u32),
                address_type([gradients, &gradient]),
                Self::arg(gradients),
                rows.map(Self::arg).into(),
                Self::arg(&gradient),
                first / vector,
                parts as u32,
                vectors,
                dtype_to_storage_type(input.dtype),
                vector,
            );
        }
        gradient
    }
}
