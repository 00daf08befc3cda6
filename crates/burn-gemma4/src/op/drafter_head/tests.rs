//! Tests of the drafter's first and last kernels. Chosen groups must agree with a sort, and draft tokens with an f64
//! reference.

use super::*;
use crate::op;
use burn::tensor::{Device, Distribution, TensorData};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.clone().into_data().iter::<f64>().collect()
}

fn integers<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i64> {
    tensor.into_data().iter::<i64>().collect()
}

fn upload<const D: usize>(numbers: Vec<i32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(numbers, shape), (device, NUMBERS))
}

fn drawn(shape: [usize; 2], device: &Device, dtype: DType) -> Tensor<2> {
    Tensor::<2>::random(shape, Distribution::Uniform(-1.0, 1.0), device).cast(dtype)
}

#[test]
fn join_concatenates_embeddings_and_streams() {
    let device = Device::default();
    for dtype in DTYPES {
        if !op::serves(&device, dtype) {
            continue;
        }
        for (rows, columns) in [(1, 64), (3, 10), (2, 7)] {
            let table = drawn([9, columns], &device, dtype);
            let streams = drawn([rows, columns], &device, dtype);
            // Append columns of NaN to each stream. The kernel must read `columns` columns of each row and ignore the others.
            let others = Tensor::<2>::full([rows, columns + 2], f32::NAN, &device).cast(dtype);
            let wide = Tensor::cat(vec![streams.clone(), others], 1);
            let mut numbers = vec![i32::MAX; 2 + rows];
            for (row, number) in numbers[2..].iter_mut().enumerate() {
                *number = (8 - 3 * row) as i32;
            }
            let tokens = TokensAt {
                tokens: upload(numbers, [2 + rows], &device),
                first: 2,
            };
            let columns_of = |rows: &Tensor<2>| ColumnSlice {
                rows: rows.clone(),
                start: 0,
                count: columns,
            };
            let scale = (columns as f64).sqrt();
            let rounded = Tensor::<1>::from_data([scale as f32], &device).cast(dtype);
            let rounded = rounded
                .into_data()
                .iter::<f64>()
                .next()
                .expect("the tensor has an element");
            let (of_table, of_streams) = (values(&table), values(&streams));
            let row_of = |row: usize| &of_table[(8 - 3 * row) * columns..][..columns];
            let mut expected = Vec::new();
            for row in 0..rows {
                expected.extend(row_of(row).iter().map(|value| (value * rounded) as f32));
                let stream = &of_streams[row * columns..][..columns];
                expected.extend(stream.iter().map(|value| *value as f32));
            }
            let expected = TensorData::new(expected, [rows, 2 * columns]);
            let expected = Tensor::<2>::from_data(expected, &device).cast(dtype);
            for streams in [&streams, &wide] {
                let embeddings = Embeddings::Table {
                    table: table.clone(),
                    scale,
                };
                let found = join(embeddings, tokens.clone(), columns_of(streams));
                assert_eq!(
                    values(&found),
                    values(&expected),
                    "{rows} {columns} {dtype:?}"
                );
            }
            let known = drawn([rows, columns], &device, dtype);
            let found = join(Embeddings::Rows(known.clone()), tokens, columns_of(&wide));
            let expected = Tensor::cat(vec![known, streams], 1);
            assert_eq!(
                values(&found),
                values(&expected),
                "{rows} {columns} {dtype:?}"
            );
        }
    }
}

/// Returns the indices of the `count` largest scores in descending order. On ties the lower index comes first, and −0
/// equals 0. NaN counts as −∞.
fn sorted(scores: &[f64], count: usize) -> Vec<i64> {
    let number = |place: &i64| match scores[*place as usize] {
        score if score.is_nan() => f64::NEG_INFINITY,
        score => score,
    };
    let mut places: Vec<i64> = (0..scores.len() as i64).collect();
    places.sort_by(|a, b| {
        let order = number(b).partial_cmp(&number(a));
        order.expect("scores have no NaN after the replacement by −∞")
    });
    places.truncate(count);
    places
}

#[test]
fn choose_groups_matches_sort() {
    let device = Device::default();
    for dtype in DTYPES {
        if !op::serves(&device, dtype) {
            continue;
        }
        for (rows, groups, top_k) in [(1, 5, 3), (2, 16, 16), (3, 300, 32), (1, 2500, 7)] {
            // Round the scores to multiples of 1/20, so that many scores are equal and the order of equal scores is tested.
            let scores = drawn([rows, groups], &device, DType::F32);
            let scores = ((scores * 20.0).round() / 20.0).cast(dtype);
            let first = Tensor::<2>::full([rows, 3], f32::NAN, &device).cast(dtype);
            let all = Tensor::cat(vec![first, scores.clone()], 1);
            let columns = ColumnSlice {
                rows: all,
                start: 3,
                count: groups,
            };
            let found = integers(choose_groups(columns, top_k));
            let scores = values(&scores);
            let expected: Vec<i64> = scores
                .chunks_exact(groups)
                .flat_map(|scores| sorted(scores, top_k))
                .collect();
            assert_eq!(found, expected, "{rows} {groups} {top_k} {dtype:?}");
        }
    }
}

