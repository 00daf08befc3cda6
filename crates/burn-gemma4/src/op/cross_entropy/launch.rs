//! Launches the cross entropy of rows.

use super::{
    CrossEntropy, CrossEntropyBackend,
    kernel::{Kind, cross_entropy},
};
use crate::op::launch::{own, team, vector_size};
use burn::{
    backend::{
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::DType,
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

impl CrossEntropyBackend for CubeBackend {
    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        cap: Option<f32>,
    ) -> CrossEntropy<Self> {
        let gradient = own(logits);
        let losses = launch(&gradient, targets, cap, true);
        CrossEntropy { losses, gradient }
    }

    fn cross_entropy_losses(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        cap: Option<f32>,
    ) -> FloatTensor<Self> {
        launch(&into_contiguous(logits), targets, cap, false)
    }
}

/// Computes the losses of contiguous logits. If `with_gradient` is true, the gradient overwrites the logits.
fn launch(
    logits: &CubeTensor,
    targets: CubeTensor,
    cap: Option<f32>,
    with_gradient: bool,
) -> CubeTensor {
    let client = logits.client.clone();
    let [rows, words] = [logits.meta.shape()[0], logits.meta.shape()[1]];
    assert_eq!(
        targets.meta.num_elements(),
        rows,
        "targets: expected one target for each row of logits"
    );
    let targets = into_contiguous(targets);
    let losses = empty(logits, [rows], DType::F32);
    let vector = vector_size(&client, logits.dtype.size(), &[words]);
    let vectors = words / vector;
    let kind = Kind {
        is_capped: cap.is_some(),
        with_gradient,
        team: team(&client, vectors),
    };
    // SAFETY: cube `r` works only if `r` is below `rows`. The cube accesses only row `r` of `logits`, and element `r` of
    // `targets` and `losses`.
    unsafe {
        cross_entropy::launch_unchecked(
            &client,
            cube_count(&client, rows),
            CubeDim::new_1d(kind.team.units as u32),
            address_type([logits]),
            logits.clone().into_tensor_arg(),
            targets.clone().into_tensor_arg(),
            losses.clone().into_tensor_arg(),
            rows as u32,
            vectors as u32,
            cap.unwrap_or(1.0),
            kind,
            dtype_to_storage_type(logits.dtype),
            dtype_to_storage_type(targets.dtype),
            vector,
        );
    }
    losses
}
