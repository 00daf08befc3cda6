//! Score mods and mask mods, run on the CPU for every score.

use super::block::Block;
use super::tensors::cast;
use crate::integers::{INTS, clamped_integers};
use crate::math::score_mod::{LearnedCode, MaskCode, ScoreCode, ScorePlace, ScoreTable};
use crate::types::tensors::{AttentionInputs, MaybeFloat, MaybeInt, logsumexp_dtype};
use burn::backend::{
    Backend, TensorMetadata, read_sync,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{BoolDType, DType, TensorData};

/// The tables of score mod and mask mod, on the host. A missing table has no elements.
pub(crate) struct Tables {
    score: ScoreTable,
    mask: ScoreTable,
}

impl Tables {
    /// Reads the tables of a call from the device.
    pub fn read<B: Backend>(inputs: &AttentionInputs<B>) -> Self {
        Self {
            score: table::<B>(&inputs.score_table),
            mask: table::<B>(&inputs.mask_table),
        }
    }
}

/// The scores after a score mod, and their derivatives with respect to the scores before the score mod.
pub(super) struct Changed<B: Backend> {
    pub scores: FloatTensor<B>,
    pub derivative: FloatTensor<B>,
}

/// Changes the scores of a block, `[batch, q_heads, q_len, kv_len]`, with the score mod `code`. Where the mask `hidden`
/// is true, the returned derivative is 0.
pub(super) fn changed<B: Backend>(
    scores: FloatTensor<B>,
    hidden: Option<BoolTensor<B>>,
    code: ScoreCode,
    block: &Block<B>,
) -> Changed<B> {
    let table = &block.tables.score;
    let before = floats::<B>(scores.clone());
    let places = places::<B>(block);
    let (after, derivative): (Vec<f32>, Vec<f32>) = before
        .iter()
        .zip(places)
        .map(|(&score, place)| {
            let after = (code.score)(score, place, table);
            (after, (code.derivative)(score, place, table))
        })
        .unzip();
    let device = scores.device();
    let tensor = |elements| {
        let data = TensorData::new(elements, scores.shape());
        B::float_from_data(data.convert_dtype(logsumexp_dtype(&block.problem)), &device)
    };
    let (after, mut derivative) = (tensor(after), tensor(derivative));
    let mut scores = scores;
    if let Some(hidden) = hidden.clone() {
        // Hidden scores and their derivatives may be NaN or infinite. Set them to 0, because a zero gradient times NaN
        // is NaN.
        scores = B::float_mask_fill(scores, hidden.clone(), 0.0.into());
        derivative = B::float_mask_fill(derivative, hidden, 0.0.into());
    }
    // Autodiff cannot differentiate the code of the score mod. Add a term whose value is 0 and whose gradient is the
    // code's derivative.
    let scores = match B::ad_enabled(&device) {
        true => {
            let zero = B::float_sub(scores.clone(), B::float_detach(scores));
            let changed = B::float_add(after, B::float_mul(zero, derivative.clone()));
            plus_table_term::<B>(changed, before, hidden, block)
        }
        false => after,
    };
    Changed { scores, derivative }
}

/// Adds a term to the changed scores whose value is 0. Its gradient is the derivative of the scores with respect to the
/// table, if the table has a gradient. `before` holds the scores before the score mod. Where the mask `hidden` is true,
/// the derivative is 0.
fn plus_table_term<B: Backend>(
    changed: FloatTensor<B>,
    before: Vec<f32>,
    hidden: Option<BoolTensor<B>>,
    block: &Block<B>,
) -> FloatTensor<B> {
    let table = block.inputs.score_table.as_option();
    let Some((table, learned)) = table.zip(block.problem.learned_code()) else {
        return changed;
    };
    let (elements, slopes): (Vec<i32>, Vec<f32>) = table_slopes::<B>(learned, before, block)
        .map(|(element, slope)| (element as i32, slope))
        .unzip();
    let (device, shape) = (changed.device(), changed.shape());
    let data = TensorData::new(elements, [shape.num_elements()]);
    let elements = B::int_from_data(data.convert_dtype(DType::from(INTS)), &device);
    let compute = logsumexp_dtype(&block.problem);
    let slopes = TensorData::new(slopes, shape.clone()).convert_dtype(compute);
    let mut slopes = B::float_from_data(slopes, &device);
    if let Some(hidden) = hidden {
        slopes = B::float_mask_fill(slopes, hidden, 0.0.into());
    }
    let selected = B::float_select(cast::<B>(table.clone(), compute), 0, elements);
    let zero = B::float_sub(selected.clone(), B::float_detach(selected));
    let term = B::float_mul(B::float_reshape(zero, shape), slopes);
    B::float_add(changed, term)
}

/// Returns, for each score of a block, the index of the table's element on which the score depends, and the score's
/// derivative with respect to this element. `before` holds the scores before the score mod.
fn table_slopes<B: Backend>(
    learned: LearnedCode,
    before: Vec<f32>,
    block: &Block<B>,
) -> impl Iterator<Item = (usize, f32)> {
    let table = &block.tables.score;
    let last = table.count().saturating_sub(1);
    let places = places::<B>(block).into_iter();
    before.into_iter().zip(places).map(move |(score, place)| {
        let element = (learned.element)(place, table) as usize;
        (element.min(last), (learned.derivative)(score, place, table))
    })
}

/// Adds the block's part of the table's gradient to `sums`. `before` holds the scores before the score mod, and `ds`
/// the gradients of the scores after it. The gradient of a hidden score must be 0.
pub(crate) fn add_table_gradient<B: Backend>(
    sums: &mut [f64],
    before: FloatTensor<B>,
    ds: FloatTensor<B>,
    learned: LearnedCode,
    block: &Block<B>,
) {
    let slopes = table_slopes::<B>(learned, floats::<B>(before), block);
    for ((element, slope), ds) in slopes.zip(floats::<B>(ds)) {
        // The derivative of a hidden score may be NaN.
        if ds != 0.0 {
            sums[element] += f64::from(ds) * f64::from(slope);
        }
    }
}

/// Returns a mask of the keys that the mask mod `code` leaves visible to each query, `[batch, q_heads, q_len, kv_len]`.
pub(super) fn visible<B: Backend>(
    code: MaskCode,
    block: &Block<B>,
    bools: BoolDType,
) -> BoolTensor<B> {
    let table = &block.tables.mask;
    let visible: Vec<bool> = places::<B>(block)
        .into_iter()
        .map(|place| (code.visible)(place, table))
        .collect();
    let problem = &block.problem;
    let [batch, q_heads, q_len] = problem.logsumexp_shape();
    let shape = [batch, q_heads, q_len, problem.kv_len];
    let data = TensorData::new(visible, shape).convert_dtype(DType::from(bools));
    B::bool_from_data(data, &block.inputs.query.device())
}

/// Returns the place of each score of a block: sequence, head, query and key.
fn places<B: Backend>(block: &Block<B>) -> Vec<ScorePlace> {
    let (inputs, problem, place) = (&block.inputs, &block.problem, block.place);
    let [batch, q_heads, q_len] = problem.logsumexp_shape();
    let kv_len = problem.kv_len;
    let keys = lengths::<B>(&inputs.kv_lengths, place.kv_len, batch);
    let queries = lengths::<B>(&inputs.query_lengths, place.q_len, batch);
    let mut places = Vec::with_capacity(batch * q_heads * q_len * kv_len);
    for (index, (keys, queries)) in keys.into_iter().zip(queries).enumerate() {
        let offset = match problem.is_bottom_right() {
            true => keys - queries,
            false => 0,
        };
        let sequence = (place.sequence + index) as u32;
        for head in place.q_head..place.q_head + q_heads {
            for query in place.query..place.query + q_len {
                places.extend((place.key..place.key + kv_len).map(|key| {
                    ScorePlace::new(sequence, head as u32, query as i32, key as i32, offset)
                }));
            }
        }
    }
    places
}

/// Returns the number of queries, or of keys, of each sequence. Without `lengths`, every sequence has `all` of them.
fn lengths<B: Backend>(lengths: &MaybeInt<B>, all: usize, batch: usize) -> Vec<i32> {
    match lengths.as_option() {
        None => vec![all as i32; batch],
        Some(lengths) => {
            let lengths = clamped_integers::<B>(lengths.clone(), all);
            let data = read_sync(B::int_into_data(lengths)).expect("the device can be read");
            data.iter::<i32>().collect()
        }
    }
}

fn table<B: Backend>(table: &MaybeFloat<B>) -> ScoreTable {
    let elements = table.as_option().map(|table| floats::<B>(table.clone()));
    ScoreTable::new(elements.unwrap_or_default())
}

fn floats<B: Backend>(tensor: FloatTensor<B>) -> Vec<f32> {
    let tensor = B::float_detach(cast::<B>(tensor, DType::F32));
    let data = read_sync(B::float_into_data(tensor)).expect("the device can be read");
    data.iter::<f32>().collect()
}
