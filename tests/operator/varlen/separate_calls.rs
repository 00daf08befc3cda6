//! Tests of results and gradients. A packed call must give the same results as one call for each sequence. Rows outside
//! of all sequences hold NaN.

use super::{Options, Packed};
use crate::case::seed;
use crate::dense::read;
use crate::devices::{TestDevice, devices};
use attention_cube::varlen::try_varlen_attention;
use attention_cube::{CausalAlignment, attention_with_lse, reference};
use burn::tensor::{DType, Device, Tensor, TensorData};
use rand::{Rng, SeedableRng, rngs::StdRng};

const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const WIDTH: usize = 32;

/// The inputs of a call in f64, which include the tensors of the options.
struct Inputs {
    query: TensorData,
    key: TensorData,
    value: TensorData,
    output_gradient: TensorData,
    lse_gradient: TensorData,
    bias: TensorData,
    sinks: TensorData,
}

impl Inputs {
    /// Draws inputs that are rounded to `dtype`. Rows outside of all sequences are NaN.
    fn new(packed: &Packed, dtype: DType) -> Self {
        let mut rng = StdRng::seed_from_u64(seed() + packed.q_len as u64);
        let mut draw = |shape: &[usize]| {
            let count: usize = shape.iter().product();
            let values: Vec<f64> = (0..count).map(|_| rng.random_range(-1.5..1.5)).collect();
            let drawn = TensorData::new(values, shape.to_vec()).convert_dtype(dtype);
            drawn.convert_dtype(DType::F64)
        };
        let poisoned = |data: TensorData, bounds: &[usize]| {
            let shape = data.shape().clone();
            let columns: usize = shape[1..].iter().product();
            let mut values: Vec<f64> = data.try_into_vec().expect("the data is f64");
            let rows = bounds[0]..bounds[bounds.len() - 1];
            for (row, values) in values.chunks_exact_mut(columns).enumerate() {
                if !rows.contains(&row) {
                    values.fill(f64::NAN);
                }
            }
            TensorData::new(values, shape)
        };
        let (queries, keys) = (&packed.cu_seqlens_q, &packed.cu_seqlens_k);
        Self {
            query: poisoned(draw(&[packed.q_len, Q_HEADS, WIDTH]), queries),
            key: poisoned(draw(&[packed.kv_len, KV_HEADS, WIDTH]), keys),
            value: poisoned(draw(&[packed.kv_len, KV_HEADS, WIDTH]), keys),
            output_gradient: poisoned(draw(&[packed.q_len, Q_HEADS, WIDTH]), queries),
            lse_gradient: draw(&[Q_HEADS, packed.q_len]),
            bias: draw(&[1, Q_HEADS, packed.q_len, packed.kv_len]),
            sinks: draw(&[Q_HEADS]),
        }
    }
}

/// The output, the logsumexp, and the gradients of query, keys, values and bias. Without a bias, its gradient is empty.
type Results = [Vec<f64>; 6];

/// The way in which a run computes the results.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Method {
    /// The reference computes one call per sequence.
    Reference,
    /// The operator computes one call per sequence.
    Alone,
    /// The operator computes one call over all sequences.
    Packed,
}

fn tensor<const D: usize>(data: &TensorData, device: &Device, dtype: DType) -> Tensor<D> {
    Tensor::from_data(data.clone().convert_dtype(dtype), (device, dtype))
}