#[test]
fn choose_groups_puts_nan_last() {
    let device = Device::default();
    let scores = [f32::NAN, f32::NEG_INFINITY, 1.0, f32::NAN, 2.0, f32::NAN];
    let scores = Tensor::<2>::from_data([scores], &device);
    let found = integers(choose_groups(ColumnSlice::all(scores), 6));
    assert_eq!(found, [4, 2, 0, 1, 3, 5]);
}

/// The initial value of every element in the tensor of draft tokens. Elements that belong to no row must keep this value.
const OTHERS: i32 = -7;

/// Returns the draft tokens of `rows` rows. These draft tokens begin at index 2 of the tensor. Checks that no other
/// element changed.
#[track_caller]
fn guesses_of(found: Tensor<1, Int>, rows: usize) -> Vec<i64> {
    let found = integers(found);
    for (place, guess) in found.iter().enumerate() {
        let is_of_row = (2..2 + rows).contains(&place);
        assert_eq!(is_of_row, *guess != i64::from(OTHERS), "{found:?}");
    }
    found[2..2 + rows].to_vec()
}

fn places(rows: usize, device: &Device) -> TokensAt {
    TokensAt {
        tokens: upload(vec![OTHERS; rows + 3], [rows + 3], device),
        first: 2,
    }
}

/// Checks that the token `found` has the largest logit of all candidates, apart from f32 rounding.
#[track_caller]
fn assert_best(hidden: &[f64], table: &[f64], candidates: &[i64], found: i64, what: &str) {
    assert!(candidates.contains(&found), "{what}: {found}");
    let product = |token: i64| -> f64 {
        let row = &table[token as usize * hidden.len()..][..hidden.len()];
        row.iter().zip(hidden).map(|(a, b)| a * b).sum()
    };
    let best = candidates.iter().map(|token| product(*token));
    let best = best.fold(f64::NEG_INFINITY, f64::max);
    let found = product(found);
    assert!(found > best - 1e-5, "{what}: got {found}, expected {best}");
}

#[test]
fn guess_of_groups_is_best_candidate() {
    let device = Device::default();
    for dtype in DTYPES {
        if !op::serves(&device, dtype) {
            continue;
        }
        for (rows, groups, of_group, top_k, columns) in
            [(1, 8, 16, 2, 64), (3, 5, 3, 2, 10), (2, 20, 128, 9, 48)]
        {
            let tokens = groups * of_group;
            let hidden = drawn([rows, columns], &device, dtype);
            let table = drawn([tokens, columns], &device, dtype);
            // Assign the tokens to groups in reverse, so that a group's index differs from the ids of its tokens.
            let ordering: Vec<i32> = (0..tokens as i32).rev().collect();
            let chosen: Vec<i32> = (0..rows * top_k)
                .map(|place| (place * 3 % groups) as i32)
                .collect();
            let found = guess_of_groups(
                hidden.clone(),
                table.clone(),
                upload(ordering.clone(), [groups, of_group], &device),
                upload(chosen.clone(), [rows, top_k], &device),
                places(rows, &device),
            );
            let found = guesses_of(found, rows);
            let (hidden, table) = (values(&hidden), values(&table));
            for (row, found) in found.into_iter().enumerate() {
                let chosen = &chosen[row * top_k..][..top_k];
                let candidates: Vec<i64> = chosen
                    .iter()
                    .flat_map(|group| &ordering[*group as usize * of_group..][..of_group])
                    .map(|token| i64::from(*token))
                    .collect();
                let hidden = &hidden[row * columns..][..columns];
                let what = format!("{row} of {rows}, {groups} {of_group} {dtype:?}");
                assert_best(hidden, &table, &candidates, found, &what);
            }
        }
    }
}

#[test]
fn guess_of_logits_is_argmax() {
    let device = Device::default();
    for (rows, columns) in [(1, 7), (3, 5000)] {
        let logits = drawn([rows, columns], &device, DType::F32);
        let found = guess_of_logits(logits.clone(), places(rows, &device));
        let expected: Vec<i64> = values(&logits)
            .chunks_exact(columns)
            .flat_map(|logits| sorted(logits, 1))
            .collect();
        assert_eq!(guesses_of(found, rows), expected);
    }
}

#[test]
fn guess_without_numbers_is_a_valid_token() {
    let device = Device::default();
    let nothing = Tensor::<2>::full([2, 4], f32::NAN, &device);
    let found = guess_of_logits(nothing.clone(), places(2, &device));
    assert_eq!(guesses_of(found, 2), [0, 0]);
    let table = Tensor::<2>::ones([6, 4], &device);
    let ordering = upload((0..6).collect(), [3, 2], &device);
    let chosen = upload(vec![2, 1], [2, 1], &device);
    let found = guess_of_groups(nothing, table, ordering, chosen, places(2, &device));
    assert_eq!(guesses_of(found, 2), [0, 0]);
}
