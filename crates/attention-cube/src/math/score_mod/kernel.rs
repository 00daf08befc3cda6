//! The calls of a [`ScoreMod`](super::ScoreMod) or [`MaskMod`](super::MaskMod) in kernels.

use super::{MaskCode, ScoreCode, ScorePlace, ScorePlaceExpand, ScoreTable};
use cubecl::prelude::*;
use cubecl::unexpanded;

/// The function that `#[cube]` generates for [`ScoreMod::score`](super::ScoreMod::score) or for its derivative. The
/// generated function writes the user's code into a kernel.
pub(crate) type ExpandScore =
    fn(&Scope, NativeExpand<f32>, ScorePlaceExpand, &KernelTableExpand) -> NativeExpand<f32>;

/// The function that `#[cube]` generates for [`MaskMod::visible`](super::MaskMod::visible). The generated function
/// writes the user's code into a kernel.
pub(crate) type ExpandVisible =
    fn(&Scope, ScorePlaceExpand, &KernelTableExpand) -> NativeExpand<bool>;

/// The function that `#[cube]` generates for [`LearnedScoreMod::element`](super::LearnedScoreMod::element). The
/// generated function writes the user's code into a kernel.
pub(crate) type ExpandElement =
    fn(&Scope, ScorePlaceExpand, &KernelTableExpand) -> NativeExpand<u32>;

/// The form of a [`ScoreTable`] in kernels. Rust requires this type to be public, because `ScoreTable` is public.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "kernels read the expansion only")]
pub struct KernelTable {
    /// The table's elements, or `None` for a table without elements.
    pub elements: ComptimeOption<OwnedTensor<f32>>,
}

impl CubeType for ScoreTable {
    type ExpandType = KernelTableExpand;
}

#[cube]
impl KernelTable {
    /// Returns the element at `index`. An index past the end reads the last element, and a table without elements gives 0.
    #[allow(dead_code, reason = "kernels call only the expansion")]
    pub fn at(&self, index: u32) -> f32 {
        #[comptime]
        match &self.elements {
            ComptimeOption::Some(elements) => {
                let last = elements.shape(0) as u32 - 1u32;
                elements[min(index, last) as usize * elements.stride(0)]
            }
            ComptimeOption::None => f32::new(0.0),
        }
    }
}

/// The tables that a kernel's score mod and mask mod read.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KernelTables {
    pub score: KernelTable,
    pub mask: KernelTable,
}

/// Returns the score after the kernel's [`ScoreMod`](super::ScoreMod), if the kernel has one.
#[cube]
pub(crate) fn changed_score(
    score: f32,
    place: ScorePlace,
    tables: &KernelTables,
    #[comptime] code: Option<ScoreCode>,
) -> f32 {
    if comptime!(code.is_some()) {
        let changed = call_score(
            score,
            place,
            &tables.score,
            comptime!(code.map(|code| code.expand_score)),
        );
        // If the user's code ends in a product, the `fma` rounds this product. Without the `fma`, the compiler could
        // fuse the product with the later subtraction of the row maximum. The row maximum is a rounded score, so the
        // probability would then contain the rounding error.
        if comptime!(adds_bias(code)) {
            changed
        } else {
            fma(changed, 1.0f32, 0.0f32)
        }
    } else {
        score
    }
}

/// True if the code ends with the addition of a bias, see [`ScoreMod::ADDS_BIAS`](super::ScoreMod::ADDS_BIAS).
pub(crate) fn adds_bias(code: Option<ScoreCode>) -> bool {
    code.is_some_and(|code| code.adds_bias)
}

/// Returns the derivative of [`changed_score`] with respect to `score`, which is the score before the change.
#[cube]
pub(crate) fn derivative_of_change(
    score: f32,
    place: ScorePlace,
    tables: &KernelTables,
    #[comptime] code: Option<ScoreCode>,
) -> f32 {
    if comptime!(code.is_some()) {
        call_score(
            score,
            place,
            &tables.score,
            comptime!(code.map(|code| code.expand_derivative)),
        )
    } else {
        f32::new(1.0)
    }
}

/// The element of the table on which a score depends, and the score's derivative with respect to this element.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct TableSlope {
    pub element: u32,
    pub derivative: f32,
}

/// Returns the [`TableSlope`] of a score at `place`. `score` is the score before the score mod. The code must be that
/// of a [`LearnedScoreMod`](super::LearnedScoreMod).
#[cube]
pub(crate) fn table_slope(
    score: f32,
    place: ScorePlace,
    tables: &KernelTables,
    #[comptime] code: Option<ScoreCode>,
) -> TableSlope {
    let learned = comptime!(code.and_then(|code| code.learned));
    TableSlope {
        element: call_element(
            place,
            &tables.score,
            comptime!(learned.map(|learned| learned.expand_element)),
        ),
        derivative: call_score(
            score,
            place,
            &tables.score,
            comptime!(learned.map(|learned| learned.expand_derivative)),
        ),
    }
}

/// Returns the score, or `hidden` if the kernel's [`MaskMod`](super::MaskMod) hides the key from the query.
#[cube]
pub(crate) fn shown_score(
    score: f32,
    place: ScorePlace,
    tables: &KernelTables,
    hidden: f32,
    #[comptime] code: Option<MaskCode>,
) -> f32 {
    if comptime!(code.is_some()) {
        let visible = call_visible(
            place,
            &tables.mask,
            comptime!(code.map(|code| code.expand_visible)),
        );
        select(visible, score, hidden)
    } else {
        score
    }
}

#[allow(unused, reason = "kernels call the expansion only")]
fn call_score(
    score: f32,
    place: ScorePlace,
    table: &KernelTable,
    code: Option<ExpandScore>,
) -> f32 {
    unexpanded!()
}

mod call_score {
    use super::*;

    pub fn expand(
        scope: &Scope,
        score: NativeExpand<f32>,
        place: ScorePlaceExpand,
        table: &KernelTableExpand,
        code: Option<ExpandScore>,
    ) -> NativeExpand<f32> {
        match code {
            Some(code) => code(scope, score, place, table),
            None => score,
        }
    }
}

#[allow(unused, reason = "kernels call the expansion only")]
fn call_element(place: ScorePlace, table: &KernelTable, code: Option<ExpandElement>) -> u32 {
    unexpanded!()
}

mod call_element {
    use super::*;

    pub fn expand(
        scope: &Scope,
        place: ScorePlaceExpand,
        table: &KernelTableExpand,
        code: Option<ExpandElement>,
    ) -> NativeExpand<u32> {
        match code {
            Some(code) => code(scope, place, table),
            None => 0u32.into(),
        }
    }
}

#[allow(unused, reason = "kernels call the expansion only")]
fn call_visible(place: ScorePlace, table: &KernelTable, code: Option<ExpandVisible>) -> bool {
    unexpanded!()
}

mod call_visible {
    use super::*;

    pub fn expand(
        scope: &Scope,
        place: ScorePlaceExpand,
        table: &KernelTableExpand,
        code: Option<ExpandVisible>,
    ) -> NativeExpand<bool> {
        match code {
            Some(code) => code(scope, place, table),
            None => true.into(),
        }
    }
}
