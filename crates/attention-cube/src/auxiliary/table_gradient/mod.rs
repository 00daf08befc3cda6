//! The gradient of a score mod's table: the sum of `dS · d score / d element` over all scores that depend on an element.

#[cfg(feature = "cuda")]
pub(crate) mod diagonals;
pub(crate) mod scores;

use cubecl::prelude::*;

/// Adds the shares of a cube to its part of the table. Share `i` is `amounts[i]`, for the element `elements[i]`. The
/// part begins at `own_part` in `partial`. All units of the cube must call this function.
///
/// Each table element belongs to one unit, which alone adds the shares of this element, in a fixed order. Two runs
/// therefore give the same bits. Neighboring shares often have the same element, so a unit adds them in a register first.
#[cube]
fn add_shares(
    amounts: &Shared<[f32]>,
    elements: &Shared<[u32]>,
    partial: &mut Tensor<f32>,
    own_part: usize,
    #[comptime] shares: usize,
    #[comptime] units: usize,
) {
    sync_cube();
    // `sum` holds the shares of element `summed` that are not in `partial` yet.
    let mut summed = 0u32;
    let mut sum = 0.0f32;
    for share in 0..shares {
        let element = elements[share];
        if element % comptime!(units as u32) == UNIT_POS {
            if element != summed {
                if sum != 0.0f32 {
                    partial[own_part + summed as usize] += sum;
                }
                summed = element;
                sum = 0.0f32;
            }
            sum += amounts[share];
        }
    }
    if sum != 0.0f32 {
        partial[own_part + summed as usize] += sum;
    }
    sync_cube();
}
