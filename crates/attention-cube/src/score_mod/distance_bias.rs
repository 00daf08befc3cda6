//! A score mod that adds a bias. The bias depends only on the head and on the distance between query and key.

use crate::math::score_mod::{LearnedScoreMod, ScoreMod, ScorePlace, ScoreTable};
use burn::tensor::{DType, Int, Tensor, TensorData};
#[cfg(feature = "cube")]
use cubecl::prelude::*;

/// Adds a bias to each score, such as T5's relative bias. The bias depends on the head and on the distance between
/// query and key.
///
/// The table is [`DistanceBias::table`] or [`DistanceBias::t5_table`]. To train, track the biases or weights that these
/// functions get. The table itself is no parameter, because its first element is the largest distance.
pub struct DistanceBias;

#[cfg_attr(feature = "cube", cube)]
impl ScoreMod for DistanceBias {
    const ADDS_BIAS: bool = true;

    fn score(score: f32, place: ScorePlace, table: &ScoreTable) -> f32 {
        score + table.at(element(place, table))
    }

    fn derivative(_score: f32, _place: ScorePlace, _table: &ScoreTable) -> f32 {
        1.0f32
    }
}

#[cfg_attr(feature = "cube", cube)]
impl LearnedScoreMod for DistanceBias {
    const OF_DISTANCE: bool = true;

    fn element(place: ScorePlace, table: &ScoreTable) -> u32 {
        element(place, table)
    }

    fn element_derivative(_score: f32, _place: ScorePlace, _table: &ScoreTable) -> f32 {
        1.0f32
    }
}

/// Returns the index of the bias for a place. The table begins with the largest distance that has a bias of its own.
#[cfg_attr(feature = "cube", cube)]
fn element(place: ScorePlace, table: &ScoreTable) -> u32 {
    let most = (table.at(0u32) + 0.5f32) as i32;
    let mut distance = place.distance();
    if distance > most {
        distance = most;
    }
    if distance < -most {
        distance = -most;
    }
    let first = 1u32 + place.head * (2i32 * most + 1i32) as u32;
    first + (distance + most) as u32
}

impl DistanceBias {
    /// Returns the table for biases of the distances `−most` to `most`. Autodiff tracks the table if it tracks the
    /// biases. The distance is positive for keys before the query's own position. Distances are clamped to
    /// `−most..=most`.
    ///
    /// # Shapes
    /// `biases [q_heads, 2 · most + 1]`.
    ///
    /// # Panics
    /// Panics if the second dimension of `biases` has an even size.
    pub fn table(biases: Tensor<2>) -> Tensor<1> {
        let [q_heads, count] = biases.dims();
        assert!(
            count % 2 == 1,
            "biases: the second size is {count}; expected an odd number, one bias for each distance from −most to most"
        );
        // The table is f32, because half precision cannot represent all distances.
        let most = Tensor::<1>::full([1], (count / 2) as f64, (&biases.device(), DType::F32));
        let biases = biases.reshape([q_heads * count]);
        Tensor::cat(vec![most, biases.cast(DType::F32)], 0)
    }

    /// Returns the table for T5's relative attention bias. Autodiff tracks the table if it tracks the weights. Train
    /// such weights with [`learned_score_mod`](crate::AttentionOptions::learned_score_mod).
    ///
    /// `bidirectional` is true in T5's encoder. The usual number of buckets is 32, and the usual `max_distance` 128.
    ///
    /// # Shapes
    /// `weights [buckets, q_heads]`, the embedding `relative_attention_bias` of a checkpoint.
    ///
    /// # Panics
    /// Panics if there are fewer than 4 buckets, or if `max_distance` is not larger than half of the buckets.
    pub fn t5_table(weights: Tensor<2>, bidirectional: bool, max_distance: usize) -> Tensor<1> {
        let [buckets, _] = weights.dims();
        assert!(
            buckets >= 4 && max_distance > buckets / 2,
            "weights: {buckets} buckets with a max_distance of {max_distance}; expected at least 4 buckets, and a max_distance \
             larger than half of them"
        );
        let most = max_distance as i64;
        let of_distances: Vec<i32> = (-most..=most)
            .map(|distance| t5_bucket(distance, bidirectional, buckets, max_distance) as i32)
            .collect();
        let count = of_distances.len();
        let of_distances = TensorData::new(of_distances, [count]);
        let index = Tensor::<1, Int>::from_data(of_distances, &weights.device());
        Self::table(weights.select(0, index).transpose())
    }
}

/// Returns the bucket of a distance, as `_relative_position_bucket` of T5 in Hugging Face Transformers does. Earlier
/// keys have positive distances.
fn t5_bucket(distance: i64, bidirectional: bool, buckets: usize, max_distance: usize) -> usize {
    let (first, buckets, distance) = match bidirectional {
        true => {
            let half = buckets / 2;
            let first = if distance < 0 { half } else { 0 };
            (first, half, distance.unsigned_abs() as usize)
        }
        false => (0, buckets, distance.max(0) as usize),
    };
    let exact = buckets / 2;
    if distance < exact {
        return first + distance;
    }
    // Use the dtype and the order of operations of Hugging Face Transformers, so that the rounding is equal.
    let ratio = (distance as f32 / exact as f32).ln();
    let logarithm = (f64::from(max_distance as u32) / exact as f64).ln() as f32;
    let step = (ratio / logarithm * (buckets - exact) as f32) as usize;
    first + (exact + step).min(buckets - 1)
}

#[cfg(test)]
mod tests {
    use super::t5_bucket;

    /// Compares buckets with those that `T5Attention._relative_position_bucket` of Hugging Face Transformers 4.57
    /// returned.
    #[test]
    fn t5_bucket_equals_that_of_transformers() {
        let of = |distances: &[i64], bidirectional| -> Vec<usize> {
            let bucket = |distance: &i64| t5_bucket(*distance, bidirectional, 32, 128);
            distances.iter().map(bucket).collect()
        };
        let distances = [
            -200, -128, -64, -16, -8, -7, -1, 0, 1, 7, 8, 11, 12, 16, 64, 127, 200,
        ];
        assert_eq!(
            of(&distances, true),
            [31, 31, 30, 26, 24, 23, 17, 0, 1, 7, 8, 8, 9, 10, 14, 15, 15]
        );
        let distances = [-3, 0, 15, 16, 18, 19, 32, 64, 100, 127, 128, 1000];
        assert_eq!(
            of(&distances, false),
            [0, 0, 15, 16, 16, 17, 21, 26, 30, 31, 31, 31]
        );
    }
}
