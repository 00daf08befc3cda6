//! ALiBi: biases that are linear in the distance (Press, Smith and Lewis, <https://arxiv.org/abs/2108.12409>).

use crate::math::score_mod::{LearnedScoreMod, ScoreMod, ScorePlace, ScoreTable};
use burn::tensor::{DType, Device, Tensor, TensorData};
#[cfg(feature = "cube")]
use cubecl::prelude::*;

/// Subtracts `slope · |distance|` from each score (ALiBi), with one slope per head. The table is [`Alibi::slopes`].
/// With [`learned_score_mod`](crate::AttentionOptions::learned_score_mod), the slopes have a gradient.
///
/// ```
/// use attention_cube::AttentionOptions;
/// use attention_cube::score_mod::Alibi;
/// use burn::tensor::Device;
///
/// let slopes = Alibi::slopes(8, &Device::default());
/// let options = AttentionOptions::new().causal().score_mod::<Alibi>(Some(slopes));
/// # let _ = options;
/// ```
pub struct Alibi;

#[cfg_attr(feature = "cube", cube)]
impl ScoreMod for Alibi {
    const ADDS_BIAS: bool = true;

    fn score(score: f32, place: ScorePlace, table: &ScoreTable) -> f32 {
        score - place.abs_distance_times(table.at(place.head))
    }

    fn derivative(_score: f32, _place: ScorePlace, _table: &ScoreTable) -> f32 {
        1.0f32
    }
}

#[cfg_attr(feature = "cube", cube)]
impl LearnedScoreMod for Alibi {
    const OF_DISTANCE: bool = true;

    fn element(place: ScorePlace, _table: &ScoreTable) -> u32 {
        place.head
    }

    fn element_derivative(_score: f32, place: ScorePlace, _table: &ScoreTable) -> f32 {
        -place.distance_f32().abs()
    }
}

impl Alibi {
    /// Returns the slopes of the paper. If `q_heads` is a power of two, head `h = 1, 2, …` gets the slope
    /// `2^(−8 h / q_heads)`. Otherwise let `n` be the largest power of two below `q_heads`. The first `n` heads get the
    /// slopes of a model with `n` heads. The remaining heads get every second slope of a model with `2 n` heads.
    ///
    /// # Shapes
    /// The result is `[q_heads]`, f32.
    pub fn slopes(q_heads: usize, device: &Device) -> Tensor<1> {
        let power = 1 << q_heads.max(1).ilog2();
        let slope = |head: usize, heads: usize| (-8.0 * (head + 1) as f64 / heads as f64).exp2();
        let slopes: Vec<f32> = (0..q_heads)
            .map(|head| match head < power {
                true => slope(head, power) as f32,
                false => slope(2 * (head - power), 2 * power) as f32,
            })
            .collect();
        Tensor::from_data(TensorData::new(slopes, [q_heads]), (device, DType::F32))
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "flex")]
    #[test]
    fn slopes_of_8_and_12_heads_are_those_of_the_paper() {
        let slopes = |heads| -> Vec<f32> {
            let device = burn::tensor::Device::flex();
            let slopes = super::Alibi::slopes(heads, &device).into_data();
            slopes.try_into_vec().expect("the slopes are f32")
        };
        let of_eight: Vec<f32> = (1..=8).map(|head| 0.5f32.powi(head)).collect();
        assert_eq!(slopes(8), of_eight);
        let more = [0.5f32, 1.5, 2.5, 3.5].map(|power| 0.5f32.powf(power));
        assert_eq!(slopes(12), [of_eight, more.to_vec()].concat());
    }
}
