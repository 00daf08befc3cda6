//! The definition of attention on the host, in f64. It uses no kernel, so it does not depend on the device.

use super::sample::{Sample, round};
use crate::problem::AttentionProblem;

/// The results of a sample. The gradients are empty if they were not computed.
#[derive(Default)]
pub(super) struct Results {
    /// `[q_heads, q_len, value_dim]`.
    pub output: Vec<f64>,
    /// `[q_heads, q_len, head_dim]`.
    pub query_gradient: Vec<f64>,
    /// `[kv_len, head_dim]`.
    pub key_gradient: Vec<f64>,
    /// `[kv_len, value_dim]`.
    pub value_gradient: Vec<f64>,
}

/// The precision of a computation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Precision {
    /// All numbers are f64.
    Exact,
    /// The probabilities, the gradients of the scores, and the results are rounded to the problem's dtype, as in every
    /// engine with matrix units.
    Rounded,
}

/// Computes the output of a sample, and also the gradients if `with_gradients`.
pub(super) fn compute(sample: &Sample, precision: Precision, with_gradients: bool) -> Results {
    let AttentionProblem {
        q_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim,
        dtype,
        scale,
        ..
    } = sample.problem;
    let rounded = |mut matrix: Vec<f64>| {
        if precision == Precision::Rounded {
            matrix.iter_mut().for_each(|x| *x = round(*x, dtype));
        }
        matrix
    };
    let keys_transposed = transpose(&sample.key, head_dim);
    let values_transposed = transpose(&sample.value, value_dim);
    let mut results = Results {
        key_gradient: vec![0.0; kv_len * head_dim],
        value_gradient: vec![0.0; kv_len * value_dim],
        ..Results::default()
    };
    for head in 0..q_heads {
        let query = &sample.query[head * q_len * head_dim..][..q_len * head_dim];
        let mut p = multiply(query, &keys_transposed, head_dim);
        for (i, row) in p.chunks_exact_mut(kv_len).enumerate() {
            let visible = i + 1 + kv_len - q_len;
            softmax(row, visible, scale);
        }
        let p_rounded = rounded(p.clone());
        let output = rounded(multiply(&p_rounded, &sample.value, kv_len));
        if with_gradients {
            let at = head * q_len * value_dim;
            let output_gradient = &sample.output_gradient[at..][..q_len * value_dim];
            let mut ds = multiply(output_gradient, &values_transposed, value_dim);
            for (i, row) in ds.chunks_exact_mut(kv_len).enumerate() {
                let columns = i * value_dim..(i + 1) * value_dim;
                let delta = dot(&output[columns.clone()], &output_gradient[columns]);
                let p = &p[i * kv_len..][..kv_len];
                row.iter_mut()
                    .zip(p)
                    .for_each(|(dp, p)| *dp = p * (*dp - delta));
            }
            let ds = rounded(ds);
            let dq = multiply(&ds, &sample.key, kv_len);
            let dk = multiply(&transpose(&ds, kv_len), query, q_len);
            let dv = multiply(&transpose(&p_rounded, kv_len), output_gradient, q_len);
            let scaled = |x: f64| x * scale;
            results.query_gradient.extend(dq.into_iter().map(scaled));
            add(&mut results.key_gradient, dk.into_iter().map(scaled));
            add(&mut results.value_gradient, dv);
        }
        results.output.extend(output);
    }
    Results {
        output: results.output,
        query_gradient: rounded(results.query_gradient),
        key_gradient: rounded(results.key_gradient),
        value_gradient: rounded(results.value_gradient),
    }
}

/// Replaces `q·k` by probabilities over the first `visible` keys. Other keys get 0.
fn softmax(row: &mut [f64], visible: usize, scale: f64) {
    let (seen, hidden) = row.split_at_mut(visible);
    let max = seen.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    seen.iter_mut()
        .for_each(|score| *score = ((*score - max) * scale).exp());
    let sum: f64 = seen.iter().sum();
    seen.iter_mut().for_each(|p| *p /= sum);
    hidden.fill(0.0);
}

/// Multiplies `left`, with rows of `depth` columns, by `right`, with `depth` rows.
fn multiply(left: &[f64], right: &[f64], depth: usize) -> Vec<f64> {
    let columns = right.len() / depth;
    let mut product = vec![0.0; left.len() / depth * columns];
    let rows = product.chunks_exact_mut(columns);
    for (sums, left) in rows.zip(left.chunks_exact(depth)) {
        for (factor, right) in left.iter().zip(right.chunks_exact(columns)) {
            // Half of the probabilities are hidden by the causal mask.
            if *factor != 0.0 {
                let pairs = sums.iter_mut().zip(right);
                pairs.for_each(|(sum, x)| *sum += factor * x);
            }
        }
    }
    product
}

/// Returns the transpose of a matrix with rows of `columns` elements.
fn transpose(matrix: &[f64], columns: usize) -> Vec<f64> {
    let rows = matrix.len() / columns;
    let at = |index: usize| matrix[index % rows * columns + index / rows];
    (0..matrix.len()).map(at).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(sums: &mut [f64], terms: impl IntoIterator<Item = f64>) {
    sums.iter_mut()
        .zip(terms)
        .for_each(|(sum, term)| *sum += term);
}