fn run(
    packed: &Packed,
    inputs: &Inputs,
    options: &Options,
    method: Method,
    device: &Device,
    dtype: DType,
) -> Results {
    let device = device.clone().autodiff();
    let lse_dtype = match dtype {
        DType::F64 => dtype,
        _ => DType::F32,
    };
    let leaf = |data: &TensorData| tensor::<3>(data, &device, dtype).require_grad();
    let (query, key, value) = (leaf(&inputs.query), leaf(&inputs.key), leaf(&inputs.value));
    let output_gradient = tensor::<3>(&inputs.output_gradient, &device, dtype);
    let lse_gradient = tensor::<2>(&inputs.lse_gradient, &device, lse_dtype);
    let bias = tensor::<4>(&inputs.bias, &device, dtype).require_grad();
    let options_of = |[q0, q1, k0, k1]: [usize; 4]| {
        let mut given = options.positions();
        if options.others {
            let bias = bias.clone().slice([0..1, 0..Q_HEADS, q0..q1, k0..k1]);
            // The mask hides one key in eight.
            let mask = bias.clone().without_autodiff().greater_elem(-1.125);
            let sinks = tensor(&inputs.sinks, &device, lse_dtype);
            given = given.softcap(3.0).bias(bias).mask(mask).sinks(sinks);
        }
        given
    };
    let (output, lse, loss) = if method == Method::Packed {
        let all = [0, packed.q_len, 0, packed.kv_len];
        let (output, lse) = try_varlen_attention(
            query.clone(),
            key.clone(),
            value.clone(),
            &packed.on(&device),
            options_of(all),
        )
        .expect("the arguments fit");
        let weighted = output.clone().cast(lse_dtype) * output_gradient.cast(lse_dtype);
        let loss = weighted.sum() + (lse.clone() * lse_gradient).sum();
        (read(output), read(lse), loss)
    } else {
        let attend = match method {
            Method::Reference => reference::attention,
            _ => attention_with_lse,
        };
        // Rows outside of all sequences see no key. Their output is 0, and their logsumexp is −∞ or the sink.
        let mut of_output = vec![0.0; packed.q_len * Q_HEADS * WIDTH];
        let sinks: Vec<f64> = match options.others {
            true => inputs.sinks.iter().collect(),
            false => vec![f64::NEG_INFINITY; Q_HEADS],
        };
        let mut of_lse: Vec<f64> = (sinks.iter())
            .flat_map(|sink| std::iter::repeat_n(*sink, packed.q_len))
            .collect();
        let mut losses: Option<Tensor<1>> = None;
        let is_empty = |[q0, q1, k0, k1]: &[usize; 4]| q0 == q1 || k0 == k1;
        for [q0, q1, k0, k1] in packed.sequences().filter(|bounds| !is_empty(bounds)) {
            let rows = |rows: &Tensor<3>, first: usize, end: usize| {
                let [_, heads, columns] = rows.dims();
                let rows = rows.clone().slice([first..end, 0..heads, 0..columns]);
                rows.swap_dims(0, 1).unsqueeze::<4>()
            };
            let (output, lse) = attend(
                rows(&query, q0, q1),
                rows(&key, k0, k1),
                rows(&value, k0, k1),
                options_of([q0, q1, k0, k1]),
            )
            .expect("the arguments fit");
            let gradient = rows(&output_gradient, q0, q1).cast(lse_dtype);
            let weighted = (output.clone().cast(lse_dtype) * gradient).sum();
            let gradient = lse_gradient.clone().slice([0..Q_HEADS, q0..q1]);
            let loss = weighted + (lse.clone() * gradient.unsqueeze()).sum();
            losses = Some(match losses {
                Some(losses) => losses + loss,
                None => loss,
            });
            let rows = output.squeeze_dim::<3>(0).swap_dims(0, 1);
            of_output[q0 * Q_HEADS * WIDTH..q1 * Q_HEADS * WIDTH].copy_from_slice(&read(rows));
            for (head, lse) in read(lse).chunks_exact(q1 - q0).enumerate() {
                of_lse[head * packed.q_len..][q0..q1].copy_from_slice(lse);
            }
        }
        let loss = losses.expect("a sequence has a query");
        (of_output, of_lse, loss)
    };
    let gradients = loss.backward();
    let of = |leaf: &Tensor<3>| read(leaf.grad(&gradients).expect("the leaf has a gradient"));
    let of_bias = match options.others {
        true => read(bias.grad(&gradients).expect("the bias has a gradient")),
        false => Vec::new(),
    };
    let (query, key, value) = (of(&query), of(&key), of(&value));
    [output, lse, query, key, value, of_bias]
}

