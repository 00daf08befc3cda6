//! Random combinations of shapes, options, layouts and dtypes, forward and gradients, against the oracle.
//! `PROPTEST_CASES` sets how many (24), `ATTENTION_TEST_SEED` which.

use crate::case::{Case, Extent, seed};
use crate::dense::Layout;
use attention_cube::CausalAlignment;
use burn::tensor::DType;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// `[batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim]`; few head sizes, since each is
/// another kernel.
fn sizes() -> impl Strategy<Value = [usize; 7]> {
    let heads = select(vec![(1usize, 1usize), (2, 1), (4, 2), (3, 3), (5, 1)]);
    let dims = select(vec![(16usize, 16usize), (16, 32), (5, 5)]);
    (1usize..3, heads, 1usize..80, 1usize..140, dims).prop_map(
        |(batch, (q_heads, kv_heads), q_len, kv_len, (head_dim, value_dim))| {
            [batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim]
        },
    )
}

fn extent() -> impl Strategy<Value = Extent> {
    proptest::array::uniform4(any::<bool>())
}

/// Mostly `None`: combinations of two or three options, not of all.
fn rarely<S: Strategy>(strategy: S) -> impl Strategy<Value = Option<S::Value>> {
    option::weighted(0.3, strategy)
}

fn structure(case: Case) -> impl Strategy<Value = Case> {
    let Case {
        batch,
        q_len,
        kv_len,
        ..
    } = case;
    let ids = (vec(-2i64..3, batch * q_len), vec(-2i64..3, batch * kv_len));
    (
        option::of(select(vec![
            CausalAlignment::BottomRight,
            CausalAlignment::TopLeft,
        ])),
        rarely(0..kv_len + 3),
        rarely(0..kv_len + 3),
        rarely(extent()),
        rarely(vec(0..kv_len as i64 + 5, batch)),
        rarely(ids),
    )
        .prop_map(
            move |(causal, left, right, mask, kv_lengths, segments)| Case {
                causal,
                window: (left, right),
                mask,
                kv_lengths,
                segments,
                ..case.clone()
            },
        )
}

/// Among the scores mostly, or of any size.
fn softcap() -> impl Strategy<Value = f64> {
    let any_size = (-2.0..8.0f64).prop_map(|power| 10f64.powf(power));
    prop_oneof![0.5..20.0f64, any_size, Just(f64::from(f32::MAX)),]
}

fn scores(case: Case) -> impl Strategy<Value = Case> {
    (
        rarely(-1.0..1.0f64),
        rarely(softcap()),
        rarely(extent()),
        prop::bool::weighted(0.3),
        any::<bool>(),
        select(vec![DType::F32, DType::F32, DType::F16, DType::BF16]),
        any::<bool>(),
    )
        .prop_map(
            move |(scale, softcap, bias, sinks, lse_gradient, dtype, f32_extras)| Case {
                scale,
                softcap,
                bias,
                sinks,
                lse_gradient,
                dtype,
                f32_extras,
                ..case.clone()
            },
        )
}

fn layouts(case: Case) -> impl Strategy<Value = Case> {
    let any_layout = || select(Layout::ALL.to_vec());
    let dense = select(vec![
        Layout::Contiguous,
        Layout::HeadsLast,
        Layout::Transposed,
    ]);
    (
        any_layout(),
        any_layout(),
        any_layout(),
        dense,
        any::<bool>(),
    )
        .prop_map(move |(query, key, value, gradient, expanded)| Case {
            layouts: [query, key, value, gradient],
            expanded,
            ..case.clone()
        })
}

#[test]
fn any_combination() {
    let cases = match std::env::var("PROPTEST_CASES") {
        Ok(cases) => cases
            .parse()
            .unwrap_or_else(|_| panic!("PROPTEST_CASES={cases}: no number")),
        Err(_) => 24,
    };
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 60,
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed().to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let strategy = sizes()
        .prop_map(Case::new)
        .prop_flat_map(structure)
        .prop_flat_map(scores)
        .prop_flat_map(layouts);
    let result = TestRunner::new_with_rng(config, rng).run(&strategy, |case| {
        case.check();
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
}