/// Returns the root mean square of the differences between two results. Equal infinities have no difference.
fn error(found: &[f64], exact: &[f64]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let differences = found.iter().zip(exact).map(|(a, b)| match a == b {
        true => 0.0,
        false => a - b,
    });
    let squares: f64 = differences.map(|difference| difference * difference).sum();
    (squares / exact.len().max(1) as f64).sqrt()
}

/// Checks that the packed call's error is at most twice the error of separate calls. The output and the gradients of rows
/// outside of all sequences must be 0.
fn check_on(device: &TestDevice, packed: &Packed, options: &Options, dtype: DType) {
    let inputs = Inputs::new(packed, dtype);
    let run = |method, device: &Device, dtype| run(packed, &inputs, options, method, device, dtype);
    let exact = run(Method::Reference, &Device::flex(), DType::F64);
    let alone = run(Method::Alone, &device.device, dtype);
    let found = run(Method::Packed, &device.device, dtype);
    let columns = Q_HEADS * WIDTH;
    let used = packed.cu_seqlens_q[0]..packed.cu_seqlens_q[packed.cu_seqlens_q.len() - 1];
    for result in [&found[0], &found[2]] {
        for (row, values) in result.chunks_exact(columns).enumerate() {
            let is_zero = values.iter().all(|x| *x == 0.0);
            assert!(used.contains(&row) || is_zero, "{} row {row}", device.name);
        }
    }
    let names = ["output", "logsumexp", "query", "key", "value", "bias"];
    for (index, name) in names.into_iter().enumerate() {
        let exact = &exact[index];
        let finite: Vec<f64> = exact.iter().copied().filter(|x| x.is_finite()).collect();
        let size = error(&finite, &vec![0.0; finite.len()]);
        // The error of the separate calls may be 0 by chance. The check therefore always allows an error of one f32
        // rounding.
        let allowed = 2.0 * error(&alone[index], exact) + 1.2e-7 * size;
        let found = error(&found[index], exact);
        assert!(
            found <= allowed && allowed.is_finite(),
            "{} {dtype:?} {options:?}: {name}: {found:e}, allowed {allowed:e}",
            device.name
        );
    }
}

fn check(packed: &Packed, options: Options) {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if device.supports(dtype) {
                check_on(&device, packed, &options, dtype);
            }
        }
    }
}

/// Returns six sequences with equal and unequal numbers of queries and keys. One sequence has no queries, one sequence has no
/// keys, and one sequence has more queries than keys.
fn mixed() -> Packed {
    Packed::new(&[(70, 70), (0, 5), (1, 90), (33, 0), (64, 20), (5, 5)])
}

#[test]
fn varlen_without_options_equals_separate_calls() {
    check(&mixed(), Options::default());
}

#[test]
fn varlen_causal_equals_separate_calls() {
    for alignment in [CausalAlignment::BottomRight, CausalAlignment::TopLeft] {
        check(
            &mixed(),
            Options {
                causal: Some(alignment),
                ..Options::default()
            },
        );
    }
}

#[test]
fn varlen_with_windows_equals_separate_calls() {
    for (causal, window) in [
        (None, (Some(11), Some(6))),
        (None, (None, Some(3))),
        (Some(CausalAlignment::BottomRight), (Some(15), Some(2))),
        (Some(CausalAlignment::TopLeft), (Some(usize::MAX), None)),
    ] {
        check(
            &mixed(),
            Options {
                causal,
                window: Some(window),
                ..Options::default()
            },
        );
    }
}

#[test]
fn varlen_with_other_options_equals_separate_calls() {
    check(
        &mixed(),
        Options {
            causal: Some(CausalAlignment::BottomRight),
            window: None,
            others: true,
        },
    );
}
